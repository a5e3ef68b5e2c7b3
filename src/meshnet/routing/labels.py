"""The search behind measured time: the least pipeline, by labels that go forward over the borders.

A label carries, per border and last node: its additive cost, its slowest chunk so far, its stages, and the
nodes it has visited. What the bounds (`bounds.py`) rule out is dropped. One label stands in for another at
the same border and node when no completion can turn the order round: its additive cost is no larger, with and
without the slowest chunk, after the most that the other's head could gain on the way back from any tail; it
has visited no node that the other could still use; and on equality the order of ties decides.

A node takes part once. Only where no such pipeline is complete may a node come back.

The result is exact unless
- more labels remain than `Effort` allows: the most promising are kept;
- a prompt of several chunks meets a mesh of more than `FINE_BORDERS` borders: the search then runs over some
  of them, and the cuts are shifted to the best layer afterwards;
- nodes have to come back for a prompt of several chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshnet.routing.borders import ANY, Fork
from meshnet.routing.bounds import Bounds, Ints, Mesh, Traced, traced
from meshnet.routing.route import Stage

FINE_BORDERS = 24
"""Borders that are searched when the slowest chunk counts."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a search may take.

    width   labels kept per border and last node
    step    nodes that labels of one border may enter, and labels that come of it
    rounds  how often the intervals of the slowest chunk are divided
    """

    width: int
    step: int
    rounds: int


FULL = Effort(width=24, step=1500, rounds=3)
"""For the winner."""
SHORT = Effort(width=2, step=80, rounds=1)
"""For alternatives."""

Indices = NDArray[np.int64]

Label = tuple[int, int, int, tuple[int, ...], tuple[int, ...], int]
"""Additive units, slowest chunk, number of stages, nodes, ends negated, visited nodes as bits."""
START: Label = (0, 0, 0, (), (), 0)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The least route of at least two stages."""

    stages: tuple[Stage, ...]
    exact: bool


def least_pipeline(
    mesh: Mesh, effort: Effort = FULL, fork: Fork = ANY, *, returns: bool = False
) -> Pipeline | None:
    """The least pipeline of at least two stages by (total, stages, node ids, later ends); None without one.

    With `returns`, nodes may come back.
    """
    if len(mesh.node_ids) < 2 or len(mesh.borders) < 3:
        return None
    never, mesh = mesh.most(), mesh.forked(fork)
    searched = mesh
    if mesh.repeats and len(mesh.borders) > FINE_BORDERS:
        searched = mesh.over(_main_borders(mesh))
    search = _Search(searched, effort, returns)
    best, exact = search.bounds.best, search.exact and searched is mesh
    if best is None or best.units >= never:
        return None
    if searched is not mesh:
        place = {border: index for index, border in enumerate(mesh.borders)}
        units, cuts = mesh.shifted(best.nodes, [0, *(place[-end] for end in best.ends)])
        best = traced(mesh, units, best.nodes, cuts)
    first, stages = mesh.borders[0], []
    for node, end in zip(best.nodes, best.ends, strict=True):
        stages.append(Stage(mesh.node_ids[node], first, -end - 1))
        first = -end
    return Pipeline(tuple(stages), exact and not (returns and mesh.repeats))


def _main_borders(mesh: Mesh) -> list[int]:
    """The borders to search: one complete pipeline's, those where most nodes begin or end, some between."""
    last = len(mesh.borders) - 1
    additive = Bounds(mesh, 0, returns=True)
    chosen = {0, last}
    if additive.best is not None:
        place = {border: index for index, border in enumerate(mesh.borders)}
        chosen |= {place[-end] for end in additive.best.ends}
    starts: NDArray[np.bool_] = np.asarray(mesh.can.any(axis=2))
    stops: NDArray[np.bool_] = np.asarray(mesh.can.any(axis=1))
    begins, ends = starts[:, 1:] & ~starts[:, :-1], stops[:, :-1] & ~stops[:, 1:]
    weight = np.zeros(last + 1, dtype=int)
    weight[1:] += begins.sum(axis=0)
    weight[:-1] += ends.sum(axis=0)
    for border in np.argsort(-weight, kind="stable"):
        if len(chosen) >= FINE_BORDERS * 2 // 3 or not weight[border]:
            break
        chosen.add(int(border))
    while len(chosen) < FINE_BORDERS:
        marks = sorted(chosen)
        gap, before = max((b - a, a) for a, b in pairwise(marks))
        chosen.add(before + gap // 2)
    return sorted(chosen)


class _Search:
    """Goes forward over the borders; afterwards the least pipeline is `bounds.best`."""

    def __init__(self, mesh: Mesh, effort: Effort, returns: bool) -> None:
        self.mesh = mesh
        self.effort = effort
        self.returns = returns
        self.bounds = bounds = Bounds(mesh, effort.rounds, returns)
        self.exact = True
        self.last = len(mesh.borders) - 1
        self.waiting: list[dict[int, list[Label]]] = [{} for _ in mesh.borders]
        # The most that a route of head b can lose against one of head a on the way back from any tail.
        self.head_slack = (bounds.back[:, :, None] - bounds.back[:, None, :]).max(axis=0)
        # Per border, the nodes that can still start there or later, as bits.
        self.open = [
            sum(1 << n for n in np.flatnonzero(mesh.can[:, i:, :].any(axis=(1, 2))).tolist())
            for i in range(self.last + 1)
        ]
        if bounds.intervals:
            self._run()

    def _run(self) -> None:
        self._expand(0, [START])
        for i in range(1, self.last):
            groups, self.waiting[i] = self.waiting[i], {}
            labels = [label for group in groups.values() for label in self._reduced(i, group)]
            if labels:
                self._expand(i, labels)

    def _expand(self, i: int, labels: list[Label]) -> None:
        """Goes on from border i: every label to every other node and every end that can still be the best."""
        nodes, bounds = np.arange(len(self.mesh.node_ids)), self.bounds
        units = np.array([label[0] for label in labels], dtype=bounds.kind)[:, None]
        slowest = np.array([label[1] for label in labels], dtype=bounds.kind)
        if i == 0:
            enter, chunk = units + bounds.head, np.zeros((1, len(nodes)), dtype=bounds.kind)
            allowed = np.ones((1, len(nodes)), dtype=bool)
        else:
            lasts = np.array([label[3][-1] for label in labels])
            enter, chunk = units + bounds.hop[lasts], bounds.hop_chunk[lasts]
            allowed = ~bounds.same[lasts]
            if not self.returns:
                visited = np.array([label[5] for label in labels])
                allowed = (visited[:, None] >> nodes) & 1 == 0
        least = enter + bounds.to_go(slowest[:, None], [x.begun[i][None, :] for x in bounds.intervals])
        rows, columns = self._most_promising(least, allowed & (least <= bounds.limit))
        added = self._extended(
            i, labels, rows, columns, enter[rows, columns], slowest[rows], chunk[rows, columns]
        )
        for j, label in added:
            self.waiting[j].setdefault(label[3][-1], []).append(label)

    def _extended(
        self,
        i: int,
        labels: list[Label],
        row: Indices,
        node: Indices,
        enter: Ints,
        slowest: Ints,
        chunk: Ints,
    ) -> list[tuple[int, Label]]:
        """One more stage on `node[k]` for the label at `row[k]`, to every end that can still be the best.

        Returns (border, label) of those that go on; offers those that are complete.
        """
        bounds, mesh = self.bounds, self.mesh
        stop = self.last if i == 0 else self.last + 1
        ends = slice(i + 1, stop)
        units = enter[:, None] + bounds.stage_units[node, i, ends]
        chunks = chunk[:, None] + bounds.chunk_layer[node][:, None] * bounds.length[i, ends][None, :]
        worst = np.maximum(slowest[:, None], chunks)
        least = units + bounds.to_go(worst, [x.left[ends].T[node] for x in bounds.intervals])
        hopeful = least <= bounds.limit
        ties = least == bounds.limit
        if bounds.best is not None and ties.any():
            hopeful &= ~ties | self._wins_ties(bounds.best, labels, row, node, np.arange(i + 1, stop))
        at, offset = self._most_promising(least, hopeful)
        added = []
        for k, o in zip(at.tolist(), offset.tolist(), strict=True):
            n, j = int(node[k]), i + 1 + o
            old = labels[row[k]]
            path, cuts = (*old[3], n), (*old[4], -mesh.borders[j])
            if j < self.last:
                label = (int(units[k, o]), int(worst[k, o]), len(path), path, cuts, old[5] | 1 << n)
                added.append((j, label))
                continue
            total = int(units[k, o]) + mesh.tail[n] + mesh.back[n][path[0]] + mesh.repeats * int(worst[k, o])
            if self.returns and mesh.repeats:
                place = {border: index for index, border in enumerate(mesh.borders)}
                priced = mesh.total(path, [0, *(place[-end] for end in cuts)])
                total = total if priced is None else priced[0]
            bounds.offer(Traced(total, len(path), path, cuts))
        return added

    def _most_promising(self, least: Ints, hopeful: NDArray[np.bool_]) -> tuple[Indices, Indices]:
        """Where `hopeful` holds: at most as many places as the effort allows, those of the least bound."""
        rows, columns = np.nonzero(hopeful)
        if len(rows) > self.effort.step:
            self.exact = False
            order = np.argsort(least[rows, columns], kind="stable")[: self.effort.step]
            rows, columns = rows[order], columns[order]
        return rows, columns

    def _wins_ties(
        self, best: Traced, labels: list[Label], row: Indices, node: Indices, ends: Indices
    ) -> NDArray[np.bool_]:
        """Where a route of the best total can still come before the best: fewer stages, or earlier ids."""
        done = np.array([label[2] for label in labels])
        prefixes = [(label[3], best.nodes[: label[2]]) for label in labels]
        after = np.array([(path > prefix) - (path < prefix) for path, prefix in prefixes])
        same_place = np.array([best.nodes[min(count, best.stages - 1)] for count in done.tolist()])
        later = np.where(after[row] != 0, after[row], np.sign(node - same_place[row]))
        stages = done[row][:, None] + 1 + (ends[None, :] < self.last)
        result: NDArray[np.bool_] = (stages < best.stages) | ((stages == best.stages) & (later[:, None] <= 0))
        return result

    def _reduced(self, i: int, group: list[Label]) -> list[Label]:
        """The labels of one border and last node that no other makes superfluous."""
        group.sort(key=lambda label: (label[0] + self.mesh.repeats * label[1], label))
        kept: list[Label] = []
        for label in group:
            if any(self._replaces(other, label, self.open[i]) for other in kept):
                continue
            if len(kept) == self.effort.width:
                self.exact = False
                break
            kept.append(label)
        return kept

    def _replaces(self, a: Label, b: Label, still_open: int) -> bool:
        """True when every completion of `b` is matched or beaten by the same completion of `a`."""
        additive = a[0] - b[0] + int(self.head_slack[a[3][0], b[3][0]])
        at_once = additive + self.mesh.repeats * (a[1] - b[1])
        if additive > 0 or at_once > 0:
            return False
        if not self.returns and a[5] & still_open & ~b[5]:
            return False
        return (additive < 0 and at_once < 0) or a[2:5] <= b[2:5]
