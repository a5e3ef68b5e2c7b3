"""The planner: winner, next routes, standby, and an explanation that adds up."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing import meshes, oracle

from meshnet.routing import (
    MeasuredCost,
    NodeState,
    NodeTimes,
    NoRouteAvailable,
    Plan,
    RouteWeights,
    RoutingRequest,
    WeightedCost,
    plan,
    score_route,
)

WORKED = [
    NodeState("gpu", 11.9, 0.98, 10.0, ((0, 3),)),
    NodeState("mini", 13.8, 0.1, 10.0, ((0, 3), (4, 7))),
    NodeState("laptop", 4.7, 0.05, 10.0, ((8, 11),)),
]


def test_the_worked_example_explains_itself() -> None:
    result = plan(RoutingRequest(None, 1024), WORKED, WeightedCost(), model="ncm")
    assert result.route == score_route(RoutingRequest(None, 1024), WORKED, RouteWeights(), "ncm")
    assert [route.node_ids for route in result.alternatives] == [("gpu", "mini", "laptop")]
    assert result.standby is None
    explanation = result.explanation
    assert explanation.why == (
        "mini (0-7) -> laptop (8-11) at 81.5 ms is the cheapest complete route; "
        "next comes gpu (0-3) -> mini (4-7) -> laptop (8-11) at 236.0 ms."
    )
    assert explanation.exact
    assert explanation.cost_model == "weighted"
    assert [candidate.roles for candidate in explanation.candidates] == [("winner",), ("alternative",)]
    terms = {(term.kind, term.about): term.ms for term in explanation.candidates[0].terms}
    assert terms["latency", "mini (0-7)"] == pytest.approx(13.8)
    assert terms["load", "mini (0-7)"] == pytest.approx(12.0)
    assert terms["capacity", "laptop (8-11)"] == pytest.approx(10.0)
    assert terms["hops", "1 x 15.0 ms"] == pytest.approx(15.0)
    assert terms["prompt", "1024 tokens"] == pytest.approx(10.0)
    assert sum(terms.values()) == pytest.approx(81.5)


def test_the_json_form_is_plain_and_complete() -> None:
    states = [*WORKED, NodeState("spare", 30.0, 0.0, 10.0, ((0, 11),)), NodeState("off", alive=False)]
    result = plan(RoutingRequest(), states, WeightedCost(RouteWeights(hop=0.5)), model="ncm")
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["route"] == {
        "model": "ncm",
        "window": [0, 11],
        "node_ids": ["spare"],
        "stages": [{"node_id": "spare", "start_layer": 0, "end_layer": 11}],
        "hops": 0,
        "cost_ms": 40.0,
    }
    assert data["standby"] == data["alternatives"][0]
    assert data["standby"]["node_ids"] == ["mini", "laptop"]
    explanation = data["explanation"]
    assert explanation["parameters"]["weights"]["hop"] == 0.5
    assert explanation["window"] == [0, 11]
    assert explanation["excluded"] == [{"node_id": "off", "reason": "is not alive"}]
    assert [c["roles"] for c in explanation["candidates"]][:2] == [["winner"], ["alternative", "standby"]]
    assert all(
        sum(term["ms"] for term in c["terms"]) == pytest.approx(c["total_ms"])
        for c in explanation["candidates"]
    )


def test_the_standby_is_listed_even_when_others_are_cheaper() -> None:
    states = [NodeState(f"a{n}", float(n), 0, 100.0, ((0, 3),)) for n in range(4)]
    states += [NodeState("b", 1.0, 0, 100.0, ((4, 7),)), NodeState("far", 500.0, 0, 100.0, ((4, 7),))]
    result = plan(RoutingRequest(), states, WeightedCost(), alternatives=2)
    assert result.route.node_ids == ("a0", "b")
    assert [route.node_ids for route in result.alternatives] == [("a1", "b"), ("a1", "far")]
    assert result.standby is not None
    assert result.standby.node_ids == ("a1", "far")


def test_no_alternatives_wanted() -> None:
    result = plan(RoutingRequest(), WORKED, WeightedCost(), alternatives=0)
    assert result.alternatives == ()
    assert result.standby is None
    assert result.explanation.why == "mini (0-7) -> laptop (8-11) at 71.5 ms is the cheapest complete route."


def test_what_the_caller_excludes_is_explained() -> None:
    states = [*WORKED, NodeState("spare", 30.0, 0.0, 10.0, ((0, 11),))]
    excluded = {"spare": "is of another numerics class", "unknown": "is nowhere"}
    result = plan(RoutingRequest(), states, WeightedCost(), excluded=excluded)
    assert result.route.node_ids == ("mini", "laptop")
    assert result.explanation.excluded == {"spare": "is of another numerics class"}


def test_an_excluded_tail_does_not_make_the_model_shorter() -> None:
    with pytest.raises(NoRouteAvailable, match="laptop is drained") as caught:
        plan(RoutingRequest(), WORKED, WeightedCost(), excluded={"laptop": "is drained"}, model="m")
    assert caught.value.window == (0, 11)
    assert caught.value.blocked_at == 8
    assert not caught.value.busy


def test_a_node_outside_the_window_is_said_to_be() -> None:
    result = plan(RoutingRequest((8, 11)), WORKED, WeightedCost())
    assert result.route.node_ids == ("laptop",)
    assert result.explanation.excluded["gpu"] == "serves no layer of 8-11"


def test_nobody_is_there() -> None:
    with pytest.raises(NoRouteAvailable, match="no live node") as caught:
        plan(RoutingRequest((0, 3)), [], WeightedCost(), model="m")
    assert caught.value.window is None


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="alternatives"):
        plan(RoutingRequest(), WORKED, WeightedCost(), alternatives=-1)
    with pytest.raises(ValueError, match="node_id 'gpu'"):
        plan(RoutingRequest(), [*WORKED, WORKED[0]], WeightedCost())


@given(mesh=meshes.meshes(), request=meshes.requests, weights=meshes.weights, seed=st.integers(0, 9))
def test_weighted_plans_agree_with_brute_force(
    mesh: list[NodeState], request: RoutingRequest, weights: RouteWeights, seed: int
) -> None:
    shuffled = random.Random(seed).sample(mesh, len(mesh))
    best = oracle.best_weighted(request, mesh, weights)
    if best is None:
        with pytest.raises(NoRouteAvailable):
            plan(request, shuffled, WeightedCost(weights))
        return
    result = plan(request, shuffled, WeightedCost(weights))
    assert oracle.stages_of(result.route.stages) == best[1]
    assert result == plan(request, mesh, WeightedCost(weights))
    window = result.route.window
    assert window is not None
    ranked = sorted(
        ((oracle.weighted_units(r, mesh, request, weights), r) for r in oracle.all_routes(mesh, window)),
        key=lambda pair: oracle.order(*pair),
    )
    by_ids: dict[tuple[str, ...], oracle.Stages] = {}
    for _, route in ranked:
        by_ids.setdefault(tuple(stage[0] for stage in route), route)
    winner = result.route.node_ids
    by_ids.pop(winner)
    disjoint = [route for ids, route in by_ids.items() if not set(winner) & set(ids)]
    expected = list(by_ids.values())[:3]
    if disjoint and disjoint[0] not in expected:
        expected = [*expected[:2], disjoint[0]]
    assert [oracle.stages_of(route.stages) for route in result.alternatives] == expected
    standby = None if result.standby is None else oracle.stages_of(result.standby.stages)
    assert standby == (disjoint[0] if disjoint else None)
    for candidate in result.explanation.candidates:
        assert sum(term.ms for term in candidate.terms) == pytest.approx(candidate.route.cost, abs=1e-6)


def test_both_models_answer_in_the_same_form() -> None:
    times = {state.node_id: NodeTimes(1.0, 0.1) for state in WORKED}
    measured: Plan = plan(RoutingRequest(), WORKED, MeasuredCost(times, {}, token_bytes=16384))
    weighted: Plan = plan(RoutingRequest(), WORKED, WeightedCost())
    assert measured.to_dict().keys() == weighted.to_dict().keys()
    for result in (measured, weighted):
        candidate = json.loads(json.dumps(result.to_dict()))["explanation"]["candidates"][0]
        assert candidate.keys() == {"roles", "route", "total_ms", "terms", "totals"}
    assert measured.explanation.cost_model == "measured"
