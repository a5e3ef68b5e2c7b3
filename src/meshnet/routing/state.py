"""What a planner is told: a node's state, the request, the weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from meshnet.routing import checks
from meshnet.routing.checks import LayerRange


@dataclass(frozen=True, slots=True)
class NodeState:
    """One node as its health report describes it.

    node_id           unique in the mesh
    latency_ms        smoothed milliseconds per decode step of this node, its data plane trip included
    current_load      busy slots / slots; above 1 is accepted
    capacity_score    decode tokens per second over the whole model's depth, comparable between nodes
    served_layers     shards as (first, last), both inclusive
    alive             a node that is not alive adds no edge
    mid_shard_entry   True: it starts and stops at any layer of its shards; False: whole shards only

    ValueError names the field and the value that is refused: NaN, infinities, negative numbers, ranges that
    are reversed, negative or not of integers.
    """

    node_id: str
    latency_ms: float = 0.0
    current_load: float = 0.0
    capacity_score: float = 1.0
    served_layers: tuple[LayerRange, ...] = ()
    alive: bool = True
    mid_shard_entry: bool = False

    def __post_init__(self) -> None:
        checks.name("node_id", self.node_id)
        checks.number("latency_ms", self.latency_ms)
        checks.number("current_load", self.current_load)
        checks.number("capacity_score", self.capacity_score)
        object.__setattr__(self, "served_layers", checks.layer_ranges("served_layers", self.served_layers))
        checks.flag("alive", self.alive)
        checks.flag("mid_shard_entry", self.mid_shard_entry)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> NodeState:
        """Reads the wire form. `node_id` is required; unknown keys are ignored; ValueError as above."""
        checks.mapping("a node state", data)
        if "node_id" not in data:
            raise ValueError(f"node_id is missing in the node state {dict(data)!r}")
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, object]:
        """The wire form; `from_dict` reads it back."""
        return {
            "node_id": self.node_id,
            "latency_ms": self.latency_ms,
            "current_load": self.current_load,
            "capacity_score": self.capacity_score,
            "served_layers": [list(shard) for shard in self.served_layers],
            "alive": self.alive,
            "mid_shard_entry": self.mid_shard_entry,
        }


@dataclass(frozen=True, slots=True)
class RouteWeights:
    """Factors on the terms of the weighted cost, each finite and at least 0; 0 turns a term off.

    latency on milliseconds per step, load on 120 ms per unit of load, capacity on 100 ms / score, hop on 15
    ms per border between stages, prompt on 10 ms per 1,024 prompt tokens.
    """

    latency: float = 1.0
    load: float = 1.0
    capacity: float = 1.0
    hop: float = 1.0
    prompt: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            checks.number(f"weights.{field.name}", getattr(self, field.name))

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> RouteWeights:
        """Reads weights by name; those not named stay 1.0. ValueError on an unknown name or a bad value."""
        checks.mapping("weights", data)
        checks.known_keys("weight", data, [field.name for field in fields(cls)])
        return cls(**data)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, float]:
        """The weights by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What is to be routed.

    layer_range      the window (first, last), both inclusive; None: from the first to the last layer that any
                     live node serves
    prompt_tokens    tokens of the prompt
    expected_tokens  tokens the answer is expected to have; only measured time uses it
    """

    layer_range: LayerRange | None = None
    prompt_tokens: int = 0
    expected_tokens: int = 256

    def __post_init__(self) -> None:
        if self.layer_range is not None:
            object.__setattr__(self, "layer_range", checks.layer_range("layer_range", self.layer_range))
        checks.whole("prompt_tokens", self.prompt_tokens)
        checks.whole("expected_tokens", self.expected_tokens)


def distinct(states: Iterable[NodeState]) -> list[NodeState]:
    """The states as a list; ValueError when two carry the same node_id."""
    result = list(states)
    if len({state.node_id for state in result}) < len(result):
        seen: set[str] = set()
        for state in result:
            if state.node_id in seen:
                raise ValueError(f"node_id {state.node_id!r} stands twice among the states")
            seen.add(state.node_id)
    return result


def window_of(request: RoutingRequest, states: Iterable[NodeState]) -> LayerRange | None:
    """The request's layer range, else the span of what live nodes serve. None: nobody is live."""
    live = [state for state in states if state.alive]
    if not live:
        return None
    if request.layer_range is not None:
        return request.layer_range
    shards = [shard for state in live for shard in state.served_layers]
    if not shards:
        return None
    return min(first for first, _ in shards), max(last for _, last in shards)
