"""The planner: one request in, the winner, the next routes and the reasons out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from itertools import count

from meshnet.routing import checks
from meshnet.routing.borders import ANY, END, Fork, Runner, cheapest
from meshnet.routing.checks import LayerRange
from meshnet.routing.costing import Choice, Costing, CostModel, PlanInput, Quote
from meshnet.routing.errors import NoRouteAvailable
from meshnet.routing.explanation import Candidate, Explanation, Plan
from meshnet.routing.route import Route
from meshnet.routing.state import NodeState, RoutingRequest, distinct, window_of
from meshnet.routing.units import to_ms


def plan(
    request: RoutingRequest,
    states: Iterable[NodeState],
    cost_model: CostModel,
    *,
    alternatives: int = 3,
    model: str = "",
    excluded: Mapping[str, str] | None = None,
    cached_tokens: Mapping[str, int] | None = None,
) -> Plan:
    """Chooses a route by `cost_model` and explains it.

    request        window, prompt and expected tokens; without a window: the layers that live nodes serve,
                   those that are excluded included, so that a full node never makes the model shorter
    alternatives   how many further routes are wanted: the next by total, one per sequence of nodes, so that
                   routes which differ in a cut alone are not listed. The cheapest that shares no node with
                   the winner is always among them where it exists, as the standby
    model          a label
    excluded       node ids the caller rules out, each with the reason as the rest of a sentence
    cached_tokens  tokens of this prompt that a node already holds for the layers it would run; measured time
                   charges a route only for what not all of its nodes hold

    NoRouteAvailable when no path is complete; its `busy` tells that one would be if every node had room.
    ValueError on bad input. The order of `states` does not matter.
    """
    checks.whole("alternatives", alternatives)
    ruled_out = {checks.name("excluded", node): reason for node, reason in (excluded or {}).items()}
    held = {
        node: checks.whole(f"cached_tokens[{node!r}]", tokens)
        for node, tokens in (cached_tokens or {}).items()
    }
    known = distinct(states)
    window = window_of(request, known)
    if window is None:
        raise NoRouteAvailable(model, None)
    usable = tuple(state for state in known if state.alive and state.node_id not in ruled_out)
    costing = cost_model.open(PlanInput(request, window, usable, held))
    left_out = _left_out(known, window, ruled_out) | dict(costing.excluded)
    choice = costing.prefer()
    if choice is None:
        considered = [state for state in usable if state.node_id not in costing.excluded]
        roomy = [
            state for state in usable if state.node_id not in set(costing.excluded) - costing.short_of_room
        ]
        raise NoRouteAvailable(
            model,
            window,
            _reached(considered, window),
            excluded=left_out,
            busy=bool(costing.short_of_room) and _reached(roomy, window) == window[1] + 1,
        )
    return _explained(cost_model, costing, model, window, choice, alternatives, left_out)


def _explained(
    cost_model: CostModel,
    costing: Costing,
    model: str,
    window: LayerRange,
    choice: Choice,
    alternatives: int,
    left_out: Mapping[str, str],
) -> Plan:
    others, standby = _others(costing, choice, alternatives) if alternatives else ([], None)
    weighed = [quote for quote in choice.weighed if quote != choice.quote and quote not in others]
    ranked = sorted([*others, *weighed], key=lambda quote: quote.order)

    def route(quote: Quote) -> Route:
        return Route.from_stages(quote.stages, to_ms(quote.units), window, model)

    def candidate(quote: Quote, roles: Iterable[str]) -> Candidate:
        terms, totals = costing.describe(quote)
        return Candidate(route(quote), tuple(roles), terms, totals)

    def roles(quote: Quote) -> tuple[str, ...]:
        if quote not in others:
            return ("weighed",)
        return ("alternative", "standby") if quote == standby else ("alternative",)

    explanation = Explanation(
        model=model,
        window=window,
        cost_model=cost_model.name,
        parameters=cost_model.parameters(),
        why=_sentence(choice, others[0] if others else None),
        candidates=(candidate(choice.quote, ["winner"]), *(candidate(q, roles(q)) for q in ranked)),
        excluded=dict(left_out),
        exact=costing.exact,
    )
    return Plan(
        route=route(choice.quote),
        alternatives=tuple(map(route, others)),
        standby=None if standby is None else route(standby),
        explanation=explanation,
    )


def _others(costing: Costing, choice: Choice, wanted: int) -> tuple[list[Quote], Quote | None]:
    """The next routes in order, and the standby among them.

    The routes are taken in order of their totals, one per sequence of nodes: what differs from a route that
    was taken leaves its sequence after some node, so each place where it can be left is a search of its own.
    """
    standby = costing.least(ANY, choice.quote.nodes)
    listed: list[Quote] = []
    waiting: list[tuple[object, int, Quote, Fork]] = []
    searches = count()

    def search(fork: Fork) -> None:
        quote = costing.least(fork, frozenset())
        if quote is not None:
            heappush(waiting, (quote.order, next(searches), quote, fork))

    search(ANY)
    while waiting and len(listed) < wanted:
        _, _, quote, fork = heappop(waiting)
        path = tuple(stage.node_id for stage in quote.stages)
        if path != tuple(stage.node_id for stage in choice.quote.stages):
            listed.append(quote)
        if len(listed) < wanted:
            for place in range(len(fork.prefix), len(path) + 1):
                kept = fork.barred if place == len(fork.prefix) else frozenset()
                following = path[place] if place < len(path) else END
                search(Fork(path[:place], kept | {following}))
    if standby is not None and standby not in listed:
        listed = sorted([*listed[: wanted - 1], standby], key=lambda quote: quote.order)
    return listed, standby


def _sentence(choice: Choice, following: Quote | None) -> str:
    text = f"{choice.quote} at {to_ms(choice.quote.units):.1f} ms {choice.reason}"
    if following is None:
        return f"{text}."
    return f"{text}; next comes {following} at {to_ms(following.units):.1f} ms."


def _left_out(
    states: Iterable[NodeState], window: LayerRange, ruled_out: Mapping[str, str]
) -> dict[str, str]:
    first, last = window
    reasons = {}
    for state in states:
        if not state.alive:
            reasons[state.node_id] = "is not alive"
        elif state.node_id in ruled_out:
            reasons[state.node_id] = ruled_out[state.node_id]
        elif not any(a <= last and b >= first for a, b in state.served_layers):
            reasons[state.node_id] = f"serves no layer of {first}-{last}"
    return reasons


def _reached(states: Iterable[NodeState], window: LayerRange) -> int:
    """The highest border that these nodes reach from the window's start, whatever it costs."""
    runners = [Runner(state.node_id, 0, state.served_layers, state.mid_shard_entry) for state in states]
    return cheapest(window, runners).reached
