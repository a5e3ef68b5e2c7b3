"""Placement: against brute force on small meshes, and the rules one by one."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.routing import Link, NodeState, RoutingRequest, WeightedCost, plan
from meshnet.routing.placement import (
    ModelLayers,
    Placement,
    PlacementImpossible,
    PlacementNode,
    place,
)

NO_LINK = Link(0.0, 1e9)

Parts = tuple[tuple[int, int, int], ...]
"""(node index, first layer, last layer) of each stage."""


def stage_ms(model: ModelLayers, node: PlacementNode, first: int, last: int) -> float:
    works = model.layer_work or (1.0,) * model.layers
    mean = sum(works) / len(works) or 1.0
    total = sum(node.decode_ms_per_layer * works[layer] / mean for layer in range(first, last + 1))
    if first == 0:
        embedding = model.embedding_work * node.decode_ms_per_layer
        total += embedding if node.embed_ms is None else node.embed_ms
    if last == model.layers - 1:
        output = model.output_work * node.decode_ms_per_layer
        total += output if node.output_ms is None else node.output_ms
    return total


def stage_bytes(model: ModelLayers, first: int, last: int) -> int:
    size = sum(model.layer_bytes[first : last + 1])
    head, tail = first == 0, last == model.layers - 1
    if head and tail and model.tied:
        return size + max(model.embedding_bytes, model.output_bytes)
    return size + head * model.embedding_bytes + tail * model.output_bytes


def all_pipelines(model: ModelLayers, nodes: Sequence[PlacementNode], most: int) -> Iterator[Parts]:
    """Every order of every set of nodes with every cut that fits the memory."""
    for count in range(1, min(most, len(nodes), model.layers) + 1):
        for order in itertools.permutations(range(len(nodes)), count):
            for cuts in itertools.combinations(range(1, model.layers), count - 1):
                marks = [0, *cuts, model.layers]
                parts = tuple((n, marks[k], marks[k + 1] - 1) for k, n in enumerate(order))
                if all(fits(model, nodes[n], a, b) for n, a, b in parts):
                    yield parts


def fits(model: ModelLayers, node: PlacementNode, first: int, last: int) -> bool:
    if node.pinned:
        held = {layer for a, b in node.shards for layer in range(a, b + 1)}
        return held.issuperset(range(first, last + 1))
    used = stage_bytes(model, first, last) + (last - first + 1) * node.extra_bytes
    return used <= node.memory_bytes


def slowest(model: ModelLayers, nodes: Sequence[PlacementNode], parts: Parts) -> float:
    return max(stage_ms(model, nodes[n], a, b) for n, a, b in parts)


def latency(
    model: ModelLayers, nodes: Sequence[PlacementNode], parts: Parts, links: dict[tuple[str, str], Link]
) -> float:
    ring = zip(parts, [*parts[1:], parts[0]], strict=True)
    trips = (
        links.get((nodes[a].node_id, nodes[b].node_id), NO_LINK).ms for (a, _, _), (b, _, _) in ring if a != b
    )
    return sum(stage_ms(model, nodes[n], a, b) for n, a, b in parts) + sum(trips)


def to_load(nodes: Sequence[PlacementNode], parts: Parts) -> int:
    held = [{x for a, b in node.shards for x in range(a, b + 1)} for node in nodes]
    return sum(layer not in held[n] for n, a, b in parts for layer in range(a, b + 1))


def parts_of(placement: Placement, nodes: Sequence[PlacementNode]) -> Parts:
    place_of = {node.node_id: index for index, node in enumerate(nodes)}
    return tuple((place_of[s.node_id], s.start_layer, s.end_layer) for s in placement.stages)


@st.composite
def problems(
    draw: st.DrawFn, held: bool
) -> tuple[ModelLayers, list[PlacementNode], dict[tuple[str, str], Link]]:
    layers = draw(st.integers(2, 6))
    model = ModelLayers(
        layer_bytes=tuple(draw(st.lists(st.sampled_from([10, 10, 15]), min_size=layers, max_size=layers))),
        embedding_bytes=draw(st.sampled_from([0, 8])),
        output_bytes=draw(st.sampled_from([0, 8, 20])),
        tied=draw(st.booleans()),
        output_work=draw(st.sampled_from([0.0, 2.5])),
        layer_work=tuple(draw(st.lists(st.sampled_from([1.0, 2.0]), min_size=layers, max_size=layers))),
    )
    ids = ("a", "b", "c", "d")[: draw(st.integers(1, 4))]
    span = st.tuples(st.integers(0, layers - 1), st.integers(0, layers - 1)).map(lambda p: (min(p), max(p)))
    nodes = [
        PlacementNode(
            node_id,
            memory_bytes=draw(st.sampled_from([9, 25, 40, 100])),
            decode_ms_per_layer=draw(st.sampled_from([0.5, 1.0, 3.0])),
            output_ms=draw(st.sampled_from([None, 1.0])),
            embed_ms=draw(st.sampled_from([None, 0.25])),
            shards=tuple(draw(st.lists(span, max_size=1))) if held else (),
            extra_bytes=draw(st.sampled_from([0, 0, 3])),
            pinned=held and draw(st.booleans()),
        )
        for node_id in ids
    ]
    pairs = [(a, b) for a in ids for b in ids if a < b]
    trips = {pair: Link(draw(st.sampled_from([0.0, 0.5, 4.0])), 1e9) for pair in pairs}
    links = trips | {(b, a): link for (a, b), link in trips.items()}
    return model, nodes, links


def check_placement(model: ModelLayers, nodes: Sequence[PlacementNode], placement: Placement) -> None:
    """What holds for every placement: covered once, in memory, loads and drops as stated."""
    stages = placement.stages
    covered = [layer for s in stages for layer in range(s.start_layer, s.end_layer + 1)]
    assert covered == list(range(model.layers))
    for node in nodes:
        ranges = placement.shards.get(node.node_id, ())
        after = [layer for a, b in ranges for layer in range(a, b + 1)]
        assert len(after) == len(set(after))
        before = {layer for a, b in node.shards for layer in range(a, b + 1)}
        loads = {x for a, b in placement.loads.get(node.node_id, ()) for x in range(a, b + 1)}
        drops = {x for a, b in placement.drops.get(node.node_id, ()) for x in range(a, b + 1)}
        assert loads == set(after) - before
        assert drops == before - set(after)
        own = [s for s in stages if s.node_id == node.node_id]
        assert {x for s in own for x in range(s.start_layer, s.end_layer + 1)} <= set(after)
        if node.pinned:
            assert set(after) == before, "what was placed by hand stays as it is"
        elif after:
            ends = (0 in after) * model.embedding_bytes, (model.layers - 1 in after) * model.output_bytes
            size = sum(model.layer_bytes[x] for x in after) + (max(ends) if model.tied else sum(ends))
            assert size + len(after) * node.extra_bytes <= node.memory_bytes
        for first, last in ranges:
            assert not any(first < cut <= last for cut in placement.cuts), "a shard ends at every cut"
    # A router that knows whole shards only finds the route.
    states = [NodeState(n, served_layers=shards) for n, shards in placement.shards.items()]
    route = plan(RoutingRequest((0, model.layers - 1)), states, WeightedCost(), alternatives=0).route
    assert route.window == (0, model.layers - 1)
    assert placement.moved_layers == sum(b - a + 1 for ranges in placement.loads.values() for a, b in ranges)


@given(problem=problems(held=False), most=st.integers(1, 4), seed=st.integers(0, 9))
def test_fresh_placements_agree_with_brute_force(
    problem: tuple[ModelLayers, list[PlacementNode], dict[tuple[str, str], Link]], most: int, seed: int
) -> None:
    model, nodes, links = problem
    shuffled = random.Random(seed).sample(nodes, len(nodes))
    options = list(all_pipelines(model, nodes, most)) or list(all_pipelines(model, nodes, len(nodes)))
    if not options:
        with pytest.raises(PlacementImpossible):
            place(model, shuffled, links=links, unknown_link=NO_LINK, max_stages=most)
        return
    fast = place(model, shuffled, links=links, unknown_link=NO_LINK, max_stages=most)
    check_placement(model, nodes, fast)
    least = min(slowest(model, nodes, parts) for parts in options)
    assert fast.exact
    assert fast.slowest_ms == pytest.approx(least)
    assert fast.slowest_ms == pytest.approx(slowest(model, nodes, parts_of(fast, nodes)))
    among = [parts for parts in options if slowest(model, nodes, parts) <= least * (1 + 2e-6)]
    assert fast.latency_ms == pytest.approx(min(latency(model, nodes, parts, links) for parts in among))
    soon = place(model, shuffled, links=links, unknown_link=NO_LINK, max_stages=most, objective="latency")
    check_placement(model, nodes, soon)
    assert soon.latency_ms == pytest.approx(min(latency(model, nodes, parts, links) for parts in options))
    assert soon.latency_ms == pytest.approx(latency(model, nodes, parts_of(soon, nodes), links))
    assert place(model, nodes, links=links, unknown_link=NO_LINK, max_stages=most) == fast


@given(problem=problems(held=True), slack=st.sampled_from([0.0, 0.05, 0.5]))
def test_changes_move_as_few_layers_as_they_can(
    problem: tuple[ModelLayers, list[PlacementNode], dict[tuple[str, str], Link]], slack: float
) -> None:
    model, nodes, links = problem
    options = list(all_pipelines(model, nodes, len(nodes)))
    if not options:
        return
    placement = place(model, nodes, links=links, unknown_link=NO_LINK, slack=slack)
    check_placement(model, nodes, placement)
    least = min(slowest(model, nodes, parts) for parts in options)
    held = any(node.shards for node in nodes)
    limit = least * (1 + slack * held) * (1 + 2e-6)
    good = [parts for parts in options if slowest(model, nodes, parts) <= limit]
    assert placement.slowest_ms <= limit
    assert to_load(nodes, parts_of(placement, nodes)) == min(to_load(nodes, parts) for parts in good)
    soon = place(model, nodes, links=links, unknown_link=NO_LINK, slack=slack, objective="latency")
    check_placement(model, nodes, soon)
    best = min(latency(model, nodes, parts, links) for parts in options)
    price = best * slack / model.layers

    def value(parts: Parts) -> float:
        return latency(model, nodes, parts, links) + price * to_load(nodes, parts)

    assert value(parts_of(soon, nodes)) == pytest.approx(min(map(value, options)))


SMOL = ModelLayers((2_200_000,) * 30, 30_000_000, 30_000_000, tied=True, output_work=9.0)
"""As SmolLM2: the output matrix weighs as much as fourteen layers and takes as long as nine."""


def pair(**options: Any) -> list[PlacementNode]:
    return [PlacementNode(node_id, 10**9, 0.1, **options) for node_id in ("a", "b")]


class TestRules:
    def test_the_cut_balances_the_output_matrix(self) -> None:
        placement = place(SMOL, pair())
        assert [(s.node_id, s.start_layer, s.end_layer) for s in placement.stages] == [
            ("a", 0, 18),
            ("b", 19, 29),
        ]
        assert placement.stage_ms == pytest.approx((1.9, 2.0))
        assert placement.cuts == (19,)

    def test_one_stream_is_served_by_one_node(self) -> None:
        placement = place(SMOL, pair(), objective="latency")
        assert [s.node_id for s in placement.stages] == ["a"]
        assert placement.shards["b"] == ((0, 29),), "the other replicates what is scarce: everything"

    def test_a_faster_node_gets_more_layers(self) -> None:
        nodes = [PlacementNode("fast", 10**9, 0.1), PlacementNode("slow", 10**9, 0.4)]
        placement = place(SMOL, nodes)
        sizes = {s.node_id: s.layers for s in placement.stages}
        assert sizes["fast"] > 2 * sizes["slow"]
        assert placement.stages[0].node_id == "slow", "the fast node takes the output matrix"

    def test_memory_bounds_a_stage_with_its_embedding(self) -> None:
        """Fifty megabytes hold the embedding and nine layers, not the nineteen that would balance."""
        nodes = [PlacementNode("small", 50_000_000, 0.1), PlacementNode("large", 10**9, 0.1)]
        placement = place(SMOL, nodes)
        small = next(s for s in placement.stages if s.node_id == "small")
        assert small.layers == 9
        assert small.start_layer == 21, (
            "as tail it has the shared matrix once, and the time of nine layers more"
        )

    def test_prefill_counts_as_much_as_prompts_do(self) -> None:
        nodes = [
            PlacementNode("a", 10**9, 0.1, prefill_ms_per_token_layer=0.4, output_ms=0.0),
            PlacementNode("b", 10**9, 0.1, prefill_ms_per_token_layer=0.1, output_ms=0.0),
        ]
        even = {s.node_id: s.layers for s in place(SMOL, nodes).stages}
        prompts = {s.node_id: s.layers for s in place(SMOL, nodes, prompt_share=4.0).stages}
        assert even == {"a": 15, "b": 15}
        assert prompts["b"] > prompts["a"]

    def test_a_running_placement_is_left_alone_within_the_slack(self) -> None:
        nodes = [
            PlacementNode("a", 10**9, 0.1, shards=((0, 17),)),
            PlacementNode("b", 10**9, 0.1, shards=((18, 29),)),
        ]
        kept = place(SMOL, nodes, slack=0.1)
        assert kept.moved_layers == 0
        assert kept.stages[0].end_layer == 17
        assert place(SMOL, nodes, slack=0.0).loads == {"a": ((18, 18),)}

    def test_a_node_that_leaves_moves_only_its_layers(self) -> None:
        """b of a, b, c is gone; a and c hold their own and take over what is missing."""
        nodes = [
            PlacementNode("a", 10**9, 0.1, output_ms=0.1, shards=((0, 9),)),
            PlacementNode("c", 10**9, 0.1, output_ms=0.1, shards=((20, 29),)),
        ]
        placement = place(SMOL, nodes)
        assert placement.moved_layers == 10
        assert placement.drops == {}

    def test_a_third_node_replicates_the_scarcest_stage(self) -> None:
        nodes = [*pair(), PlacementNode("spare", 30_000_000, 0.1)]
        placement = place(SMOL, nodes, max_stages=2)
        (shard,) = placement.shards["spare"]
        assert shard[1] <= placement.stages[0].end_layer, "it has no room for the output matrix"
        assert any(line.startswith("spare: replicates") for line in placement.why)

    def test_holders_fill_spare_memory(self) -> None:
        placement = place(SMOL, pair(), holders=2)
        for node_id in ("a", "b"):
            assert placement.shards[node_id] == ((0, 18), (19, 29))
        once = place(SMOL, pair())
        assert once.shards == {"a": ((0, 18),), "b": ((19, 29),)}

    def test_memory_may_need_more_stages_than_asked_for(self) -> None:
        nodes = [PlacementNode(f"n{k}", 45_000_000, 0.1) for k in range(4)]
        assert len(place(SMOL, nodes, max_stages=1).stages) >= 3

    def test_the_way_between_the_nodes_decides_the_order(self) -> None:
        """Three alike, memory for a third each: the links near, far and middling; the way back counts too."""
        model = ModelLayers((10,) * 6)
        nodes = [PlacementNode(n, 30, 1.0) for n in ("a", "b", "c", "d")]
        links = {("a", "b"): Link(9.0, 1e9), ("b", "c"): Link(9.0, 1e9), ("a", "c"): Link(0.5, 1e9)}
        placement = place(model, nodes, links=links, unknown_link=Link(9.0, 1e9), objective="latency")
        assert {s.node_id for s in placement.stages} == {"a", "c"}

    def test_the_json_form(self) -> None:
        data = json.loads(json.dumps(place(SMOL, pair()).to_dict(), allow_nan=False))
        assert data["stages"][0] == {
            "node_id": "a",
            "start_layer": 0,
            "end_layer": 18,
            "ms_per_token": pytest.approx(1.9),
        }
        assert data["shards"] == {"a": [[0, 18]], "b": [[19, 29]]}
        assert data["loads"] == data["shards"]
        assert data["moved_layers"] == 30
        assert "2 stages cover 30 layers" in data["why"][0]


class TestImpossible:
    def test_too_little_memory_says_how_much_is_needed(self) -> None:
        nodes = [PlacementNode("a", 50_000_000, 0.1)]
        with pytest.raises(
            PlacementImpossible, match=r"needs 0\.096 GB, the 1 nodes have 0\.05 GB"
        ) as caught:
            place(SMOL, nodes)
        assert (caught.value.needed_bytes, caught.value.memory_bytes) == (96_000_000, 50_000_000)

    def test_memory_in_too_small_pieces(self) -> None:
        model = ModelLayers((10, 10), embedding_bytes=50)
        with pytest.raises(PlacementImpossible, match="no order of them fits"):
            place(model, [PlacementNode(f"n{k}", 20, 1.0) for k in range(9)])

    def test_no_node(self) -> None:
        with pytest.raises(PlacementImpossible, match="there is no node"):
            place(SMOL, [])


class TestBadInput:
    def test_values_are_named(self) -> None:
        with pytest.raises(ValueError, match=r"memory_bytes.*-1"):
            PlacementNode("a", -1, 1.0)
        with pytest.raises(ValueError, match=r"decode_ms_per_layer.*0\.0"):
            PlacementNode("a", 1, 0.0)
        with pytest.raises(ValueError, match="layer_bytes"):
            ModelLayers(())
        with pytest.raises(ValueError, match="layer_work names 1 layers, layer_bytes 2"):
            ModelLayers((1, 1), layer_work=(1.0,))
        with pytest.raises(ValueError, match="node_id 'a'"):
            place(SMOL, [*pair(), *pair()])
        with pytest.raises(ValueError, match=r"objective.*'speed'"):
            place(SMOL, pair(), objective="speed")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'a' hold 0-30"):
            place(SMOL, pair(shards=((0, 30),)))


class TestManyNodes:
    """Beyond eight nodes the rule decides; it has to stay near what any pipeline can reach."""

    def mesh(self, seed: int, count: int = 100) -> list[PlacementNode]:
        rng = random.Random(seed)
        return [
            PlacementNode(f"n{k:03}", rng.randrange(4, 40) * 10**9, rng.uniform(0.2, 3.0))
            for k in range(count)
        ]

    MODEL = ModelLayers((500_000_000,) * 80, 10**9, 10**9, output_work=2.0)

    @pytest.mark.parametrize("seed", range(3))
    def test_throughput_is_near_the_bound(self, seed: int) -> None:
        nodes = self.mesh(seed)
        placement = place(self.MODEL, nodes)
        check_placement(self.MODEL, nodes, placement)
        assert not placement.exact
        assert len(placement.stages) <= 8
        rates = sorted((1 / node.decode_ms_per_layer for node in nodes), reverse=True)[:8]
        assert placement.slowest_ms <= 1.5 * 82 / sum(rates)
        assert all(node.node_id in placement.shards for node in nodes), "everyone left replicates"

    def test_latency_takes_the_fastest_that_hold_it(self) -> None:
        nodes = self.mesh(1)
        placement = place(self.MODEL, nodes, objective="latency")
        check_placement(self.MODEL, nodes, placement)
        assert placement.latency_ms <= 82 * 0.6

    def test_as_many_as_memory_needs(self) -> None:
        nodes = [PlacementNode(f"n{k:02}", 3 * 10**9, 1.0 + k / 100) for k in range(40)]
        placement = place(self.MODEL, nodes)
        check_placement(self.MODEL, nodes, placement)
        assert 14 <= len(placement.stages) <= 16

    def test_a_placement_in_force_is_kept(self) -> None:
        nodes = self.mesh(2)
        first = place(self.MODEL, nodes)
        held = [
            PlacementNode(
                n.node_id, n.memory_bytes, n.decode_ms_per_layer, shards=first.shards.get(n.node_id, ())
            )
            for n in nodes
        ]
        again = place(self.MODEL, held)
        assert again.moved_layers == 0
        assert again.shards == first.shards
        without_one = [node for node in held if node.node_id != first.stages[0].node_id]
        repaired = place(self.MODEL, without_one)
        check_placement(self.MODEL, without_one, repaired)
        assert repaired.moved_layers <= 80

    def test_the_order_of_the_nodes_does_not_matter(self) -> None:
        nodes = self.mesh(3, 30)
        assert place(self.MODEL, nodes[::-1]) == place(self.MODEL, nodes)
