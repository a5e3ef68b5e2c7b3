"""Reading request bodies within limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from meshnet.protocol.errors import ApiError
from meshnet.tracker.auth import header
from meshnet.tracker.patience import within

Receive = Callable[[], Awaitable[Any]]


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(scope: Any, receive: Receive, limit: int, timeout_s: float) -> bytes:
    """The whole body. Raises ApiError (413, 408) and ClientGone."""
    announced = header(scope, b"content-length")
    if announced is not None and announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    message = await _receive(receive, timeout_s)
    body: bytes = message.get("body", b"")
    if message.get("more_body", False):
        parts = [body]
        size = len(body)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while message.get("more_body", False):
            left = deadline - asyncio.get_running_loop().time()
            message = await _receive(receive, left)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _too_large(limit)
        body = b"".join(parts)
    if len(body) > limit:
        raise _too_large(limit)
    return body


async def _receive(receive: Receive, timeout_s: float) -> Any:
    try:
        message = await within(timeout_s, receive())
    except TimeoutError:
        raise ApiError(408, "the request's body did not arrive in time", code="slow_request") from None
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


def check_json(scope: Any) -> None:
    """Raises ApiError (415) for a body that says it is something else than JSON."""
    kind = header(scope, b"content-type")
    if kind is None:
        return
    media = kind.partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise ApiError(
            415,
            f"the content-type is {media!r}; this takes application/json",
            code="unsupported_media_type",
        )


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request's body is larger than {limit} bytes", code="request_too_large")
