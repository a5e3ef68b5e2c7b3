"""Measured time: what the user will wait for, from what nodes and links measured.

    decode_ms(R)  = embed_ms(head) + sum(layers * decode_ms_per_layer) + sum(link_ms over hops)
                    + link_ms(tail, head) + output_ms(tail)
    t_s           = one prefill chunk on stage s: over the link into s, then through its layers
    prefill_ms(R) = sum of t_s + (chunks - 1) * the most that one node spends on a chunk
    total_ms(R)   = sum of the stages' queue_ms + prefill_ms + expected_tokens * decode_ms

The prompt tokens that every node of a route already holds are not computed again (at least one token always
is). The rest goes in `chunks = ceil(rest / chunk_tokens)` equal chunks. A link costs its `ms` per chunk or
step, and a chunk's bytes over `bytes_per_s` besides; a node's link to itself costs nothing; a link measured
in one direction only counts in both; one never measured counts as `unknown_link`. A node that comes back
in a route spends the time of all its stages on each chunk: it is one machine. Queues are waited for one
after another, once per stage. Every term is rounded once to 1e-9 ms.

A node is left out when it has no times, no free slot, or less KV room than prompt and expected tokens need
beyond what it already holds of the prompt (`room_exclusions`).

A node takes part once in a pipeline; only where no such pipeline is complete may a node come back.

What is exact: the total of every route shown; the best single node; the least pipeline as far as `labels.py`
says, over at most `EXACT_NODES` nodes and `LEVELS` different lengths of held prefix. Beyond that, the nodes
of least time per layer are searched for each layer, and those of one complete route; longer held prefixes are
rounded down to the levels kept. `Explanation.exact` says whether the winner is proven. Alternatives are
searched with less effort: their totals are exact, their order may not be complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshnet.routing import checks
from meshnet.routing.borders import ANY, END, Fork, Runner, cheapest, spans
from meshnet.routing.bounds import Mesh
from meshnet.routing.checks import LayerRange
from meshnet.routing.costing import Choice, PlanInput, Quote, Term, first
from meshnet.routing.labels import FULL, SHORT, Effort, least_pipeline
from meshnet.routing.route import Stage
from meshnet.routing.state import NodeState, RoutingRequest
from meshnet.routing.times import Link, NodeTimes
from meshnet.routing.units import to_ms, to_units

EXACT_NODES = 32
LEVELS = 4
UNKNOWN_LINK = Link(ms=5.0, bytes_per_s=12_500_000.0)
"""A cautious guess for a link nobody has measured: 5 ms and 100 Mbit/s."""
SINGLE_MARGIN_PERCENT = 10
"""A pipeline must be at least this much faster than the best single node."""


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """The cost model that `plan` uses for measured milliseconds.

    times         by node id
    links         by (from, to)
    token_bytes   bytes of one token's hidden state on the wire (4 * n_embd for float32)
    chunk_tokens  tokens of a prefill chunk
    unknown_link  stands for a link that neither direction has measured
    """

    times: Mapping[str, NodeTimes]
    links: Mapping[tuple[str, str], Link]
    token_bytes: int
    chunk_tokens: int = 256
    unknown_link: Link = field(default=UNKNOWN_LINK)

    def __post_init__(self) -> None:
        checks.whole("token_bytes", self.token_bytes)
        checks.whole("chunk_tokens", self.chunk_tokens, 1)

    @property
    def name(self) -> str:
        """As in the configuration."""
        return "measured"

    def parameters(self) -> dict[str, object]:
        """What the explanation shows beside the candidates."""
        return {
            "chunk_tokens": self.chunk_tokens,
            "token_bytes": self.token_bytes,
            "single_margin_percent": SINGLE_MARGIN_PERCENT,
        }

    def link(self, source: str, target: str) -> Link | None:
        """The link as it is charged; None from a node to itself."""
        if source == target:
            return None
        found = self.links.get((source, target)) or self.links.get((target, source))
        return found or self.unknown_link

    def open(self, given: PlanInput) -> _MeasuredCosting:
        """Binds the model to one planning task."""
        return _MeasuredCosting(self, given)


def room_exclusions(
    times: Mapping[str, NodeTimes], request: RoutingRequest, cached_tokens: Mapping[str, int]
) -> dict[str, str]:
    """Nodes without room for the request, with the reason as the rest of a sentence.

    A node needs one free slot and free KV room for prompt and expected tokens, less the prompt's tokens that
    it already holds. A route that comes back to a node needs two slots there: the node itself refuses the
    second.
    """
    excluded = {}
    for node_id, node in times.items():
        held = min(cached_tokens.get(node_id, 0), request.prompt_tokens)
        need = request.prompt_tokens + request.expected_tokens - held
        if node.free_slots < 1:
            excluded[node_id] = "has no free slot"
        elif node.free_kv_tokens < need:
            excluded[node_id] = f"has KV room for {node.free_kv_tokens} tokens, the call needs {need}"
    return excluded


@dataclass(frozen=True, slots=True)
class _Rates:
    """The milliseconds of a request that computes `fresh` prompt tokens, as units of 1e-9 ms."""

    cost: MeasuredCost
    expected: int
    fresh: int

    @property
    def chunks(self) -> int:
        return -(-self.fresh // self.cost.chunk_tokens)

    @property
    def repeats(self) -> int:
        return max(self.chunks - 1, 0)

    @property
    def chunk(self) -> float:
        """Tokens per chunk, on average."""
        return self.fresh / self.chunks if self.chunks else 0.0

    def decode_layer(self, node: str) -> int:
        return to_units(self.expected * self.cost.times[node].decode_ms_per_layer)

    def chunk_layer(self, node: str) -> int:
        return to_units(self.chunk * self.cost.times[node].prefill_ms_per_token_layer)

    def embed(self, node: str) -> int:
        return to_units(self.expected * self.cost.times[node].embed_ms)

    def output(self, node: str) -> int:
        return to_units(self.expected * self.cost.times[node].output_ms)

    def queue(self, node: str) -> int:
        return to_units(self.cost.times[node].queue_ms)

    def decode_link(self, source: str, target: str) -> int:
        link = self.cost.link(source, target)
        return to_units(self.expected * link.ms) if link else 0

    def chunk_link(self, source: str, target: str) -> int:
        link = self.cost.link(source, target)
        if link is None or not self.chunks:
            return 0
        return to_units(link.ms + self.chunk * self.cost.token_bytes / link.bytes_per_s * 1000.0)

    def chunk_times(self, stages: tuple[Stage, ...]) -> list[int]:
        """t_s of every stage."""
        links = [0, *(self.chunk_link(a.node_id, b.node_id) for a, b in pairwise(stages))]
        return [
            link + stage.layers * self.chunk_layer(stage.node_id)
            for link, stage in zip(links, stages, strict=True)
        ]

    def slowest(self, stages: tuple[Stage, ...]) -> tuple[int, str]:
        """The most that one node spends on a chunk, over all its stages, and the node."""
        spent: dict[str, int] = {}
        for stage, units in zip(stages, self.chunk_times(stages), strict=True):
            spent[stage.node_id] = spent.get(stage.node_id, 0) + units
        node = max(spent, key=lambda node_id: spent[node_id])
        return spent[node], node

    def total(self, stages: tuple[Stage, ...]) -> int:
        head, tail = stages[0].node_id, stages[-1].node_id
        chunk_times = self.chunk_times(stages)
        units = self.embed(head) + self.output(tail) + self.decode_link(tail, head)
        units += sum(self.queue(s.node_id) + s.layers * self.decode_layer(s.node_id) for s in stages)
        units += sum(self.decode_link(a.node_id, b.node_id) for a, b in pairwise(stages))
        return units + sum(chunk_times) + self.repeats * self.slowest(stages)[0]


class _MeasuredCosting:
    def __init__(self, cost: MeasuredCost, given: PlanInput) -> None:
        self.cost = cost
        self.window = given.window
        self.request = given.request
        self.cached = given.cached_tokens
        full = room_exclusions(cost.times, given.request, given.cached_tokens)
        self.excluded: dict[str, str] = {}
        short = set()
        for state in given.states:
            if state.node_id not in cost.times:
                self.excluded[state.node_id] = "has no measured times"
            elif state.node_id in full:
                self.excluded[state.node_id] = full[state.node_id]
                short.add(state.node_id)
        self.short_of_room = frozenset(short)
        usable = [state for state in given.states if state.node_id not in self.excluded]
        self.states = sorted(usable, key=lambda state: state.node_id)
        self.singles = {
            state.node_id: self._quote((Stage(state.node_id, *self.window),))
            for state in self.states
            if _runs(state, self.window)
        }
        self.exact = True
        self.returning = False
        self.levels = self._levels()
        self.meshes: dict[tuple[int, tuple[str, ...]], Mesh] = {}

    def prefer(self) -> Choice | None:
        """The best single node, unless the least pipeline takes at most 90 % of its time."""
        single, pipeline = first(self.singles.values()), self._pipeline(ANY, frozenset(), FULL)
        if single is None or pipeline is None:
            only = single or pipeline
            if only is None:
                return None
            reason = "is the only node with all the layers and room, and no pipeline is complete"
            if single is not None and len(self.singles) > 1:
                reason = "is the fastest node with all the layers and room, and no pipeline is complete"
            if single is None:
                reason = "takes the least time; no single node has all the layers and room"
            return Choice(only, reason)
        ratio = 100 * pipeline.units / single.units if single.units else 100.0
        weighed = (single, pipeline)
        if 100 * pipeline.units <= (100 - SINGLE_MARGIN_PERCENT) * single.units and single.units:
            return Choice(
                pipeline, f"takes {ratio:.1f} % of the time of the best single node, {single}", weighed
            )
        needed = f"more than the {100 - SINGLE_MARGIN_PERCENT} % from which splitting pays"
        reason = (
            f"has all the layers and room, and the best pipeline, {pipeline}, takes {ratio:.1f} % of its time"
        )
        return Choice(single, f"{reason}, {needed}", weighed)

    def least(self, fork: Fork, without: frozenset[str]) -> Quote | None:
        singles = [
            quote
            for node_id, quote in self.singles.items()
            if node_id not in without | fork.barred
            and (not fork.prefix or (fork.prefix == (node_id,) and END not in fork.barred))
        ]
        return first(filter(None, [*singles, self._pipeline(fork, without, SHORT)]))

    def _held(self, node_id: str) -> int:
        """Prompt tokens the node need not compute: at least one always is."""
        return min(self.cached.get(node_id, 0), max(self.request.prompt_tokens - 1, 0))

    def _rates(self, held: int) -> _Rates:
        return _Rates(self.cost, self.request.expected_tokens, self.request.prompt_tokens - held)

    def _quote(self, stages: tuple[Stage, ...]) -> Quote:
        return Quote(self._rates(min(self._held(s.node_id) for s in stages)).total(stages), stages)

    def _levels(self) -> list[int]:
        """Lengths of held prefix to plan with: 0, and the longest ones that two nodes or more reach."""
        held = sorted((self._held(state.node_id) for state in self.states), reverse=True)[1:]
        positive = sorted({tokens for tokens in held if tokens}, reverse=True)
        if len(positive) > LEVELS:
            self.exact = False
        return [0, *positive[:LEVELS]]

    def _pipeline(self, fork: Fork, without: frozenset[str], effort: Effort) -> Quote | None:
        """The least pipeline that keeps to the fork, over all levels of held prefix."""
        exact = True
        for returns in (False, True) if fork == ANY or self.returning else (False,):
            found = []
            for level in self.levels:
                reaching = [state for state in self.states if self._held(state.node_id) >= level]
                if len(reaching) > EXACT_NODES:
                    exact = False
                    reaching = [state for state in reaching if state.node_id not in without]
                    reaching = self._promising(reaching, level, fork)
                mesh = self._mesh(reaching, level).without(without)
                if not set(fork.prefix) <= set(mesh.node_ids):
                    continue
                pipeline = least_pipeline(mesh, effort, fork, returns=returns)
                if pipeline is not None:
                    exact = exact and pipeline.exact
                    found.append(self._quote(pipeline.stages))
            if found:
                break
        if effort is FULL:
            self.exact, self.returning = self.exact and exact, returns
        return first(found)

    def _promising(self, states: list[NodeState], level: int, fork: Fork) -> list[NodeState]:
        """About `EXACT_NODES` nodes: a complete route's, and for each layer those of least time per layer."""
        if len(states) <= EXACT_NODES:
            return states
        rates = self._rates(level)
        first, last = self.window

        def per_layer(state: NodeState) -> tuple[float, str]:
            node = state.node_id
            layers = sum(end - begin for begin, end in spans(state.served_layers, self.window))
            once = rates.queue(node) / max(layers, 1)
            return once + rates.decode_layer(node) + rates.chunks * rates.chunk_layer(node), node

        ranked = sorted((state for state in states if spans(state.served_layers, self.window)), key=per_layer)
        runners = [
            Runner(s.node_id, rates.queue(s.node_id), s.served_layers, s.mid_shard_entry) for s in ranked
        ]
        route = cheapest(self.window, runners, 1, fork).stages or ()
        kept = {stage.node_id for stage in route} | set(fork.prefix)
        holders = {layer: iter([s for s in ranked if _holds(s, layer)]) for layer in range(first, last + 1)}
        while holders and len(kept) < EXACT_NODES:
            for layer in list(holders):
                state = next(holders[layer], None)
                if state is None:
                    del holders[layer]
                elif len(kept) < EXACT_NODES:
                    kept.add(state.node_id)
        return [state for state in states if state.node_id in kept]

    def _mesh(self, states: list[NodeState], level: int) -> Mesh:
        ids = tuple(state.node_id for state in states)
        known = self.meshes.get((level, ids))
        if known is not None:
            return known
        rates = self._rates(level)
        borders = _borders(states, self.window)
        decode_links = [[rates.decode_link(a, b) for b in ids] for a in ids]
        chunk_links = [[rates.chunk_link(a, b) for b in ids] for a in ids]
        mesh = self.meshes[level, ids] = Mesh(
            node_ids=ids,
            borders=borders,
            can=np.array([_reach(state, borders, self.window) for state in states]),
            stage=[rates.queue(n) for n in ids],
            layer=[rates.decode_layer(n) + rates.chunk_layer(n) for n in ids],
            head=[rates.embed(n) for n in ids],
            tail=[rates.output(n) for n in ids],
            chunk_layer=[rates.chunk_layer(n) for n in ids],
            hop=[
                [d + c for d, c in zip(*row, strict=True)]
                for row in zip(decode_links, chunk_links, strict=True)
            ],
            hop_chunk=chunk_links,
            back=decode_links,
            repeats=rates.repeats,
        )
        return mesh

    def describe(self, quote: Quote) -> tuple[tuple[Term, ...], dict[str, float]]:
        stages = quote.stages
        held = min(self._held(stage.node_id) for stage in stages)
        rates = self._rates(held)
        head, tail, expected = stages[0].node_id, stages[-1].node_id, self.request.expected_tokens
        terms: list[Term] = []

        def add(kind: str, about: str, units: int) -> int:
            terms.append(Term(kind, about, to_ms(units)))
            return units

        chunk_times = rates.chunk_times(stages)
        queue = sum(add("queue", stage.node_id, rates.queue(stage.node_id)) for stage in stages)
        prefill = sum(
            add("prefill chunk", f"{stage}, with its link", units)
            for stage, units in zip(stages, chunk_times, strict=True)
        )
        slowest, slowest_node = rates.slowest(stages)
        about = f"{rates.repeats} more at the pace of {slowest_node}"
        prefill += add("prefill chunks", about, rates.repeats * slowest)
        decode = add("embed", f"{head} x {expected}", rates.embed(head))
        for stage in stages:
            units = stage.layers * rates.decode_layer(stage.node_id)
            decode += add("decode", f"{stage} x {expected}", units)
        for a, b in pairwise(stages):
            units = rates.decode_link(a.node_id, b.node_id)
            decode += add("link", f"{a.node_id} -> {b.node_id} x {expected}{self._guessed(a, b)}", units)
        if len(stages) > 1:
            about = f"{tail} -> {head} x {expected}{self._guessed(stages[-1], stages[0])}"
            decode += add("link back", about, rates.decode_link(tail, head))
        decode += add("output", f"{tail} x {expected}", rates.output(tail))
        return tuple(terms), {
            "queue_ms": to_ms(queue),
            "prefill_ms": to_ms(prefill),
            "decode_ms": to_ms(decode),
            "decode_ms_per_token": to_ms(decode) / expected if expected else 0.0,
            "prompt_tokens_computed": rates.fresh,
            "prompt_tokens_held": held,
            "chunks": rates.chunks,
        }

    def _guessed(self, source: Stage, target: Stage) -> str:
        a, b = source.node_id, target.node_id
        known = a == b or (a, b) in self.cost.links or (b, a) in self.cost.links
        return "" if known else " (never measured, guessed)"


def _runs(state: NodeState, window: LayerRange) -> bool:
    """True when one stage on this node can cover the window."""
    return (
        cheapest(window, [Runner(state.node_id, 0, state.served_layers, state.mid_shard_entry)]).stages
        is not None
    )


def _holds(state: NodeState, layer: int) -> bool:
    return any(first <= layer <= last for first, last in state.served_layers)


def _borders(states: list[NodeState], window: LayerRange) -> tuple[int, ...]:
    """The borders where any node can start or stop, and the window's ends."""
    first, last = window
    marks = {first, last + 1}
    for state in states:
        if state.mid_shard_entry:
            for begin, end in spans(state.served_layers, window):
                marks.update(range(begin, end + 1))
        else:
            for a, b in state.served_layers:
                if first <= a and b <= last:
                    marks.update((a, b + 1))
    return tuple(sorted(marks))


def _reach(state: NodeState, borders: tuple[int, ...], window: LayerRange) -> NDArray[np.bool_]:
    """(B, B): from which border to which the node can run as one stage."""
    place = {border: index for index, border in enumerate(borders)}
    can = np.zeros((len(borders), len(borders)), dtype=bool)
    if state.mid_shard_entry:
        for begin, end in spans(state.served_layers, window):
            i, j = place[begin], place[end]
            can[i : j + 1, i : j + 1] = np.triu(np.ones((j - i + 1, j - i + 1), dtype=bool), 1)
        return can
    edges = sorted((a, b + 1) for a, b in state.served_layers if window[0] <= a and b <= window[1])
    for begin, end in edges:
        i, j = place[begin], place[end]
        can[:, j] |= can[:, i]
        can[i, j] = True
    return can
