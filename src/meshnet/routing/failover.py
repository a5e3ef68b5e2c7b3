"""What becomes of a route when a node in it fails."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from meshnet.routing import checks
from meshnet.routing.borders import Found, Runner, cheapest, exits
from meshnet.routing.checks import LayerRange
from meshnet.routing.errors import RoutingFailure, layer_text, runs
from meshnet.routing.route import Route, Stage, covers, merged
from meshnet.routing.state import NodeState, RouteWeights, RoutingRequest, distinct
from meshnet.routing.weighted import ANY_REQUEST, hop_units, route_cost, runners


@dataclass(frozen=True, slots=True)
class FailoverDecision:
    """The route to go on with, why, and whether it is degraded.

    A degraded route is what is left of the old one, with the fallback model's name. It never runs the
    original model: it tells the caller to plan the fallback model.
    """

    route: Route
    reason: str
    degraded: bool = False


def failover(
    route: Route,
    redundancy_map: Mapping[int, Iterable[str]],
    failed_node: str,
    *,
    states: Iterable[NodeState],
    weights: RouteWeights,
    request: RoutingRequest = ANY_REQUEST,
    fallback_model: str | None = None,
    substitutes: Collection[str] | None = None,
) -> FailoverDecision:
    """Replaces `failed_node` in `route`.

    redundancy_map  layer -> ids of the nodes that hold it; used only to learn which layers a failed node ran
    states          every node of the mesh; a node of the route without a live state counts as failed too
    request         its prompt_tokens are priced; its layer_range is the window where the route has none
    fallback_model  what to degrade to when layers have no holder
    substitutes     the only nodes that may take layers over; None: every live node (of one numerics class,
                    say)

    1. A failed node that is not in the route: the same route comes back.
    2. The layers to replace are those of the failed node's stages, not all the layers it serves: what another
       stage runs needs no substitute. A route by names alone has no stages; then they are all the layers of
       the failed node's state, else those the redundancy map names for it, and the survivors in their order
       keep the rest. Always within the window.
    3. Each missing run is taken over by the cheapest path over it, in the failed node's place. Adjoining
       stages of one node become one. If a run cannot be taken over by itself, or the survivors of a route by
       names cannot run the rest, the whole window is planned anew.
    4. Layers still without a holder: a degraded route with `fallback_model`, else RoutingFailure.

    ValueError on duplicate node ids and layers that are not integers.
    """
    if failed_node not in route.node_ids:
        return FailoverDecision(route, f"{failed_node!r} does not take part in the route")
    known = {state.node_id: state for state in distinct(states)}
    live = {node_id: s for node_id, s in known.items() if s.alive and node_id != failed_node}
    holders = {checks.whole("redundancy_map layer", layer): set(ids) for layer, ids in redundancy_map.items()}
    window = route.window or request.layer_range or _span(route, known.values(), holders)
    failed = sorted({node_id for node_id in route.node_ids if node_id not in live})
    repair = _Repair(route, window, known, live, holders, weights, substitutes)
    names = " and ".join(map(repr, failed))
    stages = repair.in_place()
    if stages is not None:
        layers = layer_text(layer for run in repair.missing for layer in range(run[0], run[1] + 1))
        takers = ", ".join(map(str, repair.takers))
        reason = f"{names} failed; layers {layers} are taken over by {takers}"
    else:
        stages = repair.anew()
        reason = f"{names} failed; the whole window {window[0]}-{window[1]} was planned anew"
    if stages is not None:
        cost = route_cost(stages, live.values(), request, weights)
        return FailoverDecision(Route.from_stages(stages, cost, window, route.model), reason)
    orphans = repair.orphans()
    if fallback_model is None:
        raise RoutingFailure(route.model, orphans, f"{names} failed")
    left = repair.left_over(fallback_model)
    reason = f"{names} failed and layers {layer_text(orphans)} have no holder: plan {fallback_model!r}"
    return FailoverDecision(left, reason, degraded=True)


def _span(route: Route, states: Iterable[NodeState], holders: Mapping[int, set[str]]) -> LayerRange:
    """The window of a route without one: all layers anyone is known for, so that it gets no shorter."""
    layers = {layer for stage in route.stages for layer in (stage.start_layer, stage.end_layer)}
    layers.update(layer for state in states for shard in state.served_layers for layer in shard)
    layers.update(holders)
    if not layers:
        raise ValueError(
            "the route has no window, and neither request, states nor redundancy_map name a layer"
        )
    return min(layers), max(layers)


class _Repair:
    """One failed route: what is missing, what survives, who can take over."""

    def __init__(
        self,
        route: Route,
        window: LayerRange,
        known: Mapping[str, NodeState],
        live: Mapping[str, NodeState],
        holders: Mapping[int, set[str]],
        weights: RouteWeights,
        substitutes: Collection[str] | None,
    ) -> None:
        self.route, self.window, self.live, self.weights = route, window, live, weights
        allowed = [s for s in live.values() if substitutes is None or s.node_id in substitutes]
        self.takers_allowed = runners(allowed, weights)
        in_route = [live[n] for n in dict.fromkeys(route.node_ids) if n in live]
        self.anyone = runners({s.node_id: s for s in [*allowed, *in_route]}.values(), weights)
        self.takers: list[Stage] = []
        gone = {node_id for node_id in route.node_ids if node_id not in live}
        if route.stages:
            lost = [(s.start_layer, s.end_layer) for s in route.stages if s.node_id in gone]
            self.missing = runs(layer for a, b in lost for layer in range(a, b + 1))
        else:
            self.missing = runs(
                layer for node_id in gone for layer in _layers(node_id, window, known, holders)
            )

    def in_place(self) -> tuple[Stage, ...] | None:
        """The survivors' stages with substitutes for each missing run; None where that leaves a gap."""
        kept = self._kept()
        if kept is None or not self.missing:
            return None
        taken: list[Stage] = []
        for run in self.missing:
            found = self._path(run, self.takers_allowed)
            if found.stages is None:
                return None
            taken.extend(found.stages)
        self.takers = taken
        stages = merged(sorted([*kept, *taken], key=lambda stage: stage.start_layer))
        return stages if covers(stages, self.window) else None

    def anew(self) -> tuple[Stage, ...] | None:
        """The cheapest route over the whole window."""
        return self._path(self.window, self.anyone).stages

    def orphans(self) -> list[int]:
        """The layers no live node holds; where all are held but do not fit, those nobody can take over."""
        window = range(self.window[0], self.window[1] + 1)
        held = {layer for r in self.anyone for a, b in r.shards for layer in range(a, b + 1)}
        unheld = [layer for layer in window if layer not in held]
        if unheld:
            return unheld
        stuck = [run for run in self.missing if self._path(run, self.takers_allowed).stages is None]
        reached = self._path(self.window, self.anyone).reached
        return [layer for a, b in stuck for layer in range(a, b + 1)] or [reached]

    def left_over(self, model: str) -> Route:
        """What survives of the route, under the fallback model's name."""
        if not self.route.stages:
            ids = [node_id for node_id in self.route.node_ids if node_id in self.live]
            ids = [node_id for index, node_id in enumerate(ids) if index == 0 or ids[index - 1] != node_id]
            return Route.from_node_ids(ids, self.window, model)
        stages = [stage for stage in self.route.stages if stage.node_id in self.live]
        return Route.from_stages(stages, math.inf, self.window, model)

    def _path(self, window: LayerRange, takers: list[Runner]) -> Found:
        return cheapest(window, takers, hop_units(self.weights))

    def _kept(self) -> tuple[Stage, ...] | None:
        if self.route.stages:
            return tuple(stage for stage in self.route.stages if stage.node_id in self.live)
        survivors = [self.live[node_id] for node_id in self.route.node_ids if node_id in self.live]
        return laid_out(survivors, self.window, self.missing)


def laid_out(
    survivors: list[NodeState], window: LayerRange, missing: list[LayerRange]
) -> tuple[Stage, ...] | None:
    """Gives the window's layers outside `missing` to the survivors in their order; None where they cannot run
    them.

    As many survivors as can keep a stage do; then stages end as late as they can, compared from the first on.
    """
    if len(survivors) > window[1] - window[0] + 1:
        return None
    stop = window[1] + 1
    resume = {first: last + 1 for first, last in missing}

    @cache
    def best(border: int, index: int) -> tuple[int, tuple[int, ...], tuple[Stage, ...]] | None:
        """(survivors used negated, ends negated, stages) from `border` on with survivors from `index` on."""
        if border == stop:
            return 0, (), ()
        if border in resume:
            return best(resume[border], index)
        limit = min([first for first, _ in missing if first > border], default=stop)
        found = None
        for number in range(index, len(survivors)):
            state = survivors[number]
            for end in exits(state.served_layers, state.mid_shard_entry, border, limit - 1):
                rest = best(end, number + 1)
                if rest is None:
                    continue
                stage = Stage(state.node_id, border, end - 1)
                option = (rest[0] - 1, (-end, *rest[1]), (stage, *rest[2]))
                if found is None or option[:2] < found[:2]:
                    found = option
        return found

    result = best(window[0], 0)
    return None if result is None else result[2]


def _layers(
    node_id: str, window: LayerRange, known: Mapping[str, NodeState], holders: Mapping[int, set[str]]
) -> list[int]:
    """The layers within the window that a failed node's state, or else the map, names."""
    first, last = window
    if node_id in known and known[node_id].served_layers:
        shards = known[node_id].served_layers
        return [layer for a, b in shards for layer in range(max(a, first), min(b, last) + 1)]
    return [layer for layer, ids in holders.items() if node_id in ids and first <= layer <= last]
