"""What calls showed of nodes, put into what routing believes; and calls' ends as samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshnet.protocol.calls import StageTimes
from meshnet.routing import NodeTimes
from meshnet.tracker.books.facade import Books
from meshnet.tracker.books.statistics import CallSample, observed
from meshnet.tracker.books.statistics import StageTimes as SampleStage
from meshnet.tracker.books.trust import tempered
from meshnet.tracker.results import Result
from meshnet.tracker.running import Run


class BooksExperience:
    """Measured by the tracker over a rolling window (books/statistics), tempered by trust (books/trust)."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def times(self, node_id: str, model: str, told: NodeTimes) -> NodeTimes:
        now = self._books.clock()
        seen = observed(told, self._books.statistics.node(node_id, model, now))
        return tempered(seen, self._books.trust.score(node_id, now))

    def distrusted(self) -> Mapping[str, str]:
        return self._books.trust.distrusted(self._books.clock())

    def trust(self, node_id: str) -> float:
        return self._books.trust.score(node_id, self._books.clock())

    def view(self) -> dict[str, Any]:
        """The figures that the API shows."""
        now = self._books.clock()
        statistics = self._books.statistics
        return {
            "window_ms": statistics.window_ms,
            "min_output_tokens": statistics.min_output_tokens,
            "nodes": [
                {"node_id": v.node_id, "model": v.model, "trust": self.trust(v.node_id), **_plain(v.figures)}
                for v in statistics.nodes(now)
            ],
            "routes": [
                {
                    "model": v.model,
                    "stages": [
                        {"node_id": node_id, "start_layer": first, "end_layer": last}
                        for node_id, first, last in v.stages
                    ],
                    **_plain(v.figures),
                }
                for v in statistics.routes(now)
            ],
        }


def _plain(figures: Any) -> dict[str, Any]:
    names = type(figures).__dataclass_fields__
    return {name: getattr(figures, name) for name in names}


def sample_of(run: Run, result: Result, now_ms: int, *, suspect: bool) -> CallSample:
    """A finished call for the statistics. Stages are those of the last attempt."""
    live = run.live
    ttft = None if live.first_token_at is None else (live.first_token_at - live.accepted_at) * 1000
    generation = 0.0
    if live.first_token_at is not None and live.last_token_at is not None:
        generation = (live.last_token_at - live.first_token_at) * 1000
    return CallSample(
        call_id=run.order.call_id,
        model=result.model,
        at=now_ms,
        outcome=result.end.outcome,
        stages=tuple(_stage(times) for times in live.stage_times),
        prompt_tokens=live.prompt_tokens,
        output_tokens=result.gathered.tokens,
        ttft_ms=ttft,
        generation_ms=generation,
        rerouted=live.reroutes > 0,
        suspect=suspect,
        failed_nodes=tuple(sorted(run.state.excluded)),
    )


def _stage(times: StageTimes) -> SampleStage:
    prefill_ms, decode_ms = times.prefill_ms, times.decode_ms
    if prefill_ms + decode_ms == 0:
        # A head that does not tell them apart: by rows, which is what it can mean at most.
        rows = times.prefill_tokens + times.decode_tokens
        share = times.prefill_tokens / rows if rows else 0.0
        prefill_ms, decode_ms = times.compute_ms * share, times.compute_ms * (1 - share)
    return SampleStage(
        node_id=times.node_id,
        start_layer=times.start_layer,
        end_layer=times.end_layer,
        prefill_tokens=times.prefill_tokens,
        prefill_ms=prefill_ms,
        decode_tokens=times.decode_tokens,
        decode_ms=decode_ms,
        link_ms=times.link_ms / times.steps if times.steps else None,
    )
