"""Failover, rule by rule, and the properties that hold over random meshes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from routing import meshes, oracle

from meshnet.routing import (
    FailoverDecision,
    NodeState,
    NoRouteAvailable,
    Route,
    RouteWeights,
    RoutingFailure,
    RoutingRequest,
    Stage,
    failover,
    route_cost,
    score_route,
)

WEIGHTS = RouteWeights()


def node(node_id: str, *shards: tuple[int, int], ms: float = 1.0, anywhere: bool = False) -> NodeState:
    return NodeState(node_id, ms, 0.0, 100.0, shards, True, anywhere)


def dead(state: NodeState) -> NodeState:
    return NodeState.from_dict(state.to_dict() | {"alive": False})


def route_of(*stages: tuple[str, int, int]) -> Route:
    listed = [Stage(*stage) for stage in stages]
    return Route.from_stages(listed, 0.0, (listed[0].start_layer, listed[-1].end_layer), "m")


def fail(
    route: Route, failed: str, states: Sequence[NodeState], fallback: str | None = None
) -> FailoverDecision:
    return failover(route, {}, failed, states=states, weights=WEIGHTS, fallback_model=fallback)


def stages(decision: FailoverDecision) -> oracle.Stages:
    return oracle.stages_of(decision.route.stages)


ABC = (("a", 0, 3), ("b", 4, 7), ("c", 8, 11))
"""A route of three nodes that most tests break."""


class TestRule1NotInTheRoute:
    def test_a_node_that_is_not_in_the_route_changes_nothing(self) -> None:
        route = route_of(*ABC)
        decision = fail(route, "stranger", [node("a", (0, 3))])
        assert decision.route is route
        assert decision.reason == "'stranger' does not take part in the route"
        assert not decision.degraded


class TestRule2WhatIsMissing:
    def test_the_failed_stage_is_replaced_and_not_all_the_layers_its_node_serves(self) -> None:
        """b also serves 0-3, but a runs them: they need no substitute, and nobody else has them."""
        states = [node("a", (0, 3)), node("b", (0, 3), (4, 7)), node("c", (8, 11)), node("d", (4, 7))]
        decision = fail(route_of(*ABC), "b", states)
        assert stages(decision) == (("a", 0, 3), ("d", 4, 7), ("c", 8, 11))
        assert decision.reason == "'b' failed; layers 4-7 are taken over by d (4-7)"
        assert not decision.degraded

    def test_a_route_from_names_uses_the_failed_nodes_telemetry(self) -> None:
        states = [node("a", (0, 3)), node("b", (4, 7)), node("c", (8, 11)), node("d", (4, 7))]
        route = Route.from_node_ids(["a", "b", "c"], (0, 11), "m")
        assert stages(fail(route, "b", states)) == (("a", 0, 3), ("d", 4, 7), ("c", 8, 11))

    def test_a_route_from_names_without_telemetry_uses_the_redundancy_map(self) -> None:
        states = [node("a", (0, 3)), node("c", (8, 11)), node("d", (4, 7))]
        route = Route.from_node_ids(["a", "b", "c"], (0, 11), "m")
        holders = {layer: ["b", "d"] for layer in range(4, 8)}
        decision = failover(route, holders, "b", states=states, weights=WEIGHTS)
        assert stages(decision) == (("a", 0, 3), ("d", 4, 7), ("c", 8, 11))

    def test_telemetry_goes_before_the_redundancy_map(self) -> None:
        states = [node("a", (0, 3)), node("b", (4, 7)), node("c", (8, 11)), node("d", (4, 7))]
        route = Route.from_node_ids(["a", "b", "c"], (0, 11), "m")
        stale = {layer: ["b"] for layer in range(12)}
        decision = failover(route, stale, "b", states=states, weights=WEIGHTS)
        assert stages(decision) == (("a", 0, 3), ("d", 4, 7), ("c", 8, 11))

    def test_missing_layers_are_clipped_to_the_window(self) -> None:
        """b serves 0-11, the window is 4-11: nobody has 0-3, and nobody needs them."""
        states = [node("b", (0, 11), anywhere=True), node("d", (4, 7)), node("e", (8, 11))]
        route = Route.from_node_ids(["b"], (4, 11), "m")
        decision = fail(route, "b", states)
        assert stages(decision) == (("d", 4, 7), ("e", 8, 11))
        assert decision.route.window == (4, 11)

    def test_a_route_from_names_keeps_the_survivors_in_their_order(self) -> None:
        """a and c can both run 4-7; the names say that a stands first, and a runs as far as it goes."""
        states = [
            node("a", (0, 7), anywhere=True),
            node("c", (4, 11), anywhere=True),
            node("b", (12, 15)),
            node("d", (12, 15)),
        ]
        route = Route.from_node_ids(["a", "c", "b"], (0, 15), "m")
        assert stages(fail(route, "b", states)) == (("a", 0, 7), ("c", 8, 11), ("d", 12, 15))

    def test_a_route_from_names_whose_survivors_do_not_fit_is_planned_anew(self) -> None:
        """b's layers 4-11 go; a can only run 0-7 whole, which the rest does not allow."""
        states = [node("a", (0, 7)), node("b", (4, 11)), node("d", (8, 11))]
        route = Route.from_node_ids(["a", "b"], (0, 11), "m")
        decision = fail(route, "b", states)
        assert stages(decision) == (("a", 0, 7), ("d", 8, 11))
        assert "planned anew" in decision.reason

    def test_a_node_nobody_knows_anything_about_is_replaced_by_planning_anew(self) -> None:
        states = [node("a", (0, 3)), node("d", (4, 7))]
        route = Route.from_node_ids(["a", "b"], (0, 7), "m")
        assert stages(fail(route, "b", states)) == (("a", 0, 3), ("d", 4, 7))

    def test_a_route_without_a_window_is_never_made_shorter(self) -> None:
        states = [node("a", (0, 3)), dead(node("b", (4, 7)))]
        with pytest.raises(RoutingFailure) as caught:
            fail(Route.from_node_ids(["a", "b"]), "b", states)
        assert caught.value.layers == (4, 5, 6, 7)


class TestRule3Substitutes:
    def test_the_cheapest_live_holder_takes_over(self) -> None:
        states = [
            *(node(*x) for x in [("a", (0, 3)), ("b", (4, 7)), ("c", (8, 11))]),
            node("slow", (4, 7), ms=9),
            node("fast", (4, 7), ms=2),
            dead(node("ghost", (4, 7), ms=0)),
        ]
        decision = fail(route_of(*ABC), "b", states)
        assert stages(decision) == (("a", 0, 3), ("fast", 4, 7), ("c", 8, 11))
        assert decision.route.cost == pytest.approx(1 + 1 + 2 + 3 + 30)

    def test_two_nodes_take_over_where_no_single_one_can(self) -> None:
        states = [node("a", (0, 3)), node("c", (8, 11)), node("d", (4, 5)), node("e", (6, 7))]
        decision = fail(route_of(*ABC), "b", states)
        assert stages(decision) == (("a", 0, 3), ("d", 4, 5), ("e", 6, 7), ("c", 8, 11))

    def test_a_holder_that_must_run_its_shard_whole_does_not_fit_the_run(self) -> None:
        """d holds 4-9 and must run them whole: it cannot take 4-7 in place; e can, though it is dearer."""
        states = [node("a", (0, 3)), node("c", (8, 11)), node("d", (4, 9)), node("e", (4, 7), ms=99)]
        assert stages(fail(route_of(*ABC), "b", states)) == (("a", 0, 3), ("e", 4, 7), ("c", 8, 11))

    def test_a_holder_that_enters_anywhere_fits_the_run(self) -> None:
        states = [node("a", (0, 3)), node("c", (8, 11)), node("d", (2, 9), anywhere=True)]
        assert stages(fail(route_of(*ABC), "b", states)) == (("a", 0, 3), ("d", 4, 7), ("c", 8, 11))

    def test_a_run_that_cannot_be_taken_over_by_itself_has_the_window_planned_anew(self) -> None:
        states = [node("a", (0, 3)), node("c", (8, 11)), node("d", (4, 11))]
        decision = fail(route_of(*ABC), "b", states)
        assert stages(decision) == (("a", 0, 3), ("d", 4, 11))
        assert decision.reason == "'b' failed; the whole window 0-11 was planned anew"
        assert not decision.degraded

    def test_a_second_dead_node_in_the_route_counts_as_failed_too(self) -> None:
        states = [
            node("a", (0, 3)),
            dead(node("c", (8, 11))),
            node("d", (4, 7)),
            node("e", (8, 11)),
        ]
        decision = fail(route_of(*ABC), "b", states)
        assert stages(decision) == (("a", 0, 3), ("d", 4, 7), ("e", 8, 11))
        assert "'b' and 'c' failed" in decision.reason

    def test_a_node_that_left_the_mesh_counts_as_failed_too(self) -> None:
        states = [node("a", (0, 3)), node("d", (4, 7)), node("e", (8, 11))]
        assert stages(fail(route_of(*ABC), "b", states)) == (("a", 0, 3), ("d", 4, 7), ("e", 8, 11))

    def test_two_adjoining_failures_are_one_run(self) -> None:
        states = [node("a", (0, 3)), dead(node("c", (8, 11))), node("d", (4, 11))]
        assert stages(fail(route_of(*ABC), "b", states)) == (("a", 0, 3), ("d", 4, 11))

    def test_a_substitute_that_stands_later_keeps_its_later_stage(self) -> None:
        states = [node("a", (0, 3)), node("b", (4, 7)), node("c", (8, 11)), node("d", (0, 3), (12, 15))]
        route = route_of(*ABC, ("d", 12, 15))
        decision = fail(route, "a", states)
        assert stages(decision) == (("d", 0, 3), ("b", 4, 7), ("c", 8, 11), ("d", 12, 15))

    def test_consecutive_duplicates_collapse(self) -> None:
        states = [node("a", (0, 3), (4, 7)), node("c", (8, 11))]
        decision = fail(route_of(*ABC), "b", states)
        assert stages(decision) == (("a", 0, 7), ("c", 8, 11))
        assert decision.route.cost == pytest.approx(2 + 2 + 15)

    def test_duplicates_collapse_on_both_sides(self) -> None:
        states = [node("a", (0, 3), (4, 7), (8, 11))]
        route = route_of(("a", 0, 3), ("b", 4, 7), ("a", 8, 11))
        assert stages(fail(route, "b", states)) == (("a", 0, 11),)

    def test_only_the_named_substitutes_take_over(self) -> None:
        states = [
            *(node(*x) for x in [("a", (0, 3)), ("c", (8, 11)), ("d", (4, 7))]),
            node("other-class", (4, 7), ms=0),
        ]
        decision = failover(
            route_of(*ABC), {}, "b", states=states, weights=WEIGHTS, substitutes={"a", "c", "d"}
        )
        assert stages(decision) == (("a", 0, 3), ("d", 4, 7), ("c", 8, 11))

    def test_the_prompt_is_priced_into_the_new_route(self) -> None:
        states = [node("a", (0, 3)), node("c", (8, 11)), node("d", (4, 7))]
        request = RoutingRequest(prompt_tokens=2048)
        decision = failover(route_of(*ABC), {}, "b", states=states, weights=WEIGHTS, request=request)
        assert decision.route.cost == pytest.approx(3 * 2 + 2 * 15 + 20)


class TestRule4NoHolder:
    def test_a_fallback_model_degrades_to_the_survivors(self) -> None:
        states = [node("a", (0, 3)), node("c", (8, 11))]
        decision = fail(route_of(*ABC), "b", states, "small")
        assert decision.degraded
        assert decision.route.node_ids == ("a", "c")
        assert decision.route.model == "small"
        assert math.isinf(decision.route.cost)
        assert "layers 4-7" in decision.reason
        assert "'small'" in decision.reason

    def test_a_route_from_names_degrades_to_names(self) -> None:
        states = [node("a", (0, 3), (8, 11)), node("b", (4, 7))]
        route = Route.from_node_ids(["a", "b", "a"], (0, 11), "m")
        decision = fail(route, "b", states, "small")
        assert decision.degraded
        assert decision.route.node_ids == ("a",)
        assert decision.route.stages == ()

    def test_without_a_fallback_model_the_failure_names_the_layers(self) -> None:
        states = [node("a", (0, 3)), node("c", (8, 11)), node("d", (5, 6))]
        with pytest.raises(RoutingFailure, match=r"layers 4, 7 of model 'm'") as caught:
            fail(route_of(*ABC), "b", states)
        assert caught.value.layers == (4, 7)
        assert caught.value.model == "m"

    def test_held_layers_that_do_not_fit_together_are_named_as_well(self) -> None:
        states = [node("a", (0, 3)), node("c", (8, 11)), node("d", (4, 9))]
        with pytest.raises(RoutingFailure, match="layers 4-7") as caught:
            fail(route_of(*ABC), "b", states)
        assert caught.value.layers == (4, 5, 6, 7)

    def test_nobody_left(self) -> None:
        with pytest.raises(RoutingFailure, match="layers 0-11"):
            fail(route_of(*ABC), "b", [])


def test_duplicate_node_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="node_id 'a'"):
        fail(route_of(*ABC), "b", [node("a", (0, 3)), node("a", (0, 3))])


def test_a_redundancy_map_of_strings_is_refused() -> None:
    route = Route.from_node_ids(["a", "b"], (0, 7), "m")
    with pytest.raises(ValueError, match=r"redundancy_map layer .*'4'"):
        failover(route, {"4": ["b"]}, "b", states=[], weights=WEIGHTS)  # type: ignore[dict-item]


@given(
    mesh=meshes.meshes(least=2, most=5),
    reserves=st.integers(0, 2),
    weights=meshes.weights,
    also_dies=st.sampled_from(meshes.IDS),
    which=st.integers(0, 9),
    by_names=st.booleans(),
)
def test_the_window_stays_covered_without_the_dead(
    mesh: list[NodeState],
    reserves: int,
    weights: RouteWeights,
    also_dies: str,
    which: int,
    by_names: bool,
) -> None:
    mesh = meshes.with_reserves(mesh, reserves)
    try:
        route = score_route(RoutingRequest(), mesh, weights, "m")
    except NoRouteAvailable:
        assume(False)
        raise
    assert route.window is not None
    failed = route.node_ids[which % len(route.node_ids)]
    after = [dead(state) if state.node_id == also_dies else state for state in mesh]
    given_route = Route.from_node_ids(route.node_ids, route.window, "m") if by_names else route
    live = [state for state in after if state.alive and state.node_id != failed]
    possible = next(oracle.all_routes(live, route.window), None)
    if possible is None:
        with pytest.raises(RoutingFailure) as caught:
            failover(given_route, {}, failed, states=after, weights=weights)
        assert set(caught.value.layers) <= set(range(route.window[0], route.window[1] + 1))
        assert caught.value.layers
        degraded = failover(given_route, {}, failed, states=after, weights=weights, fallback_model="small")
        assert degraded.degraded
        assert failed not in degraded.route.node_ids
        assert also_dies not in degraded.route.node_ids
        return
    decision = failover(given_route, {}, failed, states=after, weights=weights)
    assert not decision.degraded
    assert oracle.stages_of(decision.route.stages) in set(oracle.all_routes(live, route.window))
    layers = [x for s in decision.route.stages for x in range(s.start_layer, s.end_layer + 1)]
    assert layers == list(range(route.window[0], route.window[1] + 1))
    assert not {failed, also_dies if also_dies != failed else failed} & set(decision.route.node_ids)
    assert decision.route.cost == route_cost(decision.route.stages, live, RoutingRequest(), weights)


@given(mesh=meshes.meshes(least=2, most=4), weights=meshes.weights, which=st.integers(0, 9))
def test_each_run_goes_to_the_cheapest_path_over_it(
    mesh: list[NodeState], weights: RouteWeights, which: int
) -> None:
    mesh = meshes.with_reserves(mesh, 2)
    route = score_route(RoutingRequest(), mesh, weights, "m")
    failed = route.node_ids[which % len(route.node_ids)]
    live = [state for state in mesh if state.alive and state.node_id != failed]
    expected: list[tuple[str, int, int]] = []
    for stage in route.stages:
        if stage.node_id != failed:
            expected.append((stage.node_id, stage.start_layer, stage.end_layer))
            continue
        run = RoutingRequest((stage.start_layer, stage.end_layer))
        best = oracle.best_weighted(run, live, weights)
        assert best is not None
        expected.extend(best[1])
    joined: list[tuple[str, int, int]] = []
    for node_id, first, last in expected:
        if joined and joined[-1][0] == node_id:
            joined[-1] = (node_id, joined[-1][1], last)
        else:
            joined.append((node_id, first, last))
    decision = failover(route, {}, failed, states=mesh, weights=weights)
    assert stages(decision) == tuple(joined)
