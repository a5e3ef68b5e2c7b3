"""Live calls: every call from acceptance to its end, then the last that ended. Bounded, without any text."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from meshnet.protocol.calls import StageTimes
from meshnet.routing import Stage
from meshnet.tracker.calls import ENDED, Phase

MAX_TIMELINE = 200


@dataclass(slots=True)
class Moment:
    """One entry of a timeline; `at` in seconds of the monotonic clock."""

    at: float
    event: str
    detail: dict[str, Any]


@dataclass(slots=True)
class LiveCall:
    """What is known of one call. `key_id` decides who may see it."""

    call_id: str
    request_id: str
    model: str
    key: str
    key_id: int
    kind: str
    stream: bool
    accepted_ms: int
    accepted_at: float
    phase: Phase = "accepted"
    stages: tuple[Stage, ...] = ()
    stage_times: tuple[StageTimes, ...] = ()
    prompt_tokens: int = 0
    prefill_done: int = 0
    reused_tokens: int = 0
    output_tokens: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    queue_position: int | None = None
    ended_ms: int | None = None
    ended_at: float | None = None
    finish_reason: str | None = None
    error: dict[str, str] | None = None
    reroutes: int = 0
    degraded: bool = False
    numerics_changed: bool = False
    timeline: list[Moment] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def tokens_per_second(self) -> float:
        """Output tokens after the first over the time since it; 0 before the second token."""
        if self.first_token_at is None or self.last_token_at is None or self.output_tokens < 2:
            return 0.0
        seconds = self.last_token_at - self.first_token_at
        return (self.output_tokens - 1) / seconds if seconds > 0 else 0.0

    def note(self, event: str, **detail: Any) -> None:
        """Adds to the timeline; beyond its bound only the end is still noted."""
        if len(self.timeline) < MAX_TIMELINE or event in ENDED:
            self.timeline.append(Moment(time.monotonic(), event, detail))

    def view(self, name_of: Callable[[str], str], *, timeline: bool = False) -> dict[str, Any]:
        """The value `Call` of docs/api.md."""
        now = self.ended_at if self.ended_at is not None else time.monotonic()
        shown: dict[str, Any] = {
            "id": self.call_id,
            "request_id": self.request_id,
            "model": self.model,
            "key": self.key,
            "kind": self.kind,
            "stream": self.stream,
            "phase": self.phase,
            "stages": self._stages(name_of),
            "prompt_tokens": self.prompt_tokens,
            "prefill_done": self.prefill_done,
            "output_tokens": self.output_tokens,
            "tokens_per_second": round(self.tokens_per_second, 2),
            "ttft_ms": None
            if self.first_token_at is None
            else round((self.first_token_at - self.accepted_at) * 1000, 1),
            "queue_position": self.queue_position,
            "accepted_ms": self.accepted_ms,
            "ended_ms": self.ended_ms,
            "elapsed_ms": round((now - self.accepted_at) * 1000, 1),
            "finish_reason": self.finish_reason,
            "error": self.error,
            "reroutes": self.reroutes,
            "degraded": self.degraded,
            "numerics_changed": self.numerics_changed,
            "tracker": None,
        }
        if timeline:
            shown["timeline"] = [
                {"ms": round((m.at - self.accepted_at) * 1000, 1), "event": m.event, "detail": m.detail}
                for m in self.timeline
            ]
        return shown

    def _stages(self, name_of: Callable[[str], str]) -> list[dict[str, Any]]:
        measured = {(t.node_id, t.start_layer): t for t in self.stage_times}
        return [
            _stage(stage, measured.get((stage.node_id, stage.start_layer)), name_of(stage.node_id))
            for stage in self.stages
        ]


def _stage(stage: Stage, times: StageTimes | None, name: str) -> dict[str, Any]:
    return {
        "node_id": stage.node_id,
        "name": name,
        "start_layer": stage.start_layer,
        "end_layer": stage.end_layer,
        "compute_ms": 0.0 if times is None else round(times.compute_ms, 2),
        "queue_ms": 0.0 if times is None else round(times.queue_ms, 2),
        "link_ms": 0.0 if times is None else round(times.link_ms, 2),
        "tokens": 0 if times is None else times.prefill_tokens + times.decode_tokens,
    }


class LiveTable:
    """Calls in flight, and the last `kept` that ended."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._running: OrderedDict[str, LiveCall] = OrderedDict()
        self._ended: OrderedDict[str, LiveCall] = OrderedDict()

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def add(self, call: LiveCall) -> None:
        self._running[call.call_id] = call

    def end(self, call: LiveCall) -> list[LiveCall]:
        """Moves a call to the ended ones; returns those that are dropped for it."""
        self._running.pop(call.call_id, None)
        self._ended[call.call_id] = call
        dropped = []
        while len(self._ended) > self._kept:
            dropped.append(self._ended.popitem(last=False)[1])
        return dropped

    def get(self, call_id: str) -> LiveCall | None:
        return self._running.get(call_id) or self._ended.get(call_id)

    def running(self) -> Iterator[LiveCall]:
        return iter(list(self._running.values()))

    def listed(self) -> Iterator[LiveCall]:
        """In flight first, oldest first; then the ended, newest first."""
        yield from list(self._running.values())
        yield from list(reversed(self._ended.values()))
