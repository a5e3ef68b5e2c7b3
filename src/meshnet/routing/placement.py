"""Placement: which node should hold which layers of a model.

In this order: (1) the whole model is covered; (2) the pipeline that covers it is the best for the objective,
with embedding and output matrix counted in time and in memory; (3) nodes that are left replicate what is
scarce.

The objective "throughput" makes the slowest stage as fast as it can be: many streams are bound by it alone.
The objective "latency" makes one token's way through all stages and links as short as it can be: one stream
waits for all of it, so a single node that holds everything often wins.

Layers that a node already holds are not loaded again. Where nodes hold layers at all, a pipeline within
`slack` of the best is good enough, and among those the one that loads the fewest layers is taken
(throughput); or each layer loaded must earn its share of `slack` (latency). What nodes hold beyond their
stage stays where it fits.

Exact, the order of the nodes included, for up to `EXACT_NODES` (8) nodes and pipelines of at most
`max_stages` stages. With more nodes, a placement in force is kept when it is within `slack`; else at most
eight are chosen first (throughput: those that can run most layers in the time of the slowest stage; latency:
the fastest that can hold the model together), and their order and cuts are exact. When eight cannot hold the
model, as many as are needed are taken in the order of what they can run, with every choice of tail, and their
cuts are exact for that order. `Placement.exact` tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from meshnet.routing import checks
from meshnet.routing.checks import LayerRange
from meshnet.routing.errors import runs
from meshnet.routing.layout import EXACT_NODES, Grid, Layout, best_layout
from meshnet.routing.replicas import Holdings, replicate
from meshnet.routing.route import Stage
from meshnet.routing.times import Link
from meshnet.routing.units import to_ms, to_units

Objective = Literal["throughput", "latency"]

UNKNOWN_LINK = Link(1.0, 125e6)
"""Stands for a link nobody has measured: 1 ms, 1 Gbit/s."""


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """What a model's layers weigh.

    layer_bytes     per layer: weights, and the KV room a node should have for it
    embedding_bytes what the head holds besides; output_bytes: what the tail holds besides
    tied            embedding and output matrix are the same bytes: a node that is head and tail has them once
    output_work     time of norm and output matrix in layers, for nodes that have not measured it
    embedding_work  the same for the embedding
    layer_work      per layer, its time relative to the average layer; empty: all alike
    """

    layer_bytes: tuple[int, ...]
    embedding_bytes: int = 0
    output_bytes: int = 0
    tied: bool = False
    output_work: float = 0.0
    embedding_work: float = 0.0
    layer_work: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for size in self.layer_bytes:
            checks.whole("layer_bytes", size)
        if not self.layer_bytes:
            raise ValueError("layer_bytes must name at least one layer, got ()")
        checks.whole("embedding_bytes", self.embedding_bytes)
        checks.whole("output_bytes", self.output_bytes)
        checks.flag("tied", self.tied)
        checks.number("output_work", self.output_work)
        checks.number("embedding_work", self.embedding_work)
        for work in self.layer_work:
            checks.number("layer_work", work)
        if self.layer_work and len(self.layer_work) != len(self.layer_bytes):
            raise ValueError(
                f"layer_work names {len(self.layer_work)} layers, layer_bytes {len(self.layer_bytes)}"
            )

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return len(self.layer_bytes)


@dataclass(frozen=True, slots=True)
class PlacementNode:
    """What a node can hold and how fast it is.

    memory_bytes  room for weights and KV; decode_ms_per_layer, embed_ms, output_ms,
                  prefill_ms_per_token_layer
    as in `NodeTimes`, at the batch size the placement is for. embed_ms and output_ms None: not measured, the
    model's `embedding_work` and `output_work` stand in. shards: what it holds now. extra_bytes: what each
    layer takes on this node beyond the model's `layer_bytes` (KV for its own slots). pinned: it keeps what it
    holds and takes nothing more; its memory does not count.
    """

    node_id: str
    memory_bytes: int
    decode_ms_per_layer: float
    output_ms: float | None = None
    embed_ms: float | None = None
    prefill_ms_per_token_layer: float = 0.0
    shards: tuple[LayerRange, ...] = ()
    extra_bytes: int = 0
    pinned: bool = False

    def __post_init__(self) -> None:
        checks.name("node_id", self.node_id)
        checks.whole("memory_bytes", self.memory_bytes)
        checks.whole("extra_bytes", self.extra_bytes)
        checks.flag("pinned", self.pinned)
        checks.positive("decode_ms_per_layer", self.decode_ms_per_layer)
        for name in ("output_ms", "embed_ms"):
            value = getattr(self, name)
            if value is not None:
                checks.number(name, value)
        checks.number("prefill_ms_per_token_layer", self.prefill_ms_per_token_layer)
        object.__setattr__(self, "shards", checks.layer_ranges("shards", self.shards))


class PlacementImpossible(Exception):
    """The nodes cannot hold the model: `needed_bytes` against `memory_bytes`, both in all."""

    def __init__(self, needed_bytes: int, memory_bytes: int, detail: str) -> None:
        self.needed_bytes, self.memory_bytes, self.detail = needed_bytes, memory_bytes, detail
        super().__init__(detail)

    def __reduce__(self) -> tuple[object, ...]:
        return PlacementImpossible, (self.needed_bytes, self.memory_bytes, self.detail)


@dataclass(frozen=True, slots=True)
class Placement:
    """Who should hold what, and why.

    stages        the pipeline that covers the model
    shards        per node, all the layers it should hold, replicas and what it keeps included
    loads, drops  per node, the layers that are new to it, and those it should let go
    cuts          the first layers of all shards and stages: where nodes should be able to enter
    stage_ms      per stage, milliseconds per token; slowest_ms: the most of them
    latency_ms    milliseconds per token through all stages and links
    exact         the pipeline is proven the best for the objective
    why           sentences for people
    """

    objective: Objective
    stages: tuple[Stage, ...]
    shards: Mapping[str, tuple[LayerRange, ...]]
    loads: Mapping[str, tuple[LayerRange, ...]]
    drops: Mapping[str, tuple[LayerRange, ...]]
    cuts: tuple[int, ...]
    stage_ms: tuple[float, ...]
    slowest_ms: float
    latency_ms: float
    exact: bool
    why: tuple[str, ...] = field(default=())

    @property
    def moved_layers(self) -> int:
        """How many layers have to be loaded, over all nodes."""
        return sum(last - first + 1 for ranges in self.loads.values() for first, last in ranges)

    def to_dict(self) -> dict[str, object]:
        """JSON form."""

        def listed(ranges: Mapping[str, tuple[LayerRange, ...]]) -> dict[str, object]:
            return {node_id: [list(pair) for pair in pairs] for node_id, pairs in sorted(ranges.items())}

        return {
            "objective": self.objective,
            "stages": [
                stage.to_dict() | {"ms_per_token": ms}
                for stage, ms in zip(self.stages, self.stage_ms, strict=True)
            ],
            "shards": listed(self.shards),
            "loads": listed(self.loads),
            "drops": listed(self.drops),
            "cuts": list(self.cuts),
            "slowest_ms": self.slowest_ms,
            "latency_ms": self.latency_ms,
            "moved_layers": self.moved_layers,
            "exact": self.exact,
            "why": list(self.why),
        }


def place(
    model: ModelLayers,
    nodes: Iterable[PlacementNode],
    *,
    links: Mapping[tuple[str, str], Link] | None = None,
    unknown_link: Link = UNKNOWN_LINK,
    objective: Objective = "throughput",
    max_stages: int = EXACT_NODES,
    prompt_share: float = 0.0,
    slack: float = 0.05,
    holders: int = 1,
) -> Placement:
    """Places the model on the nodes.

    links         by (from, to); one direction stands for both; `unknown_link` for what was never measured
    max_stages    stages of the pipeline, unless memory needs more
    prompt_share  prompt tokens computed per token generated: how much prefill speed counts
    slack         how much worse than the best a placement may be that loads fewer layers
    holders       how many nodes should hold each layer, where memory allows; nodes that would hold nothing
                  replicate in any case

    PlacementImpossible when the nodes cannot hold the model; ValueError on bad input. The order of `nodes`
    does not matter.
    """
    listed = sorted(nodes, key=lambda node: node.node_id)
    _check(model, listed, objective, max_stages, prompt_share, slack, holders)
    grid = _grid(model, listed, links or {}, unknown_link, prompt_share)
    layout = best_layout(grid, objective, max_stages, slack)
    if layout is None:
        raise _impossible(model, listed, grid)
    stages = tuple(Stage(listed[node].node_id, first, last) for node, first, last in layout.stages)
    holdings = replicate(grid, layout, [set(_layers(node.shards)) for node in listed], holders)
    return _placement(objective, model, listed, grid, layout, stages, holdings)


def _check(
    model: ModelLayers,
    nodes: list[PlacementNode],
    objective: str,
    max_stages: int,
    prompt_share: float,
    slack: float,
    holders: int,
) -> None:
    if objective not in ("throughput", "latency"):
        raise ValueError(f"objective must be throughput or latency, got {objective!r}")
    checks.whole("max_stages", max_stages, 1)
    checks.number("prompt_share", prompt_share)
    checks.number("slack", slack)
    checks.whole("holders", holders, 1)
    for node, after in pairwise(nodes):
        if node.node_id == after.node_id:
            raise ValueError(f"node_id {node.node_id!r} stands twice among the nodes")
    for node in nodes:
        for first, last in node.shards:
            if last >= model.layers:
                raise ValueError(
                    f"shards of {node.node_id!r} hold {first}-{last}, the model has {model.layers} layers"
                )


def _grid(
    model: ModelLayers,
    nodes: list[PlacementNode],
    links: Mapping[tuple[str, str], Link],
    unknown_link: Link,
    prompt_share: float,
) -> Grid:
    def link(a: str, b: str) -> int:
        found = links.get((a, b)) or links.get((b, a)) or unknown_link
        return 0 if a == b else to_units(found.ms)

    per_layer = [node.decode_ms_per_layer + prompt_share * node.prefill_ms_per_token_layer for node in nodes]
    works = model.layer_work or (1.0,) * model.layers
    mean = sum(works) / len(works) or 1.0

    def end(measured: float | None, work: float, ms: float) -> int:
        return to_units(work * ms if measured is None else measured)

    return Grid(
        layer_bytes=model.layer_bytes,
        embedding_bytes=model.embedding_bytes,
        output_bytes=model.output_bytes,
        tied=model.tied,
        memory=[node.memory_bytes for node in nodes],
        layer_units=[[to_units(ms * work / mean) for work in works] for ms in per_layer],
        embed_units=[
            end(n.embed_ms, model.embedding_work, ms) for n, ms in zip(nodes, per_layer, strict=True)
        ],
        output_units=[
            end(n.output_ms, model.output_work, ms) for n, ms in zip(nodes, per_layer, strict=True)
        ],
        link_units=[[link(a.node_id, b.node_id) for b in nodes] for a in nodes],
        held=[frozenset(_layers(node.shards)) for node in nodes],
        marks=sorted(
            {0, model.layers} | {border for n in nodes for a, b in n.shards for border in (a, b + 1)}
        ),
        extra_bytes=[node.extra_bytes for node in nodes],
        pinned=[node.pinned for node in nodes],
    )


def _placement(
    objective: Objective,
    model: ModelLayers,
    nodes: list[PlacementNode],
    grid: Grid,
    layout: Layout,
    stages: tuple[Stage, ...],
    holdings: Holdings,
) -> Placement:
    before = {node.node_id: set(_layers(node.shards)) for node in nodes}
    after = {node.node_id: layers for node, layers in zip(nodes, holdings.layers, strict=True)}
    units = [grid.stage_units(node, first, last) for node, first, last in layout.stages]
    boundaries = {first for ranges in after.values() for first, _ in runs(ranges)}
    boundaries |= {last + 1 for ranges in after.values() for _, last in runs(ranges)}
    boundaries |= {stage.start_layer for stage in stages}
    split = _split(after, boundaries)
    loads = {node_id: tuple(runs(after[node_id] - before[node_id])) for node_id in after}
    drops = {node_id: tuple(runs(before[node_id] - after[node_id])) for node_id in after}
    placement = Placement(
        objective=objective,
        stages=stages,
        shards=split,
        loads={node_id: ranges for node_id, ranges in loads.items() if ranges},
        drops={node_id: ranges for node_id, ranges in drops.items() if ranges},
        cuts=tuple(sorted(boundaries - {0, model.layers})),
        stage_ms=tuple(map(to_ms, units)),
        slowest_ms=to_ms(max(units)),
        latency_ms=to_ms(grid.latency(layout.stages)),
        exact=layout.exact,
    )
    notes = [f"{nodes[node].node_id}: {text}" for node, text in holdings.notes]
    return replace(placement, why=(*_why(placement, model, nodes, grid, layout), *notes))


def _split(after: Mapping[str, set[int]], boundaries: set[int]) -> dict[str, tuple[LayerRange, ...]]:
    """Each node's layers as shards that end at every cut inside them, so that a stage can start there."""
    shards = {}
    for node_id, layers in after.items():
        ranges = []
        for first, last in runs(layers):
            marks = [first, *sorted(b for b in boundaries if first < b <= last), last + 1]
            ranges += [(a, b - 1) for a, b in pairwise(marks)]
        if ranges:
            shards[node_id] = tuple(ranges)
    return shards


def _why(
    placement: Placement, model: ModelLayers, nodes: list[PlacementNode], grid: Grid, layout: Layout
) -> list[str]:
    memory = {node.node_id: node.memory_bytes for node in nodes}
    count = len(placement.stages)
    slowest = placement.stages[placement.stage_ms.index(placement.slowest_ms)]
    why = [
        f"{count} {'stage covers' if count == 1 else 'stages cover'} {model.layers} layers, chosen for "
        f"{placement.objective}: {placement.latency_ms:.3g} ms per token; the slowest, {slowest}, takes "
        f"{placement.slowest_ms:.3g} ms" + ("." if placement.exact else " (by rule, not proven the best).")
    ]
    for stage, ms in zip(placement.stages, placement.stage_ms, strict=True):
        parts = [f"{stage.layers} layers"]
        parts += ["the embedding"] if stage.start_layer == 0 else []
        parts += ["the output matrix"] if stage.end_layer == model.layers - 1 else []
        used = _gb(grid.stage_bytes(stage.start_layer, stage.end_layer))
        why.append(f"{stage}: {' and '.join(parts)} in {ms:.3g} ms, {used} of {_gb(memory[stage.node_id])}.")
    if any(node.shards for node in nodes):
        why.append(
            f"{layout.moved} of the pipeline's layers have to be loaded; the best pipeline whatever it loads "
            f"takes {to_ms(layout.best_units):.3g} ms, this one {to_ms(layout.units):.3g} ms."
        )
    return why


def _impossible(model: ModelLayers, nodes: list[PlacementNode], grid: Grid) -> PlacementImpossible:
    needed = grid.stage_bytes(0, model.layers - 1)
    memory = sum(node.memory_bytes for node in nodes)
    if not nodes:
        return PlacementImpossible(needed, 0, f"there is no node; the model needs {_gb(needed)}")
    if memory < needed:
        detail = f"the model needs {_gb(needed)}, the {len(nodes)} nodes have {_gb(memory)} together"
    else:
        largest = max(model.layer_bytes)
        detail = (
            f"the model needs {_gb(needed)} and the {len(nodes)} nodes have {_gb(memory)} together, but no "
            f"order of them fits: a layer takes up to {_gb(largest)}, the first stage "
            f"{_gb(model.embedding_bytes)} and the last {_gb(model.output_bytes)} more"
        )
    return PlacementImpossible(needed, memory, f"{detail}; add a node or memory")


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


def _layers(ranges: Iterable[LayerRange]) -> list[int]:
    return [layer for first, last in ranges for layer in range(first, last + 1)]
