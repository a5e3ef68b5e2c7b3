"""Brute force beside the router: enumerates every route, and prices it from the formulas alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshnet.routing import Link, NodeState, NodeTimes, RouteWeights, RoutingRequest, Stage

Stages = tuple[tuple[str, int, int], ...]
"""(node id, first layer, last layer) of each stage."""


def window_of(request: RoutingRequest, states: Sequence[NodeState]) -> tuple[int, int] | None:
    live = [state for state in states if state.alive]
    if not live:
        return None
    if request.layer_range:
        return request.layer_range
    layers = [layer for state in live for shard in state.served_layers for layer in shard]
    return (min(layers), max(layers)) if layers else None


def edges(state: NodeState, window: tuple[int, int]) -> set[tuple[int, int]]:
    """The layer runs (first, last) that design 3.2 gives this node, one shard at a time."""
    low, high = window
    result = set()
    for first, last in state.served_layers:
        if state.mid_shard_entry:
            for i in range(first, last + 1):
                result |= {(i, j) for j in range(i, last + 1) if low <= i and j <= high}
        elif low <= first and last <= high:
            result.add((first, last))
    return result


def all_routes(states: Sequence[NodeState], window: tuple[int, int]) -> Iterator[Stages]:
    """Every way through the window: chains of edges, a node's adjoining edges joined into one stage."""
    steps = [
        (state.node_id, first, last)
        for state in states
        if state.alive
        for first, last in edges(state, window)
    ]

    def go(border: int, done: Stages) -> Iterator[Stages]:
        if border == window[1] + 1:
            yield done
            return
        for node_id, first, last in steps:
            if first != border:
                continue
            if done and done[-1][0] == node_id:
                yield from go(last + 1, (*done[:-1], (node_id, done[-1][1], last)))
            else:
                yield from go(last + 1, (*done, (node_id, first, last)))

    yield from dict.fromkeys(go(window[0], ()))


def order(units: int, stages: Stages) -> tuple[int, int, tuple[str, ...], tuple[int, ...]]:
    return units, len(stages), tuple(s[0] for s in stages), tuple(-s[2] for s in stages)


def weighted_units(
    stages: Stages, states: Sequence[NodeState], request: RoutingRequest, weights: RouteWeights
) -> int:
    by_id = {state.node_id: state for state in states}
    units = 0
    for node_id, _, _ in stages:
        state = by_id[node_id]
        latency = weights.latency * state.latency_ms
        load = weights.load * state.current_load * 120
        units += round((latency + load + weights.capacity * 100 / max(state.capacity_score, 0.01)) * 1e9)
    units += round(weights.hop * 15 * 1e9) * (len(stages) - 1)
    return units + round(weights.prompt * 10 * request.prompt_tokens / 1024 * 1e9)


def best_weighted(
    request: RoutingRequest, states: Sequence[NodeState], weights: RouteWeights
) -> tuple[int, Stages] | None:
    window = window_of(request, states)
    if window is None:
        return None
    priced = [(weighted_units(r, states, request, weights), r) for r in all_routes(states, window)]
    return min(priced, key=lambda pair: order(*pair), default=None)


def reached(states: Sequence[NodeState], window: tuple[int, int]) -> int:
    """The highest border reachable from the window's start."""
    found = {window[0]}
    for border in range(window[0], window[1] + 1):
        if border in found:
            for state in states:
                if state.alive:
                    found |= {last + 1 for first, last in edges(state, window) if first == border}
    return max(found)


@dataclass(frozen=True)
class Measured:
    """The parts of the measured total, in milliseconds as floats."""

    queue: float
    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.queue + self.prefill + self.decode


def measured(
    stages: Stages,
    request: RoutingRequest,
    times: Mapping[str, NodeTimes],
    links: Mapping[tuple[str, str], Link],
    *,
    token_bytes: int,
    chunk_tokens: int,
    unknown: Link,
    held: Mapping[str, int],
) -> Measured:
    """Design 3.6, written down once more and independently of the code under test."""

    def link(a: str, b: str) -> Link | None:
        if a == b:
            return None
        return links.get((a, b), links.get((b, a), unknown))

    def trip(a: str, b: str) -> float:
        found = link(a, b)
        return 0.0 if found is None else found.ms

    ids = [stage[0] for stage in stages]
    reuse = min(max(min(held.get(n, 0), request.prompt_tokens - 1), 0) for n in ids)
    fresh = request.prompt_tokens - reuse
    chunks = math.ceil(fresh / chunk_tokens)
    per_chunk = fresh / chunks if chunks else 0.0
    decode = times[ids[0]].embed_ms + times[ids[-1]].output_ms + trip(ids[-1], ids[0])
    chunk_times, spent = [], dict.fromkeys(ids, 0.0)
    for place, (node_id, first, last) in enumerate(stages):
        layers = last - first + 1
        decode += layers * times[node_id].decode_ms_per_layer
        chunk = per_chunk * layers * times[node_id].prefill_ms_per_token_layer
        if place:
            decode += trip(ids[place - 1], node_id)
            way = link(ids[place - 1], node_id)
            if way is not None and chunks:
                chunk += way.ms + per_chunk * token_bytes / way.bytes_per_s * 1000
        chunk_times.append(chunk)
        spent[node_id] += chunk
    prefill = sum(chunk_times) + max(chunks - 1, 0) * max(spent.values())
    queue = sum(times[n].queue_ms for n in ids)
    return Measured(queue, prefill, request.expected_tokens * decode)


def stages_of(stages: Sequence[Stage]) -> Stages:
    return tuple((s.node_id, s.start_layer, s.end_layer) for s in stages)
