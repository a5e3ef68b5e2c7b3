"""The search behind measured time: the least pipeline when a route's total is not the sum of its edges.

The total of a route is additive over its stages and hops, plus `repeats` times its slowest prefill chunk,
plus the link from the tail back to the head. A label therefore carries, per border and last node, its
additive cost, its slowest chunk so far, its head, and its stages. One label stands in for another at the same
border and node when no completion can turn the order round: its additive cost is no larger, with and without
the slowest chunk, after the most that the other head could gain on the way back from any tail; on equality
the order of ties decides. The additive cost to go, from one backward pass, bounds every label from below; the
best pipeline known bounds from above; what lies outside is dropped. The result is exact unless more than
`WIDTH` labels of one border and node remain (then the most promising are kept, and `exact` is False).

Arrays hold whole numbers of 1e-9 ms: int64, or Python integers where int64 could overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshnet.routing.route import Stage

Ints = NDArray[Any]
"""Units of 1e-9 ms: int64, or object where int64 could overflow."""

WIDTH = 64
"""Labels kept per border and last node after the exact rules; more than ever needed on meshes people own."""
BATCH = 4096
"""Expansions handled at once, which bounds the memory of a step."""
INT64_ROOM = 1 << 58

Label = tuple[int, int, int, int, tuple[int, ...], tuple[int, ...]]
"""Additive units, slowest chunk, head, stages, node indices, ends negated."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """What the search needs of N nodes over B borders, in units of 1e-9 ms. Nodes are sorted by id.

    borders        the layer borders where any node can start or stop, ascending; the window's two ends
                   included
    can            (N, B, B): the node can run from one border to another as one stage
    stage          (N,): once per stage; layer (N,): per layer; head, tail (N,): once at that end of the route
    chunk_layer    (N,): one prefill chunk through one layer
    hop            (N, N): what going on to the other node adds; hop_chunk (N, N): its part of the next
                   stage's chunk
    back           (N, N): tail, head
    repeats        how often the slowest chunk is waited for again: chunks - 1
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


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The least route of at least two stages."""

    units: int
    stages: tuple[Stage, ...]
    exact: bool


def least_pipeline(mesh: Mesh, without: frozenset[str]) -> Pipeline | None:
    """The least pipeline of at least two stages by (total, stages, node ids, later ends); None when there is
    none.
    """
    keep = [index for index, node_id in enumerate(mesh.node_ids) if node_id not in without]
    if len(keep) < 2 or len(mesh.borders) < 3:
        return None
    return _Search(mesh, keep).run()


class _Search:
    def __init__(self, mesh: Mesh, keep: list[int]) -> None:
        self.mesh = mesh
        self.ids = [mesh.node_ids[index] for index in keep]
        self.borders = mesh.borders
        self.repeats = mesh.repeats
        self.exact = True
        kind: Any = np.int64 if _bound(mesh) < INT64_ROOM else object
        self.none = 4 * max(_bound(mesh), INT64_ROOM)
        at = np.array(keep)

        def column(values: list[int]) -> Ints:
            picked: Ints = np.array(values, dtype=kind)[at]
            return picked

        def table(values: list[list[int]]) -> Ints:
            picked: Ints = np.array(values, dtype=kind)[np.ix_(at, at)]
            return picked

        self.head, self.tail = column(mesh.head), column(mesh.tail)
        self.chunk_layer = column(mesh.chunk_layer)
        self.hop, self.hop_chunk, self.back = table(mesh.hop), table(mesh.hop_chunk), table(mesh.back)
        self.can = mesh.can[at]
        marks = np.array(mesh.borders, dtype=kind)
        self.length = marks[None, :] - marks[:, None]
        stages = column(mesh.stage)[:, None, None] + column(mesh.layer)[:, None, None] * self.length
        self.stage_units = np.where(self.can, stages, self.none)
        self._costs_to_go()
        # The most that head `b` can lose against head `a` on the way back from any tail.
        self.head_slack = (self.back[:, :, None] - self.back[:, None, :]).max(axis=0)
        self.best: Label | None = None
        self.best_units = self.none - 1

    def _costs_to_go(self) -> None:
        """`left[i, n]`: the least additive cost from border i on after a stage on n; `begun[i, n]`: starting
        n at i.
        """
        nodes, last = len(self.ids), len(self.borders) - 1
        self.left = np.full((last + 1, nodes), self.none, dtype=self.hop.dtype)
        self.begun = np.full((last + 1, nodes), self.none, dtype=self.hop.dtype)
        self.left[last] = self.tail + self.back.min(axis=1)
        other = np.where(np.eye(nodes, dtype=bool), self.none, self.hop)
        for i in range(last - 1, -1, -1):
            onward = self.stage_units[:, i, i + 1 :] + self.left[i + 1 :].T
            self.begun[i] = np.minimum(onward.min(axis=1), self.none)
            self.left[i] = np.minimum((other + self.begun[i][None, :]).min(axis=1), self.none)

    def run(self) -> Pipeline | None:
        last = len(self.borders) - 1
        self._guess()
        if self.best is None:
            return None
        waiting: list[dict[int, list[Label]]] = [{} for _ in self.borders]
        self._expand(0, None, waiting)
        for i in range(1, last):
            labels = [label for group in waiting[i].values() for label in self._reduced(i, group)]
            waiting[i] = {}
            if labels:
                self._expand(i, labels, waiting)
        return Pipeline(self.best_units, self._stages(self.best), self.exact)

    def _guess(self) -> None:
        """A first upper bound: the pipeline of least additive cost, its cuts then shifted while that
        helps.
        """
        last = len(self.borders) - 1
        starts = self.head[:, None] + self.stage_units[:, 0, 1:last] + self.left[1:last].T
        if starts.size == 0 or starts.min() >= self.none:
            return
        node, end = (int(x) for x in np.unravel_index(int(starts.argmin()), starts.shape))
        nodes, cuts = [node], [0, end + 1]
        while cuts[-1] < last:
            i = cuts[-1]
            onward = self.hop[nodes[-1]] + self.begun[i]
            onward[nodes[-1]] = self.none
            node = int(onward.argmin())
            ends = self.stage_units[node, i, i + 1 :] + self.left[i + 1 :, node]
            nodes.append(node)
            cuts.append(i + 1 + int(ends.argmin()))
        units = self._total(nodes, cuts)
        step = last // 2
        while step:
            better = False
            for place in range(1, len(cuts) - 1):
                for shift in (-step, step):
                    tried = cuts.copy()
                    tried[place] += shift
                    if tried[place - 1] < tried[place] < tried[place + 1]:
                        cost = self._total(nodes, tried)
                        if cost < units:
                            units, cuts, better = cost, tried, True
            if not better:
                step //= 2
        self.best_units = units
        negated = tuple(-self.borders[cut] for cut in cuts[1:])
        self.best = (0, 0, nodes[0], len(nodes), tuple(nodes), negated)

    def _total(self, nodes: list[int], cuts: list[int]) -> int:
        """What a pipeline costs in all; `none` or more where a node cannot run its part."""
        units = int(self.head[nodes[0]] + self.tail[nodes[-1]] + self.back[nodes[-1], nodes[0]])
        slowest = 0
        for place, node in enumerate(nodes):
            i, j = cuts[place], cuts[place + 1]
            chunk = int(self.chunk_layer[node] * self.length[i, j])
            units += int(self.stage_units[node, i, j])
            if place:
                units += int(self.hop[nodes[place - 1], node])
                chunk += int(self.hop_chunk[nodes[place - 1], node])
            slowest = max(slowest, chunk)
        return units + self.repeats * slowest

    def _expand(self, i: int, labels: list[Label] | None, waiting: list[dict[int, list[Label]]]) -> None:
        """Goes on from border i: every label to every other node and every end that can still be the best."""
        nodes = len(self.ids)
        kind = self.hop.dtype
        if labels is None:
            enter = self.head[None, :].copy()
            slowest = np.zeros(1, dtype=kind)
            chunk = np.zeros((1, nodes), dtype=kind)
            allowed = np.ones((1, nodes), dtype=bool)
        else:
            lasts = np.array([label[4][-1] for label in labels])
            enter = np.array([label[0] for label in labels], dtype=kind)[:, None] + self.hop[lasts]
            slowest = np.array([label[1] for label in labels], dtype=kind)
            chunk = self.hop_chunk[lasts]
            allowed = lasts[:, None] != np.arange(nodes)[None, :]
        bound = enter + self.begun[i][None, :] + self.repeats * slowest[:, None]
        rows, columns = np.nonzero(allowed & (bound <= self.best_units))
        for begin in range(0, len(rows), BATCH):
            row, node = rows[begin : begin + BATCH], columns[begin : begin + BATCH]
            self._expand_batch(
                i, labels, row, node, enter[row, node], slowest[row], chunk[row, node], waiting
            )

    def _expand_batch(
        self,
        i: int,
        labels: list[Label] | None,
        row: NDArray[np.int64],
        node: NDArray[np.int64],
        enter: Ints,
        slowest: Ints,
        chunk: Ints,
        waiting: list[dict[int, list[Label]]],
    ) -> None:
        last = len(self.borders) - 1
        stop = last + 1 if labels is not None else last
        ends = slice(i + 1, stop)
        units = enter[:, None] + self.stage_units[node, i, ends]
        chunks = chunk[:, None] + self.chunk_layer[node][:, None] * self.length[i, ends][None, :]
        worst = np.maximum(slowest[:, None], chunks)
        bound = units + self.repeats * worst + self.left[ends, :].T[node]
        hopeful = bound <= self.best_units
        if labels is not None and self.best is not None:
            # A tie in cost with a pipeline of fewer stages is lost already.
            stages = np.array([label[3] for label in labels])[row][:, None] + 1
            more = np.arange(i + 1, stop)[None, :] < last
            hopeful &= (bound < self.best_units) | (stages + more <= self.best[3])
        for at, offset in np.argwhere(hopeful):
            n, j = int(node[at]), i + 1 + int(offset)
            total, slow = int(units[at, offset]), int(worst[at, offset])
            if labels is None:
                label: Label = (total, slow, n, 1, (n,), (-self.borders[j],))
            else:
                old = labels[row[at]]
                path, cuts = (*old[4], n), (*old[5], -self.borders[j])
                label = (total, slow, old[2], old[3] + 1, path, cuts)
            if j < last:
                waiting[j].setdefault(n, []).append(label)
                continue
            total += int(self.tail[n] + self.back[n, label[2]]) + self.repeats * slow
            if self.best is None or (total, label[3:]) < (self.best_units, self.best[3:]):
                self.best, self.best_units = label, total

    def _reduced(self, i: int, group: list[Label]) -> list[Label]:
        """The labels of one border and last node that no other makes superfluous."""
        left = int(self.left[i, group[0][4][-1]])
        group.sort(key=lambda label: (label[0] + self.repeats * label[1], label[0], label[3:]))
        kept: list[Label] = []
        for label in group:
            if label[0] + self.repeats * label[1] + left > self.best_units:
                break
            if not any(self._replaces(other, label) for other in kept):
                kept.append(label)
        if len(kept) > WIDTH:
            self.exact = False
            del kept[WIDTH:]
        return kept

    def _replaces(self, a: Label, b: Label) -> bool:
        """True when every completion of `b` is matched or beaten by the same completion of `a`."""
        additive = a[0] - b[0] + int(self.head_slack[a[2], b[2]])
        at_once = additive + self.repeats * (a[1] - b[1])
        if additive > 0 or at_once > 0:
            return False
        return (additive < 0 and at_once < 0) or a[3:] <= b[3:]

    def _stages(self, label: Label) -> tuple[Stage, ...]:
        stages, first = [], self.borders[0]
        for node, end in zip(label[4], label[5], strict=True):
            stages.append(Stage(self.ids[node], first, -end - 1))
            first = -end
        return tuple(stages)


def _bound(mesh: Mesh) -> int:
    """More than any pipeline without a pointless detour can cost."""
    layers = mesh.borders[-1] - mesh.borders[0]
    steps = len(mesh.borders)
    hop, hop_chunk, back = (max(map(max, table)) for table in (mesh.hop, mesh.hop_chunk, mesh.back))
    additive = (
        layers * max(mesh.layer) + steps * (max(mesh.stage) + hop) + max(mesh.head) + max(mesh.tail) + back
    )
    return 1 + additive + mesh.repeats * (layers * max(mesh.chunk_layer) + hop_chunk)
