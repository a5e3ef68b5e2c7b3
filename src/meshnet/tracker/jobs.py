"""What is asked of placement, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from meshnet.routing import NodeTimes, RoutingRequest, Stage
from meshnet.tracker.planning import View
from meshnet.tracker.reservations import Need


class Experience(Protocol):
    """What earlier calls showed of nodes: routing believes it more than what nodes say of themselves."""

    def times(self, node_id: str, model: str, told: NodeTimes) -> NodeTimes: ...

    def distrusted(self) -> Mapping[str, str]:
        """Nodes to leave out where another route exists, with the reason as the rest of a sentence."""


class NoPlace(Exception):
    """There is no route for the call. `code`: no_route, queue_full, queue_timeout, gap, too_large."""

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after


class Job(msgspec.Struct, frozen=True):
    """What a call needs. `need` is per stage, `forced` names nodes in order."""

    call_id: str
    key: str
    model: str
    need: Need
    request: RoutingRequest
    excluded: Mapping[str, str] = {}
    forced: tuple[str, ...] = ()
    urgent: bool = False
    cached_tokens: Mapping[str, int] = {}

    @property
    def cost(self) -> float:
        """Expected work in tokens, for turns in the queue."""
        return float(self.request.prompt_tokens + self.need.slots * self.request.expected_tokens)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A route that is held. `reason` says in one sentence why it was chosen."""

    stages: tuple[Stage, ...]
    view: View
    reason: str
