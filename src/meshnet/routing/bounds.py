"""Bounds on what a pipeline can cost when its total is not the sum of its edges, and first good pipelines.

A pipeline's total is additive over its stages and hops, plus the link from the tail back to the head, plus
`repeats` times its slowest chunk. Backward passes give the additive cost to go from every border and node
while no stage's chunk exceeds a limit. They bound from below what a pipeline can cost whose slowest chunk
lies in an interval; the pipelines they trace bound the least from above. Intervals that cannot hold the least
are dropped, the others divided.

Arrays hold whole numbers of 1e-9 ms: int64, or Python integers where int64 could overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshnet.routing.borders import ANY, END, Fork

Ints = NDArray[Any]
"""Units of 1e-9 ms: int64, or object where int64 could overflow."""

INT64_ROOM = 1 << 58
INTERVALS = 12
"""Intervals of the slowest chunk that are looked at together."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """What the search needs of N nodes over B borders, in units of 1e-9 ms. Nodes are sorted by id.

    borders      the layer borders where any node can start or stop, ascending, the window's two ends included
    can          (N, B, B): the node can run from one border to another as one stage
    stage        per node: once per stage; layer: per layer; head, tail: once at that end of the route
    chunk_layer  per node: one prefill chunk through one layer
    hop          [a][b]: what going on from a to b adds; hop_chunk: the part of it that is the chunk's trip
    back         [tail][head]
    repeats      how often the slowest chunk is waited for again: chunks - 1
    """

    node_ids: tuple[str, ...]
    borders: tuple[int, ...]
    can: NDArray[np.bool_]
    stage: list[int]
    layer: list[int]
    head: list[int]
    tail: list[int]
    chunk_layer: list[int]
    hop: list[list[int]]
    hop_chunk: list[list[int]]
    back: list[list[int]]
    repeats: int

    def without(self, nodes: frozenset[str]) -> Mesh:
        """The mesh of the other nodes, over the same borders."""
        keep = [index for index, node_id in enumerate(self.node_ids) if node_id not in nodes]

        def column(values: Sequence[int]) -> list[int]:
            return [values[index] for index in keep]

        return replace(
            self,
            node_ids=tuple(self.node_ids[index] for index in keep),
            can=self.can[keep],
            stage=column(self.stage),
            layer=column(self.layer),
            head=column(self.head),
            tail=column(self.tail),
            chunk_layer=column(self.chunk_layer),
            hop=[column(self.hop[index]) for index in keep],
            hop_chunk=[column(self.hop_chunk[index]) for index in keep],
            back=[column(self.back[index]) for index in keep],
        )

    def forked(self, fork: Fork) -> Mesh:
        """The mesh in which a pipeline without returns keeps to the fork: what is barred costs `most()`."""
        if fork == ANY:
            return self
        place = {node_id: index for index, node_id in enumerate(self.node_ids)}
        prefix = [place[node_id] for node_id in fork.prefix]
        barred = {place[node_id] for node_id in fork.barred if node_id in place}
        never = self.most()
        everyone = set(range(len(self.node_ids)))
        head, tail, hop = list(self.head), list(self.tail), [list(row) for row in self.hop]

        def bar(costs: list[int], nodes: set[int]) -> None:
            for node in nodes:
                costs[node] = never

        bar(head, everyone - {prefix[0]} if prefix else barred)
        bar(tail, set(prefix[:-1]) | (set(prefix[-1:]) if END in fork.barred else set()))
        for at, after in pairwise(prefix):
            bar(hop[at], everyone - {after})
        if prefix:
            bar(hop[prefix[-1]], barred)
        return replace(self, head=head, tail=tail, hop=hop)

    def over(self, places: Sequence[int]) -> Mesh:
        """The mesh over some of its borders, given by index."""
        can = self.can[:, places][:, :, places]
        return replace(self, borders=tuple(self.borders[place] for place in places), can=can)

    def most(self) -> int:
        """More than any pipeline that visits each border at most once can cost."""
        layers, steps = self.borders[-1] - self.borders[0], len(self.borders)
        hop, hop_chunk, back = (max(map(max, table)) for table in (self.hop, self.hop_chunk, self.back))
        ends = max(self.head) + max(self.tail) + back
        additive = layers * max(self.layer) + steps * (max(self.stage) + hop) + ends
        return 1 + additive + self.repeats * (layers * max(self.chunk_layer) + steps * hop_chunk)

    def total(self, nodes: Sequence[int], cuts: Sequence[int]) -> tuple[int, int] | None:
        """What a pipeline costs in all, and its slowest chunk; None where a node cannot run its part.

        `nodes` and `cuts` are indices; the pipeline's stages lie between adjoining cuts. A node that comes
        back spends the time of all its stages on a chunk.
        """
        units = self.head[nodes[0]] + self.tail[nodes[-1]] + self.back[nodes[-1]][nodes[0]]
        chunks: dict[int, int] = {}
        before = None
        for node, i, j in zip(nodes, cuts, cuts[1:], strict=False):
            if not self.can[node, i, j]:
                return None
            layers = self.borders[j] - self.borders[i]
            units += self.stage[node] + self.layer[node] * layers
            chunk = self.chunk_layer[node] * layers
            if before is not None:
                units += self.hop[before][node]
                chunk += self.hop_chunk[before][node]
            chunks[node] = chunks.get(node, 0) + chunk
            before = node
        slowest = max(chunks.values())
        return units + self.repeats * slowest, slowest

    def shifted(self, nodes: Sequence[int], cuts: list[int]) -> tuple[int, list[int]]:
        """Moves one cut at a time, by ever smaller steps, while the total falls. Returns total and cuts."""
        total = self.total(nodes, cuts)
        assert total is not None
        units = total[0]
        step = max((len(self.borders) - 1) // 8, 1)
        while step:
            better = False
            for place in range(1, len(cuts) - 1):
                for shift in (-step, step):
                    tried = [*cuts[:place], cuts[place] + shift, *cuts[place + 1 :]]
                    if not cuts[place - 1] < tried[place] < cuts[place + 1]:
                        continue
                    total = self.total(nodes, tried)
                    if total is not None and total[0] < units:
                        units, cuts, better = total[0], tried, True
            if not better:
                step //= 2
        return units, cuts


class Traced(NamedTuple):
    """A pipeline that was found: compared by total, number of stages, nodes, later ends."""

    units: int
    stages: int
    nodes: tuple[int, ...]
    ends: tuple[int, ...]


def traced(mesh: Mesh, units: int, nodes: Sequence[int], cuts: Sequence[int]) -> Traced:
    """A pipeline of indices in the form that is compared."""
    return Traced(units, len(nodes), tuple(nodes), tuple(-mesh.borders[cut] for cut in cuts[1:]))


class Interval(NamedTuple):
    """Pipelines whose slowest chunk takes at least `low` and at most `high`.

    left[i, n]   the least additive cost from border i on, after a stage on n
    begun[i, n]  the same with a stage on n starting at border i
    """

    low: int
    high: int
    left: Ints
    begun: Ints


class Bounds:
    """The mesh as arrays, the intervals that can hold its least pipeline, and the best pipeline so far.

    With `returns`, a node may come back in a pipeline. `intervals` is empty where no pipeline of two stages
    or more is complete; `best` may still be None where there is one. Needs two nodes and three borders.
    """

    def __init__(self, mesh: Mesh, rounds: int, returns: bool) -> None:
        self.returns = returns
        self.mesh = mesh
        most = mesh.most()
        self.kind: Any = np.int64 if most < INT64_ROOM else object
        self.none = 4 * max(most, INT64_ROOM)
        self.head, self.tail = self._array(mesh.head), self._array(mesh.tail)
        self.chunk_layer = self._array(mesh.chunk_layer)
        self.hop, self.hop_chunk = self._array(mesh.hop), self._array(mesh.hop_chunk)
        self.back = self._array(mesh.back)
        marks = self._array(mesh.borders)
        self.length = marks[None, :] - marks[:, None]
        whole = self._array(mesh.stage)[:, None, None] + self._array(mesh.layer)[:, None, None] * self.length
        self.stage_units = np.where(mesh.can, whole, self.none)
        self.same = np.eye(len(mesh.node_ids), dtype=bool)
        # A chunk takes at least: over the best link into the node (none into the head), through its layers.
        link = np.where(self.same, self.none, self.hop_chunk).min(axis=0)
        self.least_chunk = self.chunk_layer[:, None, None] * self.length + link[:, None, None]
        self.least_chunk[:, 0, :] -= link[:, None]
        self.best: Traced | None = None
        self.intervals: list[Interval] = []
        self._divide(rounds)

    def to_go(self, slowest: Ints, additive: list[Ints]) -> Ints:
        """The least that is still to come, chunks waited for again included.

        `slowest`: the slowest chunk so far; `additive`: the additive cost to go, one array per interval.
        """
        result: Ints = np.full(1, self.none, dtype=self.kind)
        for interval, left in zip(self.intervals, additive, strict=True):
            cost = left + self.mesh.repeats * np.maximum(slowest, interval.low)
            result = np.minimum(result, np.where(slowest <= interval.high, cost, self.none))
        return result

    def offer(self, found: Traced) -> None:
        """Keeps the pipeline if it comes before the best so far."""
        if self.best is None or found < self.best:
            self.best = found

    def _array(self, values: Sequence[object]) -> Ints:
        return np.array(values, dtype=self.kind)

    @property
    def limit(self) -> int:
        """What a pipeline may cost at most to come before the best."""
        return self.none - 1 if self.best is None else self.best.units

    def _divide(self, rounds: int) -> None:
        (anything,) = self._swept([(0, self.none)])
        if self._least(anything) >= self.none:
            return
        slowest = self._trace(anything)
        if not self.mesh.repeats or not slowest:
            self.intervals = [anything]
            return
        beyond = Interval(slowest, self.none, anything.left, anything.begun)
        ranges = [(0, slowest)]
        for _ in range(rounds):
            pieces = max(INTERVALS // len(ranges), 2)
            cuts = [[low + (high - low) * k // pieces for k in range(pieces + 1)] for low, high in ranges]
            swept = self._swept([(a, b) for marks in cuts for a, b in pairwise(marks) if a < b])
            for interval in sorted(swept, key=self._least):
                if self._least(interval) <= self.limit:
                    self._trace(interval)
            self.intervals = [interval for interval in swept if self._least(interval) <= self.limit]
            ranges = [(interval.low, interval.high) for interval in self.intervals]
            if not ranges:
                break
        if self._least(beyond) <= self.limit:
            self.intervals.append(beyond)

    def _swept(self, ranges: list[tuple[int, int]]) -> list[Interval]:
        """Backward passes in which no stage's chunk takes longer than the upper end of its range."""
        nodes, last = len(self.mesh.node_ids), len(self.mesh.borders) - 1
        limits = self._array([high for _, high in ranges])[:, None, None]
        left = np.full((len(ranges), last + 1, nodes), self.none, dtype=self.kind)
        begun = np.full((len(ranges), last + 1, nodes), self.none, dtype=self.kind)
        left[:, last] = self.tail + self.back.min(axis=1)
        other = np.where(self.same, self.none, self.hop)[None]
        for i in range(last - 1, -1, -1):
            fits = self.least_chunk[None, :, i, i + 1 :] <= limits
            onward = self.stage_units[None, :, i, i + 1 :] + left[:, i + 1 :].transpose(0, 2, 1)
            begun[:, i] = np.minimum(np.where(fits, onward, self.none).min(axis=2), self.none)
            left[:, i] = np.minimum((other + begun[:, i][:, None, :]).min(axis=2), self.none)
        return [Interval(low, high, left[k], begun[k]) for k, (low, high) in enumerate(ranges)]

    def _starts(self, interval: Interval) -> Ints:
        """(N, B - 2): the least additive cost of a pipeline by its first node and cut."""
        inner = slice(1, len(self.mesh.borders) - 1)
        fits = self.least_chunk[:, 0, inner] <= interval.high
        starts = self.head[:, None] + self.stage_units[:, 0, inner] + interval.left[inner].T
        result: Ints = np.where(fits, starts, self.none)
        return result

    def _least(self, interval: Interval) -> int:
        """No pipeline whose slowest chunk lies in the interval costs less."""
        return int(self._starts(interval).min()) + self.mesh.repeats * interval.low

    def _trace(self, interval: Interval) -> int | None:
        """Follows the interval's pipeline of least additive cost, shifts its cuts while that helps, offers
        it.

        Nodes that it has visited are passed over unless they may come back, which can lead to a dead end.
        Returns the slowest chunk before the shifts; None where there is no pipeline or none was found.
        """
        last = len(self.mesh.borders) - 1
        starts = self._starts(interval)
        if starts.min() >= self.none:
            return None
        node, end = (int(x) for x in np.unravel_index(int(starts.argmin()), starts.shape))
        nodes, cuts = [node], [0, end + 1]
        barred = self.same[node].copy()
        while cuts[-1] < last:
            i = cuts[-1]
            onward = np.where(barred, self.none, self.hop[node] + interval.begun[i])
            node = int(onward.argmin())
            if onward[node] >= self.none:
                return None
            ends = self.stage_units[node, i, i + 1 :] + interval.left[i + 1 :, node]
            ends = np.where(self.least_chunk[node, i, i + 1 :] <= interval.high, ends, self.none)
            nodes.append(node)
            cuts.append(i + 1 + int(ends.argmin()))
            barred = self.same[node] if self.returns else barred | self.same[node]
        total = self.mesh.total(nodes, cuts)
        assert total is not None
        units, cuts = self.mesh.shifted(nodes, cuts)
        self.offer(traced(self.mesh, units, nodes, cuts))
        return total[1]
