"""What has come of a call so far, over all its attempts: tokens, ends of choices, work of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshnet.protocol.calls import (
    AnyEvent,
    CallError,
    ChoiceEnd,
    Done,
    LostNode,
    Opened,
    Prefill,
    Rerouted,
    Stages,
    StageTimes,
    TokenEvent,
)
from meshnet.tracker.live import LiveCall

WorkKey = tuple[int, str, int, int]
"""(attempt, node id, first layer, last layer): each new head is an attempt, whose sums begin anew."""


class BadEvent(Exception):
    """The head sent what no head sends; the text says what."""


@dataclass(slots=True)
class Gathered:
    """`ids` and `ends` by choice; what a new head needs to go on where the old one stopped."""

    n: int
    ids: list[list[int]] = field(default_factory=list)
    ends: dict[int, ChoiceEnd] = field(default_factory=dict)
    work: dict[WorkKey, StageTimes] = field(default_factory=dict)
    spans: tuple[tuple[int, int], ...] = ()
    attempt: int = 0

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begins anew, for another model."""
        self.ids = [[] for _ in range(self.n)]
        self.ends = {}
        self.spans = ()

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    def resume(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(ids) for ids in self.ids) if any(self.ids) else ()

    def take(
        self, events: Sequence[AnyEvent], live: LiveCall
    ) -> tuple[int, int, LostNode | CallError | Done | None]:
        """Counts events in order, up to one that ends the attempt or breaks it.

        (events counted, tokens among them, that event). Raises BadEvent.
        """
        fresh = 0
        for index, event in enumerate(events):
            if type(event) is TokenEvent:
                if not 0 <= event.c < self.n or event.c in self.ends:
                    raise BadEvent(f"it sent tokens of choice {event.c}")
                self.ids[event.c].extend(event.ids)
                fresh += len(event.ids)
            elif isinstance(event, ChoiceEnd):
                if not 0 <= event.c < self.n or event.c in self.ends:
                    raise BadEvent(f"it ended choice {event.c}")
                self.ends[event.c] = event
            elif isinstance(event, Done):
                if len(self.ends) < self.n:
                    raise BadEvent("it was done before every choice had ended")
                return index, fresh, event
            elif isinstance(event, LostNode | CallError):
                return index, fresh, event
            else:
                self._note(event, live)
        return len(events), fresh, None

    def _note(self, event: AnyEvent, live: LiveCall) -> None:
        match event:
            case Opened():
                live.prompt_tokens = event.prompt_tokens
                live.reused_tokens = max(live.reused_tokens, event.reused_tokens)
                self.spans = self.spans or event.spans
            case Prefill():
                live.prefill_done = event.done
            case Stages():
                live.stage_times = event.stages
                for times in event.stages:
                    self.work[self.attempt, times.node_id, times.start_layer, times.end_layer] = times
            case Rerouted():
                live.note("resumed", replayed_rows=event.replayed_rows, ms=round(event.ms, 1))
            case _:
                pass
