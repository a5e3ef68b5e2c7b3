"""The cheapest path over layer borders when every stage has one fixed cost.

Vertices are the borders `first .. last + 1` of a window. A node that runs whole shards only adds the edge
`L -> E + 1` for each of its shards inside the window; a node with mid-shard entry adds `i -> j + 1` for every
`L <= i <= j <= E`. A node's adjoining edges are one stage, charged once.

The order on routes is (cost, stages, node ids, ends: later first). It is kept when the same stages are
appended to both sides, so one best label per border is enough to *enter* another node. It is not enough to
*stay* on a node: for that, each node's own best entry is kept as long as the node goes on. A node's stage has
the same cost wherever it was entered, so its label is just the best border label among its entries; with
mid-shard entry that is the best label over a span of borders, the same for all nodes whose shard starts at
the same layer. Entering the node that a label already ends with is never better than staying there (one stage
more, no layer less), so a border needs no second best.

Nodes with equal shards differ in cost and name alone, and the cheaper one can stand in for the other
anywhere: one per set of shards is kept. What is left is O(nodes * shards + layers^2), whatever the number of
nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meshnet.routing.checks import LayerRange
from meshnet.routing.route import Stage

Label = tuple[int, int, tuple[str, ...], tuple[int, ...]]
"""Units of 1e-9 ms (a hop with each stage), stages, node ids, ends negated: compared as it stands."""

Offer = tuple[int, str]
"""What a stage costs in units, and the node that runs it: compared as it stands."""


class Runner(NamedTuple):
    """One node as the path search sees it: units per stage, and where it may start and stop."""

    node_id: str
    units: int
    shards: tuple[LayerRange, ...]
    mid_shard_entry: bool


@dataclass(frozen=True, slots=True)
class Found:
    """The best path, or None, and the highest border that can be reached from the window's start."""

    units: int
    stages: tuple[Stage, ...] | None
    reached: int


@dataclass(frozen=True, slots=True)
class Fork:
    """Narrows a search to routes whose node ids start with `prefix` and do not go on with one in `barred`.

    `END` in `barred` stands for stopping after the prefix.
    """

    prefix: tuple[str, ...] = ()
    barred: frozenset[str] = frozenset()


END = ""
ANY = Fork()


def cheapest(window: LayerRange, runners: Iterable[Runner], hop: int = 0, fork: Fork = ANY) -> Found:
    """The least path over `window` by (units, stages, node ids, later ends).

    `hop` units are charged per border between stages.
    """
    first, last = window
    # The hop of the first stage is taken back here, so that every stage can be charged with one.
    start: Label = (-hop, 0, (), ())
    best: dict[int, Label] = {first: start}
    forks: list[tuple[_Front, dict[int, Label]]] = []
    if fork != ANY:
        runners = list(runners)
        seeds = _after(fork.prefix, {first: start}, window, runners, hop)
        barred = fork.barred | set(fork.prefix[-1:])
        forks = [(_Front(window, (r for r in runners if r.node_id not in barred), hop), seeds)]
        best = {border: seeds[border] for border in seeds if border == last + 1 and END not in barred}
    front = _Front(window, runners, hop)
    for border in range(first + 1, last + 2):
        least = best.get(border)
        for narrowed, seeds in forks:
            least = narrowed.reach(border, seeds, least)
        least = front.reach(border, best, least)
        if least is not None:
            best[border] = least
    final = best.get(last + 1)
    if final is None:
        return Found(0, None, max(best, default=first))
    return Found(final[0], _stages(first, final), last + 1)


def exits(shards: Iterable[LayerRange], mid_shard_entry: bool, border: int, last: int) -> list[int]:
    """The borders where a stage that starts at `border` can stop, up to layer `last`, ascending."""
    if mid_shard_entry:
        return [end for a, b in spans(shards, (border, last)) if a == border for end in range(a + 1, b + 1)]
    ends = {border}
    for a, b in sorted(shards):
        if a in ends and b <= last:
            ends.add(b + 1)
    return sorted(ends - {border})


def _after(
    prefix: tuple[str, ...], labels: dict[int, Label], window: LayerRange, runners: Iterable[Runner], hop: int
) -> dict[int, Label]:
    """The best label per border after exactly these nodes."""
    by_id = {runner.node_id: runner for runner in runners}
    for node_id in prefix:
        runner, longer = by_id[node_id], dict[int, Label]()
        for begin, label in labels.items():
            for end in exits(runner.shards, runner.mid_shard_entry, begin, window[1]):
                longer[end] = _extended(label, runner.units + hop, node_id, end, longer.get(end))
        labels = longer
    return labels


class _Front:
    """Carries the best entries of all nodes from border to border."""

    def __init__(self, window: LayerRange, runners: Iterable[Runner], hop: int) -> None:
        self.edges = _Edges(window, runners)
        self.hop = hop
        self.entries: dict[int, Label | None] = {}

    def reach(self, border: int, opened: Mapping[int, Label], least: Label | None) -> Label | None:
        """The lesser of `least` and what one more stage, entered at a border in `opened`, makes of its label.

        Called with ascending borders; `opened` is complete below `border`.
        """
        edges, hop = self.edges, self.hop
        for begin, (units, node_id) in edges.whole.get(border, {}).items():
            label = opened.get(begin)
            if label is not None:
                least = _extended(label, units + hop, node_id, border, least)
        before = opened.get(border - 1)
        if border - 1 in edges.anywhere:
            self.entries[border - 1] = before
        for begin, label in self.entries.items():
            if before is not None and (label is None or before < label):
                self.entries[begin] = label = before
            offer = edges.anywhere[begin].get(border)
            if offer is not None and label is not None:
                units, node_id = offer
                least = _extended(label, units + hop, node_id, border, least)
        for labels, begin, units, node_id in edges.chains.get(border, ()):
            entered, stayed = opened.get(begin), labels.get(begin)
            if stayed is not None and (entered is None or stayed < entered):
                entered = stayed
            if entered is None:
                continue
            known = labels.get(border)
            if known is None or entered < known:
                labels[border] = entered
            if least is None or entered[0] + units + hop <= least[0]:
                least = _extended(entered, units + hop, node_id, border, least)
        return least


def _extended(label: Label, units: int, node_id: str, border: int, least: Label | None) -> Label:
    """The lesser of `least` and `label` with one more stage; builds the new label only where it may win."""
    total = label[0] + units
    if least is not None and (total > least[0] or (total == least[0] and label[1] >= least[1])):
        return least
    longer = (total, label[1] + 1, (*label[2], node_id), (*label[3], -border))
    return longer if least is None or longer < least else least


def _stages(first: int, label: Label) -> tuple[Stage, ...]:
    stages = []
    for node_id, end in zip(label[2], label[3], strict=True):
        stages.append(Stage(node_id, first, -end - 1))
        first = -end
    return tuple(stages)


class _Edges:
    """The runners' edges inside a window, one runner per set of shards.

    whole[end][begin]     the best offer for exactly `begin -> end`, of shards that adjoin no other of their
                          node
    anywhere[begin][end]  the best offer of nodes that enter anywhere from `begin` on and reach at least `end`
    chains[end]           the edges of nodes whose whole shards adjoin: (its labels, begin, units, node)
    """

    def __init__(self, window: LayerRange, runners: Iterable[Runner]) -> None:
        first, last = window
        self.whole: dict[int, dict[int, Offer]] = {}
        self.anywhere: dict[int, dict[int, Offer]] = {}
        self.chains: dict[int, list[tuple[dict[int, Label], int, int, str]]] = {}
        distinct: dict[tuple[bool, tuple[LayerRange, ...]], Runner] = {}
        for runner in runners:
            key = (runner.mid_shard_entry, runner.shards)
            other = distinct.get(key)
            if other is None or (runner.units, runner.node_id) < (other.units, other.node_id):
                distinct[key] = runner
        for runner in distinct.values():
            if runner.mid_shard_entry:
                for begin, end in spans(runner.shards, window):
                    offer = (runner.units, runner.node_id)
                    offers = self.anywhere.setdefault(begin, {})
                    offers[end] = min(offers.get(end, offer), offer)
                continue
            inside = {(a, b + 1) for a, b in runner.shards if first <= a and b <= last}
            if {a for a, _ in inside} & {b for _, b in inside}:
                labels: dict[int, Label] = {}
                for begin, end in inside:
                    edge = (labels, begin, runner.units, runner.node_id)
                    self.chains.setdefault(end, []).append(edge)
            else:
                for begin, end in inside:
                    offer = (runner.units, runner.node_id)
                    into = self.whole.setdefault(end, {})
                    into[begin] = min(into.get(begin, offer), offer)
        for begin, offers in self.anywhere.items():
            reach: Offer | None = None
            for end in range(last + 1, begin, -1):
                offer_here = offers.get(end)
                if offer_here is not None and (reach is None or offer_here < reach):
                    reach = offer_here
                if reach is not None:
                    offers[end] = reach


def spans(shards: Iterable[LayerRange], window: LayerRange) -> list[LayerRange]:
    """Shards that touch or overlap as one span of borders (begin, end), cut to the window, ascending."""
    first, last = window
    result: list[LayerRange] = []
    for a, b in sorted(shards):
        begin, end = max(a, first), min(b, last) + 1
        if begin >= end:
            continue
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result
