"""The cheapest route by the weighted cost: the agreed cases, brute force, and bad input."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing import meshes, oracle

from meshnet.routing import (
    NodeState,
    NoRouteAvailable,
    Route,
    RouteWeights,
    RoutingRequest,
    Stage,
    route_cost,
    score_route,
    stage_cost,
)

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "cases.json").read_text())["cases"]


def request_of(data: dict[str, Any]) -> RoutingRequest:
    fields = dict(data)
    if "layer_range" in fields:
        fields["layer_range"] = tuple(fields["layer_range"])
    return RoutingRequest(**fields)


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(case: dict[str, Any]) -> None:
    states = [NodeState.from_dict(state) for state in case["states"]]
    weights, request, expect = RouteWeights(**case["weights"]), request_of(case["request"]), case["expect"]
    if "error" in expect:
        with pytest.raises(NoRouteAvailable) as caught:
            score_route(request, states, weights, case["model"])
        assert expect["error"] == "NoRouteAvailable"
        assert caught.value.window == (tuple(expect["window"]) if "window" in expect else None)
        assert caught.value.model == case["model"]
        return
    route = score_route(request, states, weights, case["model"])
    assert list(route.node_ids) == expect["node_ids"]
    assert [[s.node_id, s.start_layer, s.end_layer] for s in route.stages] == expect["stages"]
    assert route.hops() == expect["hops"]
    assert route.cost == pytest.approx(expect["cost"], abs=1e-6)
    assert route_cost(route.stages, states, request, weights) == route.cost
    assert route.window == tuple(expect["window"])
    assert route.model == case["model"]


def worked_example() -> list[NodeState]:
    return [
        NodeState("gpu", 11.9, 0.98, 10.0, ((0, 3),)),
        NodeState("mini", 13.8, 0.1, 10.0, ((0, 3), (4, 7))),
        NodeState("laptop", 4.7, 0.05, 10.0, ((8, 11),)),
    ]


def test_score_route_prefers_the_cheapest_covering_pipeline() -> None:
    states, weights, request = worked_example(), RouteWeights(), RoutingRequest()
    gpu, mini, laptop = states
    assert stage_cost(gpu, weights) == pytest.approx(139.5)
    assert stage_cost(mini, weights) == pytest.approx(35.8)
    assert stage_cost(laptop, weights) == pytest.approx(20.7)
    long_way = [Stage("gpu", 0, 3), Stage("mini", 4, 7), Stage("laptop", 8, 11)]
    assert route_cost(long_way, states, request, weights) == pytest.approx(139.5 + 35.8 + 20.7 + 2 * 15)
    route = score_route(request, states, weights, "ncm")
    assert route.node_ids == ("mini", "laptop")
    assert route.stages == (Stage("mini", 0, 7), Stage("laptop", 8, 11))
    assert route.cost == pytest.approx(71.5)


def test_no_stages_cost_infinity() -> None:
    assert route_cost([], worked_example(), RoutingRequest(prompt_tokens=5), RouteWeights()) == math.inf


def test_adjoining_stages_of_one_node_are_charged_once() -> None:
    states = worked_example()
    apart = [Stage("mini", 0, 3), Stage("mini", 4, 7), Stage("laptop", 8, 11)]
    assert route_cost(apart, states, RoutingRequest(), RouteWeights()) == pytest.approx(71.5)


def test_route_cost_names_the_node_without_a_state() -> None:
    with pytest.raises(ValueError, match="'ghost'"):
        route_cost([Stage("ghost", 0, 3)], worked_example(), RoutingRequest(), RouteWeights())


@given(mesh=meshes.meshes(), request=meshes.requests, weights=meshes.weights, seed=st.integers(0, 9))
def test_the_route_is_the_one_brute_force_finds(
    mesh: list[NodeState], request: RoutingRequest, weights: RouteWeights, seed: int
) -> None:
    best = oracle.best_weighted(request, mesh, weights)
    shuffled = random.Random(seed).sample(mesh, len(mesh))
    if best is None:
        window = oracle.window_of(request, mesh)
        with pytest.raises(NoRouteAvailable) as caught:
            score_route(request, shuffled, weights, "m")
        assert caught.value.window == window
        assert caught.value.blocked_at == (None if window is None else oracle.reached(mesh, window))
        return
    route = score_route(request, shuffled, weights, "m")
    assert oracle.stages_of(route.stages) == best[1]
    assert route.cost == best[0] / 1e9
    assert route.cost == route_cost(route.stages, mesh, request, weights)


@given(
    shards=st.lists(st.lists(meshes.ranges(5), min_size=1, max_size=4), min_size=4, max_size=5),
    mid=st.lists(st.booleans(), min_size=5, max_size=5),
    hop=st.sampled_from([0.0, 1.0]),
)
def test_ties_are_broken_as_brute_force_breaks_them(
    shards: list[list[tuple[int, int]]], mid: list[bool], hop: float
) -> None:
    """All stages cost the same: number of stages, ids and ends alone decide."""
    mesh = [
        NodeState(node_id, served_layers=tuple(ranges), mid_shard_entry=anywhere)
        for node_id, ranges, anywhere in zip(meshes.IDS, shards, mid, strict=False)
    ]
    weights = RouteWeights(latency=0, load=0, capacity=0, hop=hop)
    best = oracle.best_weighted(RoutingRequest(), mesh, weights)
    if best is None:
        with pytest.raises(NoRouteAvailable):
            score_route(RoutingRequest(), mesh, weights, "m")
    else:
        assert oracle.stages_of(score_route(RoutingRequest(), mesh, weights, "m").stages) == best[1]


def test_a_large_mesh_is_covered_once_in_order() -> None:
    rng = random.Random(7)
    states = []
    for number in range(400):
        first = rng.randrange(80)
        shard = (first, min(first + rng.randrange(1, 30), 79))
        load = rng.random()
        anywhere = rng.random() < 0.5
        states.append(NodeState(f"n{number}", rng.random() * 50, load, 10.0, (shard,), True, anywhere))
    route = score_route(RoutingRequest((0, 79)), states, RouteWeights(), "m")
    assert [layer for s in route.stages for layer in range(s.start_layer, s.end_layer + 1)] == list(range(80))
    assert route.cost == route_cost(route.stages, states, RoutingRequest(), RouteWeights())
    rng.shuffle(states)
    assert score_route(RoutingRequest((0, 79)), states, RouteWeights(), "m") == route


def test_twins_do_not_hide_each_other() -> None:
    """Nodes of equal shards: the cheaper stands for both, by name where they cost the same."""
    states = [NodeState(node_id, 5.0, served_layers=((0, 3), (4, 7))) for node_id in ("q", "p", "r")]
    assert score_route(RoutingRequest(), states, RouteWeights(), "m").node_ids == ("p",)


class TestNoRoute:
    def test_message_and_attributes(self) -> None:
        states = [NodeState("head", served_layers=((0, 21),)), NodeState("full", served_layers=((10, 39),))]
        with pytest.raises(
            NoRouteAvailable, match="'ncm' over layers 0-39: nothing goes on from layer 22"
        ) as e:
            score_route(RoutingRequest(), states, RouteWeights(), "ncm")
        assert (e.value.model, e.value.window, e.value.blocked_at) == ("ncm", (0, 39), 22)

    def test_the_tail_dies_and_the_model_is_not_shortened(self) -> None:
        states = [
            NodeState("head", served_layers=((0, 14),)),
            NodeState("tail", served_layers=((15, 29),), alive=False),
        ]
        with pytest.raises(NoRouteAvailable) as caught:
            score_route(RoutingRequest((0, 29)), states, RouteWeights(), "m")
        assert caught.value.blocked_at == 15

    @pytest.mark.parametrize("request_", [RoutingRequest(), RoutingRequest((0, 3))])
    def test_no_live_node_has_no_window(self, request_: RoutingRequest) -> None:
        dead = NodeState("a", served_layers=((0, 3),), alive=False)
        for states in ([], [dead]):
            with pytest.raises(NoRouteAvailable, match="no live node") as caught:
                score_route(request_, states, RouteWeights(), "m")
            assert caught.value.window is None
            assert caught.value.blocked_at is None


class TestBadInput:
    @pytest.mark.parametrize("field", ["latency_ms", "current_load", "capacity_score"])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, "3", None, True, 10**400])
    def test_node_numbers(self, field: str, value: object) -> None:
        with pytest.raises(ValueError, match=field) as caught:
            NodeState.from_dict({"node_id": "a", field: value})
        assert repr(value) in str(caught.value) or value == 10**400

    @pytest.mark.parametrize(
        "layers",
        [
            [[3, 1]],
            [[-1, 3]],
            [[0, 1.0]],
            [[0, True]],
            [[0]],
            [[0, 1, 2]],
            [0, 3],
            "0-3",
            {"0": 3},
            [["0", "3"]],
            7,
        ],
    )
    def test_served_layers(self, layers: object) -> None:
        with pytest.raises(ValueError, match="served_layers"):
            NodeState.from_dict({"node_id": "a", "served_layers": layers})

    @pytest.mark.parametrize("node_id", ["", None, 3])
    def test_node_id(self, node_id: object) -> None:
        with pytest.raises(ValueError, match="node_id"):
            NodeState.from_dict({"node_id": node_id})

    def test_node_id_missing(self) -> None:
        with pytest.raises(ValueError, match="node_id is missing"):
            NodeState.from_dict({"latency_ms": 3})

    @pytest.mark.parametrize("field", ["alive", "mid_shard_entry"])
    def test_flags(self, field: str) -> None:
        with pytest.raises(ValueError, match=f"{field}.*'yes'"):
            NodeState.from_dict({"node_id": "a", field: "yes"})

    def test_duplicate_node_ids(self) -> None:
        states = [NodeState("a", served_layers=((0, 3),)), NodeState("a", served_layers=((4, 7),))]
        with pytest.raises(ValueError, match="node_id 'a'"):
            score_route(RoutingRequest(), states, RouteWeights(), "m")

    @pytest.mark.parametrize("window", [(5, 4), (0, 10**9), (-1, 3), (0, 3.0), (), (1,), (0, True), "0-3"])
    def test_window(self, window: Any) -> None:
        with pytest.raises(ValueError, match="layer_range"):
            RoutingRequest(window)

    @pytest.mark.parametrize("field", ["prompt_tokens", "expected_tokens"])
    @pytest.mark.parametrize("value", [-1, 1.5, math.nan, True, None])
    def test_tokens(self, field: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"{field}.*{value!r}"):
            RoutingRequest(**{field: value})

    @pytest.mark.parametrize("value", [math.nan, math.inf, -0.5, "1", None])
    def test_weights(self, value: Any) -> None:
        with pytest.raises(ValueError, match=f"weights.hop.*{value!r}"):
            RouteWeights(hop=value)

    def test_unknown_weight(self) -> None:
        with pytest.raises(ValueError, match=r"unknown weight 'speed' \(value 2.0\)"):
            RouteWeights.from_dict({"latency": 1.0, "speed": 2.0})

    def test_a_cost_beyond_floats(self) -> None:
        state = NodeState("a", latency_ms=1e300, served_layers=((0, 0),))
        assert stage_cost(state, RouteWeights()) == pytest.approx(1e300)
        with pytest.raises(ValueError, match="infinite"):
            score_route(RoutingRequest(), [state], RouteWeights(latency=1e10), "m")


class TestValues:
    def test_defaults_and_unknown_keys(self) -> None:
        state = NodeState.from_dict({"node_id": "a", "served_requests": 7})
        assert state == NodeState("a", 0, 0, 1, (), True, False)

    def test_round_trip(self) -> None:
        state = NodeState("mini", 6.4, 0.2, 13.0, ((7, 9),), True, True)
        assert NodeState.from_dict(json.loads(json.dumps(state.to_dict()))) == state

    def test_values_cannot_be_changed(self) -> None:
        for value in (NodeState("a"), RouteWeights(), RoutingRequest(), Stage("a", 0, 1)):
            for field in dataclasses.fields(value):
                with pytest.raises(dataclasses.FrozenInstanceError):
                    setattr(value, field.name, 1)

    def test_a_route_by_names(self) -> None:
        route = Route.from_node_ids(["a", "b", "a"], (0, 11), "m")
        assert route.node_ids == ("a", "b", "a")
        assert route.stages == ()
        assert route.hops() == 2
        assert route.to_dict()["cost_ms"] is None
        with pytest.raises(ValueError, match="node_ids"):
            Route.from_node_ids("abc", (0, 3), "m")
