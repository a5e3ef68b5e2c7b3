"""How long the other stages of a route take, from the times that come back with each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshnet.node.batching import Costs, Lane, Pipeline
from meshnet.node.health import Ewma
from meshnet.protocol import dataplane_pb2 as pb

LOOK_EVERY = 4
REPORT_EVERY = 32
"""Results of a lane between two that are looked at, and between two reports."""


def plain(line: pb.StageTime) -> bool:
    """Whether a stage's line is of one decode step of one row."""
    return line.steps == 1 and line.rows == 1 and line.batch >= 1


class PipelineMeter:
    """Per lane of this head, smoothed; `note` says now and then what the executor should know."""

    def __init__(self) -> None:
        self._ratios: dict[Lane, list[Ewma]] = {}
        self._trips: dict[Lane, Ewma] = {}
        self._count: dict[Lane, int] = {}

    def note(
        self, lane: Lane, times: Sequence[pb.StageTime], costs_of: Callable[[Lane], Costs | None]
    ) -> Pipeline | None:
        """`times`: of one decode step, head first."""
        count = self._count[lane] = self._count.get(lane, 0) + 1
        if len(times) < 2 or count % LOOK_EVERY or any(not plain(line) for line in times):
            return None
        costs = costs_of(lane)
        if costs is None:
            return None
        own = times[0].compute_ms / max(costs.decode_ms(times[0].batch), 1e-6)
        ratios = self._ratios.get(lane)
        if ratios is None or len(ratios) != len(times) - 1:
            ratios = self._ratios[lane] = [Ewma() for _ in times[1:]]
        for index, line in enumerate(times[1:]):
            expected = costs.decode_ms(line.batch) * own
            ratios[index] = ratios[index].after(line.compute_ms / max(expected, 1e-6))
        self._trips[lane] = self._trips.get(lane, Ewma()).after(sum(line.link_ms for line in times))
        if count % REPORT_EVERY:
            return None
        return Pipeline(tuple(ratio.value or 1.0 for ratio in ratios), self._trips[lane].value or 0.0)
