"""What comes of a call."""

from __future__ import annotations

from dataclasses import dataclass

from meshnet.protocol.errors import ApiError
from meshnet.tracker.calls import End
from meshnet.tracker.gathering import Gathered
from meshnet.tracker.jobs import Chosen


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a call, for the books, the statistics and the checks."""

    end: End
    model: str
    gathered: Gathered
    chosen: Chosen | None
    numerics: dict[str, str]


def as_error(end: End, retry_after: int | None) -> ApiError:
    """A call's end in OpenAI's error shape."""
    if end.status < 500:
        kind = "rate_limit_error" if end.status == 429 else "invalid_request_error"
    else:
        kind = "server_error"
    return ApiError(
        end.status, end.message, type=kind, code=end.code, param=end.param, retry_after=retry_after
    )
