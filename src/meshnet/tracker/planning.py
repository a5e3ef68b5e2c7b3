"""From the mesh as it is to routes: what the router is told, and what it is asked. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from meshnet.protocol.calls import RouteStage
from meshnet.routing import (
    CostModel,
    FailoverDecision,
    Link,
    MeasuredCost,
    NodeState,
    NodeTimes,
    NoRouteAvailable,
    Plan,
    Route,
    RouteWeights,
    RoutingRequest,
    Stage,
    WeightedCost,
    failover,
    plan,
    score_route,
)
from meshnet.tracker.catalogue import borders, holders
from meshnet.tracker.members import LinkView, Node, Shard

CostName = Literal["measured", "weighted"]
UNREACHABLE = Link(ms=60_000.0, bytes_per_s=1.0)
"""Stands for a link that its sender reported as broken: only taken where there is no other way."""
ENOUGH = 1 << 40
PREFILL_CHUNK = 256


@dataclass(frozen=True, slots=True)
class ModelRouting:
    """How routes of a model are chosen."""

    cost_model: CostName = "measured"
    weights: RouteWeights = field(default_factory=RouteWeights)


@dataclass(frozen=True, slots=True)
class View:
    """The nodes of one model that may share a route: one fingerprint, one engine version."""

    model: str
    fingerprint: str
    engine_version: str
    layers: int
    n_embd: int
    n_ctx: int
    states: tuple[NodeState, ...]
    times: Mapping[str, NodeTimes]
    links: Mapping[tuple[str, str], Link]
    numerics: Mapping[str, str]
    addresses: Mapping[str, str]
    routable: frozenset[str]
    """Nodes that new calls may use; others only go on with what they run."""

    @property
    def window(self) -> tuple[int, int]:
        return 0, self.layers - 1


class RouteRefused(Exception):
    """A forced route that cannot be taken (409); `gap` is the layers that nobody named would run."""

    def __init__(self, message: str, gap: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.gap = gap


Adjust = Callable[[str, str, NodeTimes], NodeTimes]
"""(node id, model id, what the node says) -> what routing should believe."""


def as_told(node_id: str, model: str, times: NodeTimes) -> NodeTimes:
    return times


def views(
    nodes: Iterable[Node],
    links: Mapping[tuple[str, str], LinkView],
    model_id: str,
    now: float,
    adjust: Adjust = as_told,
) -> list[View]:
    """What can be routed over, one view per engine version (unlike versions never share a route)."""
    held: dict[tuple[str, str], dict[str, list[Shard]]] = {}
    by_id: dict[str, Node] = {}
    all_nodes = list(nodes)
    for node, shard in holders(all_nodes, model_id):
        if node.alive(now) and shard.usable:
            by_id[node.node_id] = node
            group = held.setdefault((shard.fingerprint, node.engine_version), {})
            group.setdefault(node.node_id, []).append(shard)
    cuts = borders(all_nodes, model_id)
    found = []
    for (fingerprint, engine_version), shards in sorted(held.items()):
        first = next(iter(shards.values()))[0]
        mine = {node_id: by_id[node_id] for node_id in sorted(shards)}
        view = View(
            model=model_id.lower(),
            fingerprint=fingerprint,
            engine_version=engine_version,
            layers=first.model_layers,
            n_embd=first.n_embd,
            n_ctx=min(shard.n_ctx for group in shards.values() for shard in group),
            states=tuple(_state(node, shards[node_id], cuts) for node_id, node in mine.items()),
            times={
                node_id: adjust(node_id, first.model, _times(node, shards[node_id]))
                for node_id, node in mine.items()
            },
            links={
                pair: UNREACHABLE if link.error else Link(link.ms, link.bytes_per_s or 1.0)
                for pair, link in links.items()
                if pair[0] in mine and pair[1] in mine
            },
            numerics={node_id: shards[node_id][0].numerics_class for node_id in mine},
            addresses={node_id: node.grpc_address for node_id, node in mine.items()},
            routable=frozenset(node_id for node_id, node in mine.items() if node.routable(now)),
        )
        found.append(view)
    return found


def _state(node: Node, shards: Sequence[Shard], cuts: Sequence[int]) -> NodeState:
    anywhere = all(shard.mid_shard_entry for shard in shards)
    served: set[tuple[int, int]] = set()
    for shard in shards:
        served.add((shard.start_layer, shard.end_layer))
        if not anywhere:
            served.update(_entered(shard, cuts))
    return NodeState(
        node_id=node.node_id,
        latency_ms=node.latency_ms,
        current_load=node.current_load,
        capacity_score=max(shard.capacity_score for shard in shards),
        served_layers=tuple(sorted(served)),
        mid_shard_entry=anywhere,
    )


def _entered(shard: Shard, cuts: Sequence[int]) -> Iterable[tuple[int, int]]:
    """The runs that a shard with some entry layers offers: from each entry to its end or to a border."""
    entries = range(shard.start_layer, shard.end_layer + 1) if shard.mid_shard_entry else shard.entry_layers
    for entry in entries:
        yield entry, shard.end_layer
        for cut in cuts:
            if entry < cut <= shard.end_layer:
                yield entry, cut - 1


def _times(node: Node, shards: Sequence[Shard]) -> NodeTimes:
    """Layer-weighted means where a node holds several shards of the model."""
    layers = [shard.end_layer - shard.start_layer + 1 for shard in shards]
    total = sum(layers)

    def mean(values: Iterable[float]) -> float:
        return sum(value * count for value, count in zip(values, layers, strict=True)) / total

    return NodeTimes(
        decode_ms_per_layer=mean(shard.times.decode_ms_per_layer for shard in shards),
        prefill_ms_per_token_layer=mean(shard.times.prefill_ms_per_token_layer for shard in shards),
        embed_ms=max((shard.times.embed_ms for shard in shards if shard.is_head), default=0.0),
        output_ms=max((shard.times.output_ms for shard in shards if shard.is_tail), default=0.0),
        # Room is the caller's to judge: see `choose`.
        free_slots=1,
        free_kv_tokens=ENOUGH,
        queue_ms=max(shard.queue_ms for shard in shards),
    )


def choose(
    view: View,
    routing: ModelRouting,
    request: RoutingRequest,
    full: Collection[str],
    *,
    excluded: Mapping[str, str] | None = None,
    cached_tokens: Mapping[str, int] | None = None,
    alternatives: int = 0,
) -> Plan:
    """The best route over all layers of the model, unless `request` says otherwise.

    `full` are the nodes without room for the call. Raises NoRouteAvailable; its `busy` says that a route
    would exist if they had room.
    """
    if request.layer_range is None:
        request = replace(request, layer_range=view.window)
    ruled_out = {state.node_id: "is draining" for state in view.states if state.node_id not in view.routable}
    ruled_out.update(excluded or {})
    cost: CostModel = WeightedCost(routing.weights)
    if routing.cost_model == "measured":
        cost = MeasuredCost(view.times, view.links, 4 * view.n_embd, PREFILL_CHUNK)
    without = {**dict.fromkeys(full, "has no free slot or KV room"), **ruled_out}
    try:
        return plan(
            request,
            view.states,
            cost,
            alternatives=alternatives,
            model=view.model,
            excluded=without,
            cached_tokens=cached_tokens,
        )
    except NoRouteAvailable as error:
        busy = bool(full) and reachable(view, ruled_out)
        raise NoRouteAvailable(
            error.model, error.window, error.blocked_at, excluded=error.excluded, busy=busy
        ) from error


def reachable(view: View, without: Collection[str]) -> bool:
    """True when a whole route exists without these nodes, whatever room there is."""
    states = [s for s in view.states if s.node_id in view.routable and s.node_id not in without]
    try:
        score_route(RoutingRequest(view.window), states)
    except NoRouteAvailable:
        return False
    return True


def forced(nodes: Sequence[Node], model_id: str, layers: int) -> tuple[Stage, ...]:
    """Stages of the nodes as named: each runs to the end of its shard, the next starts one layer later.

    Raises RouteRefused (409) naming the gap, or the layer at which a node cannot be entered.
    """
    stages: list[Stage] = []
    start = 0
    for node in nodes:
        if start >= layers:
            raise RouteRefused(
                f"node {node.name!r} has nothing to run: all {layers} layers are covered before it"
            )
        holding = [
            shard
            for shard in node.shards
            if shard.model == model_id and shard.usable and shard.start_layer <= start <= shard.end_layer
        ]
        if not holding:
            mine = [shard for shard in node.shards if shard.model == model_id]
            held = ", ".join(f"{shard.start_layer}-{shard.end_layer}" for shard in mine)
            later = [shard.start_layer for shard in mine if shard.start_layer > start]
            gap = (start, min(later, default=layers) - 1)
            raise RouteRefused(
                f"no named node runs layers {gap[0]}-{gap[1]}: {node.name!r} holds {held or 'none'} of "
                f"{model_id!r}",
                gap,
            )
        enterable = [shard for shard in holding if shard.mid_shard_entry or start in shard.entry_layers]
        if not enterable:
            entries = ", ".join(map(str, holding[0].entry_layers))
            raise RouteRefused(
                f"node {node.name!r} cannot be entered at layer {start} (its entry layers: {entries}); "
                f"start it with --entry {start}",
                (start, holding[0].end_layer),
            )
        end = max(shard.end_layer for shard in enterable)
        stages.append(Stage(node.node_id, start, end))
        start = end + 1
    if start < layers:
        raise RouteRefused(
            f"the named nodes do not run layers {start}-{layers - 1} of {model_id!r}", (start, layers - 1)
        )
    return tuple(stages)


def substitute(
    view: View,
    stages: Sequence[Stage],
    failed: Collection[str],
    routing: ModelRouting,
    *,
    candidates: Collection[str],
    prompt_tokens: int,
    numerics_class: str = "",
) -> FailoverDecision:
    """The route after nodes were lost (design 3.4); `failed` names at least one of the route's.

    `candidates` are the nodes with room for the call, `numerics_class` restricts them to one class. Raises
    RoutingFailure.
    """
    allowed = {node for node in candidates if node in view.routable and node not in failed}
    if numerics_class:
        allowed = {node for node in allowed if view.numerics[node] == numerics_class}
    states = [replace(s, alive=False) if s.node_id in failed else s for s in view.states]
    redundancy = {
        layer: [s.node_id for s in view.states if any(a <= layer <= b for a, b in s.served_layers)]
        for layer in range(view.layers)
    }
    first = next(stage.node_id for stage in stages if stage.node_id in failed)
    return failover(
        Route.from_stages(stages, 0.0, view.window, view.model),
        redundancy,
        first,
        states=states,
        weights=routing.weights,
        request=RoutingRequest(view.window, prompt_tokens),
        substitutes=allowed,
    )


def route_stages(stages: Iterable[Stage], addresses: Mapping[str, str]) -> tuple[RouteStage, ...]:
    """Stages as nodes need them, with where to dial."""
    return tuple(
        RouteStage(stage.node_id, stage.start_layer, stage.end_layer, addresses[stage.node_id])
        for stage in stages
    )


def route_text(stages: Iterable[Stage], name_of: Callable[[str], str]) -> str:
    """`node[0-14]>node[15-29]`, as in the header X-Meshnet-Route."""
    return ">".join(f"{name_of(s.node_id)}[{s.start_layer}-{s.end_layer}]" for s in stages)
