"""The search for a pipeline to place: which nodes, in which order, cut where.

Stage times are in units of 1e-9 ms, per token. A stage's time is the sum of its layers' times, with the
embedding in the first stage and the output matrix in the last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

EXACT_NODES = 8
KEPT_LABELS = 4
"""Pipelines in force that are followed, per border and number of stages."""
EQUAL = 1_000_000
"""Stage times that differ by less than this part count as equal: they are sums of rounded parts."""
INT64_ROOM = 1 << 60

Part = tuple[int, int, int]
"""Node index, first layer, last layer."""


@dataclass(frozen=True)
class Grid:
    """N nodes against L layers: bytes, and units of 1e-9 ms.

    held: per node, the layers it holds; marks: the borders of the shards they are held in, 0 and L included.
    extra_bytes: per node, what each layer takes there beyond the model's own bytes.
    pinned: per node, whether it runs nothing but what it holds, whatever its memory.
    """

    layer_bytes: Sequence[int]
    embedding_bytes: int
    output_bytes: int
    tied: bool
    memory: Sequence[int]
    layer_units: Sequence[Sequence[int]]
    embed_units: Sequence[int]
    output_units: Sequence[int]
    link_units: Sequence[Sequence[int]]
    held: Sequence[frozenset[int]]
    marks: Sequence[int]
    extra_bytes: Sequence[int]
    pinned: Sequence[bool]
    bytes_before: list[int] = field(init=False)
    units_before: list[list[int]] = field(init=False)
    new_before: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        def running(values: Sequence[int]) -> list[int]:
            return list(accumulate(values, initial=0))

        object.__setattr__(self, "bytes_before", running(self.layer_bytes))
        object.__setattr__(self, "units_before", [running(units) for units in self.layer_units])
        new = [running([layer not in held for layer in range(self.layers)]) for held in self.held]
        object.__setattr__(self, "new_before", new)

    @property
    def layers(self) -> int:
        return len(self.layer_bytes)

    @property
    def nodes(self) -> int:
        return len(self.memory)

    def of(self, nodes: Sequence[int]) -> Grid:
        """The grid of some of its nodes."""
        return replace(
            self,
            memory=[self.memory[n] for n in nodes],
            layer_units=[self.layer_units[n] for n in nodes],
            embed_units=[self.embed_units[n] for n in nodes],
            output_units=[self.output_units[n] for n in nodes],
            link_units=[[self.link_units[a][b] for b in nodes] for a in nodes],
            held=[self.held[n] for n in nodes],
            extra_bytes=[self.extra_bytes[n] for n in nodes],
            pinned=[self.pinned[n] for n in nodes],
        )

    def stage_bytes(self, first: int, last: int) -> int:
        """What the stage's node holds for it."""
        return self.bytes_before[last + 1] - self.bytes_before[first] + self._end_bytes(first, last)

    def node_bytes(self, node: int, layers: Collection[int]) -> int:
        """What a node holds with these layers, in one piece or not."""
        if not layers:
            return 0
        own = sum(self.layer_bytes[layer] for layer in layers) + len(layers) * self.extra_bytes[node]
        return own + self._end_bytes(min(layers), max(layers))

    def may_hold(self, node: int, layers: Collection[int]) -> bool:
        """Whether a node can hold these layers."""
        if self.pinned[node]:
            return self.held[node].issuperset(layers)
        return self.node_bytes(node, layers) <= self.memory[node]

    def _end_bytes(self, first: int, last: int) -> int:
        embedding = self.embedding_bytes if first == 0 else 0
        output = self.output_bytes if last == self.layers - 1 else 0
        return max(embedding, output) if self.tied else embedding + output

    def stage_units(self, node: int, first: int, last: int) -> int:
        """The stage's time per token."""
        units = self.units_before[node][last + 1] - self.units_before[node][first]
        units += self.embed_units[node] if first == 0 else 0
        return units + (self.output_units[node] if last == self.layers - 1 else 0)

    def new_layers(self, node: int, first: int, last: int) -> int:
        """How many of the stage's layers the node does not hold yet."""
        return self.new_before[node][last + 1] - self.new_before[node][first]

    def latency(self, stages: Sequence[Part]) -> int:
        """One token through all stages and links, the way back from the tail to the head included."""
        units = sum(self.stage_units(*part) for part in stages)
        ring = [*stages[1:], stages[0]]
        return units + sum(self.link_units[a[0]][b[0]] for a, b in zip(stages, ring, strict=True))


@dataclass(frozen=True)
class Layout:
    """A pipeline: its stages, its value and the best possible value for the objective, and layers to load."""

    stages: tuple[Part, ...]
    units: int
    best_units: int
    moved: int
    exact: bool


def best_layout(grid: Grid, objective: str, max_stages: int, slack: float) -> Layout | None:
    """The pipeline to place; None when the nodes cannot hold the model.

    `placement.py` says by which rules.
    """
    if grid.nodes <= EXACT_NODES:
        found = _ordered(grid, objective, max_stages, slack)
        return found or _ordered(grid, objective, grid.nodes, slack)
    fresh = _chosen(grid, objective, max_stages, slack)
    kept = None
    if any(grid.held):
        kept = _in_force(grid, objective, max(max_stages, len(fresh.stages) if fresh else 0))
    if kept is not None and (fresh is None or kept.units <= fresh.best_units * (1 + slack)):
        return kept if fresh is None else replace(kept, best_units=min(fresh.best_units, kept.units))
    return fresh


class _Tables:
    """(N, L + 1, L + 1): time, fit and new layers of a stage of node n from border b to border e."""

    def __init__(self, grid: Grid) -> None:
        layers = grid.layers
        units = [[*row, grid.embed_units[n] + grid.output_units[n]] for n, row in enumerate(grid.layer_units)]
        farthest = max(map(max, grid.link_units))
        self.most = 1 + 2 * sum(map(max, zip(*units, strict=True))) + (layers + 1) * farthest
        self.kind: Any = np.int64 if self.most < INT64_ROOM else object
        time = np.array(grid.units_before, dtype=self.kind)
        self.time = time[:, None, :] - time[:, :, None]
        self.time[:, 0, :] += np.array(grid.embed_units, dtype=self.kind)[:, None]
        self.time[:, :, layers] += np.array(grid.output_units, dtype=self.kind)[:, None]
        size = np.array(grid.bytes_before, dtype=object)
        size = size[None, :] - size[:, None]
        size[0, :] += grid.embedding_bytes
        size[:, layers] += grid.output_bytes
        if grid.tied:
            size[0, layers] -= min(grid.embedding_bytes, grid.output_bytes)
        forward = np.triu(np.ones((layers + 1, layers + 1), dtype=bool), 1)
        new = np.array(grid.new_before, dtype=np.int64)
        self.new = new[:, None, :] - new[:, :, None]
        borders = np.arange(layers + 1, dtype=object)
        count = borders[None, :] - borders[:, None]
        self.fits = np.array(
            [
                (self.new[n] == 0 if grid.pinned[n] else size + count * grid.extra_bytes[n] <= memory)
                & forward
                for n, memory in enumerate(grid.memory)
            ],
            dtype=bool,
        )

    def reach(self, limit: int) -> tuple[list[list[int]], list[list[bool]]]:
        """Per node and border: how far a stage gets short of the tail, and whether it can be the tail."""
        allowed = self.fits & (self.time <= limit)
        far = allowed[:, :, :-1].sum(axis=2) + np.arange(allowed.shape[1])[None, :]
        return far.tolist(), allowed[:, :, -1].tolist()


def _ordered(grid: Grid, objective: str, max_stages: int, slack: float) -> Layout | None:
    """The best pipeline of at most `max_stages` of these few nodes, in any order; None: none fits."""
    if grid.nodes == 0:
        return None
    tables = _Tables(grid)
    held = any(grid.held)
    if objective == "throughput":
        best = _least_slowest(tables, min(max_stages, grid.nodes))
        if best is None:
            return None
        limit = best + best // EQUAL + (int(best * slack) if held else 0)
        cost = tables.new.astype(object) * tables.most + tables.time
        if not held:
            cost = tables.time
        stages = _cheapest(grid, tables, cost, tables.time <= limit, max_stages)
    else:
        everything = np.ones_like(tables.fits)
        stages = _cheapest(grid, tables, tables.time, everything, max_stages)
        if stages is None:
            return None
        best = grid.latency(stages)
        price = int(best * slack / grid.layers)
        if held and price:
            stages = _cheapest(grid, tables, tables.time + tables.new * price, everything, max_stages)
    return None if stages is None else _layout(grid, objective, stages, best, exact=True)


def _layout(grid: Grid, objective: str, stages: Sequence[Part], best: int, *, exact: bool) -> Layout:
    slowest = max(grid.stage_units(*part) for part in stages)
    units = slowest if objective == "throughput" else grid.latency(stages)
    return Layout(tuple(stages), units, best, sum(grid.new_layers(*part) for part in stages), exact)


def _least_slowest(tables: _Tables, max_stages: int) -> int | None:
    """The least time that the slowest of at most `max_stages` stages can take, over all orders of the nodes.

    Within a limit, going on with as many layers as fit never hurts: what is left only gets shorter.
    """
    nodes = tables.time.shape[0]
    masks = [mask for mask in range(1 << nodes) if mask.bit_count() < max_stages]

    def possible(limit: int) -> bool:
        far, ends = tables.reach(limit)
        reached = {0: 0}
        for mask in masks:
            at = reached.get(mask)
            if at is None:
                at = reached[mask] = max(
                    far[n][reached[mask ^ 1 << n]] for n in range(nodes) if mask >> n & 1
                )
            if any(ends[n][at] for n in range(nodes) if not mask >> n & 1):
                return True
        return False

    return _least_limit(tables, possible)


def _least_limit(tables: _Tables, possible: Callable[[int], bool]) -> int | None:
    """The least stage time for which `possible` holds; None when it does not for any."""
    times = sorted(set(tables.time[tables.fits].tolist()))
    low, high = 0, len(times)
    while low < high:
        middle = (low + high) // 2
        if possible(times[middle]):
            high = middle
        else:
            low = middle + 1
    return times[low] if low < len(times) else None


def _cheapest(
    grid: Grid, tables: _Tables, cost: NDArray[Any], allowed: NDArray[np.bool_], max_stages: int
) -> list[Part] | None:
    """The pipeline of least cost plus links, over all orders: by sets of nodes, heads, last nodes and
    borders.

    Ties: fewer stages.
    """
    nodes, last = grid.nodes, grid.layers
    usable = allowed & tables.fits
    scale = EXACT_NODES + 1
    none = 4 * scale * (int(cost[usable].max()) * (EXACT_NODES + 1) + tables.most) if usable.any() else 1
    kind: Any = np.int64 if none < 1 << 62 else object
    stage = np.where(usable, cost.astype(kind) * scale + 1, none)
    link = np.array(grid.link_units, dtype=kind) * scale
    # table[mask][head, last node, border]: the least cost of the mask's nodes in any order, up to the border.
    table: dict[int, NDArray[Any]] = {}
    for n in range(nodes):
        first = np.full((nodes, nodes, last + 1), none, dtype=kind)
        first[n, n] = stage[n, 0]
        table[1 << n] = first
    for mask in sorted(range(1, 1 << nodes), key=int.bit_count):
        if mask.bit_count() >= max_stages or mask not in table:
            continue
        before = table[mask]
        heads = [n for n in range(nodes) if mask >> n & 1]
        for n in range(nodes):
            if mask >> n & 1:
                continue
            enter = (before[heads] + link[:, n][None, :, None]).min(axis=1)
            enter[:, last] = none
            if enter.min() >= none:
                continue
            longer = np.minimum((enter[:, :, None] + stage[n][None]).min(axis=1), none)
            wider = table.setdefault(mask | 1 << n, np.full((nodes, nodes, last + 1), none, dtype=kind))
            wider[heads, n] = longer
    back = link.T[:, :]
    best, at = none, (0, 0, 0)
    for mask, values in sorted(table.items()):
        final = values[:, :, last] + back
        place = int(final.argmin())
        if final.flat[place] < best:
            best, at = int(final.flat[place]), (mask, *divmod(place, nodes))
    return None if best >= none else _traced(table, stage, link, at, last)


def _traced(
    table: dict[int, NDArray[Any]],
    stage: NDArray[Any],
    link: NDArray[Any],
    at: tuple[int, int, int],
    border: int,
) -> list[Part]:
    """Follows the tables back from the end of the pipeline."""
    mask, head, node = at
    parts: list[Part] = []
    while True:
        rest = mask ^ 1 << node
        if not rest:
            return [(node, 0, border - 1), *reversed(parts)]
        enter = table[rest][head] + link[:, node][:, None]
        matches = enter + stage[node][None, :, border] == table[mask][head, node, border]
        before, begin = (int(x) for x in np.argwhere(matches)[0])
        parts.append((node, begin, border - 1))
        mask, node, border = rest, before, begin


def _chosen(grid: Grid, objective: str, max_stages: int, slack: float) -> Layout | None:
    """More nodes than can be ordered exactly: chooses eight and orders those; else a long pipeline."""
    tables = _Tables(grid)
    mean = [sum(row) / grid.layers for row in grid.layer_units]
    holds = [tables.fits[n].sum(axis=1).max() for n in range(grid.nodes)]
    by_room = sorted(range(grid.nodes), key=lambda n: (-int(holds[n]), mean[n], -len(grid.held[n]), n))
    if objective == "throughput":
        stages = min(max_stages, EXACT_NODES)

        def enough(limit: int) -> bool:
            return sum(sorted(_counts(tables, limit))[-stages:]) >= grid.layers

        limit = _least_limit(tables, enough)
        counts = _counts(tables, limit) if limit is not None else holds
        ranked = sorted(range(grid.nodes), key=lambda n: (-int(counts[n]), -len(grid.held[n]), mean[n], n))
    else:
        ranked = sorted(range(grid.nodes), key=lambda n: (mean[n], -len(grid.held[n]), n))
    for candidates in (ranked, by_room):
        nodes = sorted(candidates[:EXACT_NODES])
        few = grid.of(nodes)
        found = _ordered(few, objective, max_stages, slack) or _ordered(few, objective, EXACT_NODES, slack)
        if found is not None:
            parts = tuple((nodes[n], first, last) for n, first, last in found.stages)
            return replace(found, stages=parts, exact=False)
    return _walked(grid, tables, by_room, objective)


def _counts(tables: _Tables, limit: int) -> list[int]:
    """Per node, the most layers of one stage within the limit."""
    counts: list[int] = (tables.fits & (tables.time <= limit)).sum(axis=2).max(axis=1).tolist()
    return counts


def _walked(grid: Grid, tables: _Tables, by_room: list[int], objective: str) -> Layout | None:
    """A pipeline of as few of the roomiest nodes as hold the model, each taking what it may."""

    def walk(
        order: Sequence[int], tail: int, far: list[list[int]], ends: list[list[bool]]
    ) -> list[Part] | None:
        at, parts = 0, []
        for node in order:
            if node != tail and far[node][at] > at:
                parts.append((node, at, far[node][at] - 1))
                at = far[node][at]
        return [*parts, (tail, at, grid.layers - 1)] if ends[tail][at] else None

    for count in range(EXACT_NODES + 1, grid.nodes + 1):
        order = by_room[:count]

        def walks(limit: int, order: Sequence[int] = order) -> list[Part] | None:
            far, ends = tables.reach(limit)
            found = (walk(order, tail, far, ends) for tail in reversed(order))
            return next(filter(None, found), None)

        def possible(limit: int, walks: Callable[[int], list[Part] | None] = walks) -> bool:
            return walks(limit) is not None

        limit = _least_limit(tables, possible)
        if limit is not None:
            stages = walks(limit)
            assert stages is not None
            layout = _layout(grid, objective, stages, limit, exact=False)
            return replace(layout, best_units=layout.units)
    return None


def _in_force(grid: Grid, objective: str, max_stages: int) -> Layout | None:
    """A good pipeline of layers that nodes hold already, cut at the ends of their shards; None without one.

    Labels go forward over the borders, `KEPT_LABELS` of them at each for each number of stages. Of the nodes
    that could run a stage, the fastest `max_stages` are enough: one of them is still free.
    """
    tables = _Tables(grid)
    waiting: dict[int, list[tuple[int, int, tuple[Part, ...]]]] = {0: [(0, 0, ())]}
    for begin in grid.marks[:-1]:
        ranked = sorted(waiting.pop(begin, []))
        counts = {label[1] for label in ranked if label[1] < max_stages}
        labels = [[label for label in ranked if label[1] == count][:KEPT_LABELS] for count in sorted(counts)]
        for end in grid.marks if labels else ():
            able = np.flatnonzero(tables.fits[:, begin, end] & (tables.new[:, begin, end] == 0)).tolist()
            able.sort(key=lambda n: (int(tables.time[n, begin, end]), n))
            for units, count, parts in chain.from_iterable(labels):
                used = {part[0] for part in parts}
                for node in able[:max_stages]:
                    if node in used:
                        continue
                    longer = int(tables.time[node, begin, end])
                    if objective == "throughput":
                        longer = max(units, longer)
                    else:
                        longer += units + (grid.link_units[parts[-1][0]][node] if parts else 0)
                    waiting.setdefault(end, []).append((longer, count + 1, (*parts, (node, begin, end - 1))))
    final = waiting.get(grid.layers)
    if not final:
        return None
    layout = _layout(grid, objective, min(final)[2], 0, exact=False)
    return replace(layout, best_units=layout.units)
