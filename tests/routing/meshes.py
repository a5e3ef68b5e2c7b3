"""Random small meshes for property tests: coarse values, so that ties are common."""

from __future__ import annotations

from hypothesis import strategies as st

from meshnet.routing import Link, NodeState, NodeTimes, RouteWeights, RoutingRequest

LAYERS = 7
IDS = ("a", "b", "c", "d", "e")


def ranges(layers: int = LAYERS) -> st.SearchStrategy[tuple[int, int]]:
    """Layer ranges (first, last) below `layers`."""
    return st.tuples(st.integers(0, layers - 1), st.integers(0, layers - 1)).map(
        lambda pair: (min(pair), max(pair))
    )


def states(node_id: str, layers: int = LAYERS, mostly_alive: bool = True) -> st.SearchStrategy[NodeState]:
    """One node with coarse values and up to three shards."""
    return st.builds(
        NodeState,
        node_id=st.just(node_id),
        latency_ms=st.sampled_from([0.0, 1.0, 2.0, 17.0]),
        current_load=st.sampled_from([0.0, 0.125, 1.5]),
        capacity_score=st.sampled_from([100.0, 50.0, 0.0]),
        served_layers=st.lists(ranges(layers), min_size=0, max_size=3).map(tuple),
        alive=st.sampled_from([True, True, True, False]) if mostly_alive else st.just(True),
        mid_shard_entry=st.booleans(),
    )


@st.composite
def meshes(draw: st.DrawFn, least: int = 0, most: int = 4, layers: int = LAYERS) -> list[NodeState]:
    """A few nodes in any order."""
    count = draw(st.integers(least, most))
    return draw(st.permutations([draw(states(node_id, layers)) for node_id in IDS[:count]]))


def with_reserves(mesh: list[NodeState], count: int) -> list[NodeState]:
    """The mesh and `count` dear nodes that hold every layer and enter anywhere."""
    shard = ((0, LAYERS - 1),)
    return mesh + [NodeState(f"reserve{n}", 50.0 + n, 0.0, 10.0, shard, True, True) for n in range(count)]


weights = st.builds(
    RouteWeights,
    latency=st.sampled_from([0.0, 1.0, 2.0]),
    load=st.sampled_from([0.0, 1.0]),
    capacity=st.sampled_from([0.0, 1.0, 0.1]),
    hop=st.sampled_from([0.0, 0.05, 1.0]),
    prompt=st.sampled_from([0.0, 0.2, 1.0]),
)

requests = st.builds(
    RoutingRequest,
    layer_range=st.none() | ranges(),
    prompt_tokens=st.sampled_from([0, 1, 100, 2048]),
    expected_tokens=st.sampled_from([0, 1, 256]),
)

node_times = st.builds(
    NodeTimes,
    decode_ms_per_layer=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    prefill_ms_per_token_layer=st.sampled_from([0.0, 0.25, 0.5]),
    embed_ms=st.sampled_from([0.0, 0.5]),
    output_ms=st.sampled_from([0.0, 2.0]),
    queue_ms=st.sampled_from([0.0, 100.0]),
)

links = st.builds(Link, ms=st.sampled_from([0.0, 0.25, 1.0, 4.0]), bytes_per_s=st.sampled_from([1e6, 1e9]))
