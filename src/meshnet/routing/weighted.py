"""The weighted cost: equivalent milliseconds from health reports, and the cheapest route by it.

    stage(n) = latency * latency_ms + load * current_load * 120 + capacity * 100 / max(capacity_score, 0.01)
    route(R) = sum of stage(n) over its stages + hop * 15 * (stages - 1) + prompt * 10 * prompt_tokens / 1024

Each stage, hop and prompt term is rounded once to 1e-9 ms; sums and comparisons are on whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from meshnet.routing.borders import ANY, Fork, Runner, cheapest
from meshnet.routing.checks import LayerRange
from meshnet.routing.costing import Choice, PlanInput, Quote, Term
from meshnet.routing.errors import NoRouteAvailable
from meshnet.routing.route import Route, Stage, merged
from meshnet.routing.state import NodeState, RouteWeights, RoutingRequest, distinct, window_of
from meshnet.routing.units import to_ms, to_units

LOAD_MS = 120.0
"""What a node whose slots are all busy is charged."""
CAPACITY_MS = 100.0
"""Divided by the capacity score."""
LEAST_SCORE = 0.01
"""A lower capacity score counts as this one."""
HOP_MS = 15.0
"""What each border between stages is charged."""
PROMPT_MS = 10.0
"""What each 1,024 tokens of prompt are charged, once per route."""

UNWEIGHTED = RouteWeights()
ANY_REQUEST = RoutingRequest()


def stage_cost(state: NodeState, weights: RouteWeights = UNWEIGHTED) -> float:
    """What a stage on this node costs, in equivalent milliseconds, rounded to 1e-9."""
    return to_ms(stage_units(state, weights))


def route_cost(
    stages: Iterable[Stage],
    states: Iterable[NodeState],
    request: RoutingRequest = ANY_REQUEST,
    weights: RouteWeights = UNWEIGHTED,
) -> float:
    """What a route costs, in equivalent milliseconds; infinity for no stages.

    Adjoining stages of one node count as one; a node that comes back later is charged again.
    ValueError when a stage's node has no state or two states carry the same id.
    """
    listed = merged(stages)
    if not listed:
        return math.inf
    by_id = {state.node_id: state for state in distinct(states)}
    for stage in listed:
        if stage.node_id not in by_id:
            raise ValueError(f"stages name the node {stage.node_id!r}, which has no state")
    units = sum(stage_units(by_id[stage.node_id], weights) for stage in listed)
    return to_ms(units + hop_units(weights) * (len(listed) - 1) + prompt_units(request, weights))


def score_route(
    request: RoutingRequest,
    states: Iterable[NodeState],
    weights: RouteWeights = UNWEIGHTED,
    model: str = "",
) -> Route:
    """The cheapest route over the window by the weighted cost.

    Equal costs: fewer stages, then the first sequence of node ids, then stages that end later. The order of
    `states` does not matter. NoRouteAvailable when no path is complete; ValueError on duplicate node ids.
    """
    live = distinct(states)
    window = window_of(request, live)
    if window is None:
        raise NoRouteAvailable(model, None)
    found = cheapest(window, runners(live, weights), hop_units(weights))
    if found.stages is None:
        raise NoRouteAvailable(model, window, found.reached)
    return Route.from_stages(found.stages, to_ms(found.units + prompt_units(request, weights)), window, model)


def runners(states: Iterable[NodeState], weights: RouteWeights) -> list[Runner]:
    """The live states as the path search takes them."""
    return [
        Runner(state.node_id, stage_units(state, weights), state.served_layers, state.mid_shard_entry)
        for state in states
        if state.alive
    ]


def stage_units(state: NodeState, weights: RouteWeights) -> int:
    """`stage_cost` in units of 1e-9 ms."""
    return to_units(
        weights.latency * state.latency_ms
        + weights.load * state.current_load * LOAD_MS
        + weights.capacity * CAPACITY_MS / max(state.capacity_score, LEAST_SCORE)
    )


def hop_units(weights: RouteWeights) -> int:
    """One border between stages, in units of 1e-9 ms."""
    return to_units(weights.hop * HOP_MS)


def prompt_units(request: RoutingRequest, weights: RouteWeights) -> int:
    """The prompt's term, in units of 1e-9 ms."""
    return to_units(weights.prompt * PROMPT_MS * request.prompt_tokens / 1024)


@dataclass(frozen=True, slots=True)
class WeightedCost:
    """The cost model that `plan` uses for equivalent milliseconds.

    It knows no slots and no KV room: full nodes are the caller's to exclude (`room_exclusions`).
    """

    weights: RouteWeights = field(default_factory=RouteWeights)

    @property
    def name(self) -> str:
        """As in the configuration."""
        return "weighted"

    def parameters(self) -> dict[str, object]:
        """What the explanation shows beside the candidates."""
        return {"weights": self.weights.to_dict()}

    def open(self, given: PlanInput) -> _WeightedCosting:
        """Binds the model to one planning task."""
        return _WeightedCosting(self.weights, given)


class _WeightedCosting:
    exact = True

    def __init__(self, weights: RouteWeights, given: PlanInput) -> None:
        self.weights = weights
        self.window: LayerRange = given.window
        self.request = given.request
        self.states = {state.node_id: state for state in given.states}
        self.runners = runners(given.states, weights)
        self.excluded: dict[str, str] = {}
        self.short_of_room: frozenset[str] = frozenset()

    def prefer(self) -> Choice | None:
        quote = self.least(ANY, frozenset())
        return None if quote is None else Choice(quote, "is the cheapest complete route")

    def least(self, fork: Fork, without: frozenset[str]) -> Quote | None:
        usable = [runner for runner in self.runners if runner.node_id not in without]
        found = cheapest(self.window, usable, hop_units(self.weights), fork)
        if found.stages is None:
            return None
        return Quote(found.units + prompt_units(self.request, self.weights), found.stages)

    def describe(self, quote: Quote) -> tuple[tuple[Term, ...], dict[str, float]]:
        w = self.weights
        terms = []
        for stage in quote.stages:
            state = self.states[stage.node_id]
            terms.append(Term("latency", str(stage), w.latency * state.latency_ms))
            terms.append(Term("load", str(stage), w.load * state.current_load * LOAD_MS))
            score = max(state.capacity_score, LEAST_SCORE)
            terms.append(Term("capacity", str(stage), w.capacity * CAPACITY_MS / score))
        hops = len(quote.stages) - 1
        terms.append(Term("hops", f"{hops} x {to_ms(hop_units(w))} ms", to_ms(hop_units(w) * hops)))
        prompt = to_ms(prompt_units(self.request, w))
        terms.append(Term("prompt", f"{self.request.prompt_tokens} tokens", prompt))
        return tuple(terms), {}
