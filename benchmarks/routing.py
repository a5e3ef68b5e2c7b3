"""How long planning takes: the cheapest route, whole plans with their reasons, and placement.

`score_route` over 80 layers is timed for 10 to 10,000 nodes, once for nodes that run whole shards only and
once for nodes that enter anywhere. Planning runs in one thread, so its processor time is what it takes on a
free core; that is what is shown, since other work on the machine is not the planner's. The sizes take turns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from figures import Spread, Table, parser

from meshnet.routing import (
    Link,
    MeasuredCost,
    NodeState,
    NodeTimes,
    RouteWeights,
    RoutingRequest,
    WeightedCost,
    plan,
    score_route,
)
from meshnet.routing.placement import ModelLayers, PlacementNode, place

LAYERS = 80
SIZES = (10, 100, 1_000, 10_000)
WIDTHS = (4, 5, 8, 10, 16, 20, 40)
LIMITS = {"whole shards": 6.0, "mid-shard entry": 20.0}
"""Milliseconds that 1,000 nodes may take at the median."""
PLACEMENT_LIMIT_MS = 1000.0
REQUEST = RoutingRequest((0, LAYERS - 1), prompt_tokens=1000, expected_tokens=256)
WEIGHTS = RouteWeights()


def state(rng: random.Random, number: int, shards: tuple[tuple[int, int], ...], anywhere: bool) -> NodeState:
    """A node with random telemetry."""
    return NodeState(
        f"node-{number:05}", rng.uniform(1, 40), rng.random(), rng.uniform(1, 50), shards, True, anywhere
    )


def whole_shards(count: int, rng: random.Random) -> list[NodeState]:
    """Shards on grids of several widths, every third node with the one after it; one complete chain."""
    nodes = [state(rng, k, ((k * 20, k * 20 + 19),), False) for k in range(4)]
    while len(nodes) < count:
        width = rng.choice(WIDTHS)
        first = rng.randrange(LAYERS // width) * width
        shards = [(first, first + width - 1)]
        if rng.random() < 1 / 3 and first + 2 * width <= LAYERS:
            shards.append((first + width, first + 2 * width - 1))
        nodes.append(state(rng, len(nodes), tuple(shards), False))
    return nodes


def anywhere(count: int, rng: random.Random) -> list[NodeState]:
    """Any ranges; two nodes make sure that there is a route."""
    nodes = [state(rng, 0, ((0, 49),), True), state(rng, 1, ((30, LAYERS - 1),), True)]
    while len(nodes) < count:
        first = rng.randrange(LAYERS)
        nodes.append(state(rng, len(nodes), ((first, rng.randrange(first, LAYERS)),), True))
    return nodes


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of processor time of one run."""
    start = time.thread_time()
    work()
    return (time.thread_time() - start) * 1000


def score_table(repeats: int) -> Table:
    """`score_route` by nodes and kind of shard."""
    table = Table(
        f"score_route over {LAYERS} layers, milliseconds",
        ("shards", "nodes", "median (min-max)", "us per node", "limit"),
    )
    for name, make in (("whole shards", whole_shards), ("mid-shard entry", anywhere)):
        meshes = {count: make(count, random.Random(count)) for count in SIZES}
        spent: dict[int, list[float]] = {count: [] for count in SIZES}
        for _ in range(repeats):
            for count, states in meshes.items():
                spent[count].append(timed(lambda states=states: score_route(REQUEST, states, WEIGHTS, "m")))  # type: ignore[misc]
        for count in SIZES:
            spread = Spread.of(spent[count])
            limit = "-"
            if count == 1_000:
                limit = f"{LIMITS[name]:g} ({'met' if spread.median <= LIMITS[name] else 'MISSED'})"
            table.add(name, f"{count:,}", spread.text(), f"{spread.median / count * 1000:.1f}", limit)
    return table


def live_mesh(count: int) -> tuple[list[NodeState], MeasuredCost]:
    """As a mesh of one model looks: nodes hold runs of the pieces between the cuts, all links measured."""
    rng = random.Random(count)
    cuts = (0, 20, 40, 60, LAYERS)
    states, times = [], {}
    for number in range(count):
        first = 0 if number == 0 else rng.randrange(4)
        last = 4 if number == 0 else rng.randrange(first + 1, 5)
        shards = tuple((cuts[k], cuts[k + 1] - 1) for k in range(first, last))
        node = state(rng, number, shards, False)
        states.append(node)
        times[node.node_id] = NodeTimes(rng.uniform(0.3, 3), rng.uniform(0.02, 0.2), 0.1, rng.uniform(0, 3))
    pairs = [(a.node_id, b.node_id) for a in states for b in states if a is not b]
    links = {pair: Link(rng.uniform(0.1, 3), rng.uniform(1e7, 1e8)) for pair in pairs}
    return states, MeasuredCost(times, links, token_bytes=16_384)


def plan_table(repeats: int) -> Table:
    """Whole plans: winner, three alternatives, standby and explanation."""
    table = Table(
        "plan() with 3 alternatives, standby and reasons; placement, milliseconds",
        ("what", "nodes", "median (min-max)", "limit"),
    )
    work: list[tuple[str, int, Callable[[], object]]] = []
    for count in (4, 10, 20):
        states, cost = live_mesh(count)
        for name, model in (("plan, weighted", WeightedCost(WEIGHTS)), ("plan, measured", cost)):
            work.append((name, count, lambda states=states, model=model: plan(REQUEST, states, model)))  # type: ignore[misc]
    rng = random.Random(1)
    weight = ModelLayers((500_000_000,) * LAYERS, 10**9, 10**9, output_work=2.0)
    nodes = [
        PlacementNode(f"node-{k:03}", rng.randrange(4, 40) * 10**9, rng.uniform(0.2, 3)) for k in range(100)
    ]
    for count in (8, 100):
        few = nodes[-count:]
        work.append(("place, throughput", count, lambda few=few: place(weight, few)))  # type: ignore[misc]
        work.append(("place, latency", count, lambda few=few: place(weight, few, objective="latency")))  # type: ignore[misc]
    spent: list[list[float]] = [[] for _ in work]
    for _ in range(repeats):
        for index, (_, _, run) in enumerate(work):
            spent[index].append(timed(run))
    for (name, count, _), values in zip(work, spent, strict=True):
        spread = Spread.of(values)
        limit = "-"
        if name.startswith("place"):
            limit = f"{PLACEMENT_LIMIT_MS:g} ({'met' if spread.median <= PLACEMENT_LIMIT_MS else 'MISSED'})"
        table.add(name, count, spread.text(), limit)
    return table


def main() -> None:
    options = parser(__doc__)
    options.set_defaults(repeats=15)
    given = options.parse_args()
    score_table(given.repeats).publish("routing", keep=given.keep)
    plan_table(given.repeats).publish("routing-plans", keep=given.keep)


if __name__ == "__main__":
    main()
