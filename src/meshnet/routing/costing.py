"""What a cost model owes the planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from meshnet.routing.borders import Fork
from meshnet.routing.checks import LayerRange
from meshnet.routing.route import Stage
from meshnet.routing.state import NodeState, RoutingRequest


@dataclass(frozen=True, slots=True)
class PlanInput:
    """One planning task: live states that no rule excludes, and what each node holds of the prompt."""

    request: RoutingRequest
    window: LayerRange
    states: tuple[NodeState, ...]
    cached_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Quote:
    """Stages with their total in units of 1e-9 ms."""

    units: int
    stages: tuple[Stage, ...]

    @property
    def order(self) -> tuple[int, int, tuple[str, ...], tuple[int, ...]]:
        """Quotes are compared by this: total, number of stages, node ids, later ends."""
        ids = tuple(stage.node_id for stage in self.stages)
        return self.units, len(self.stages), ids, tuple(-stage.end_layer for stage in self.stages)

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that take part."""
        return frozenset(stage.node_id for stage in self.stages)

    def __str__(self) -> str:
        return " -> ".join(map(str, self.stages))


@dataclass(frozen=True, slots=True)
class Choice:
    """What a cost model prefers, the reason as the end of a sentence, and what else it weighed."""

    quote: Quote
    reason: str
    weighed: tuple[Quote, ...] = ()


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a cost: its kind, what it is about, and its milliseconds."""

    kind: str
    about: str
    ms: float

    def to_dict(self) -> dict[str, object]:
        """JSON form."""
        return {"kind": self.kind, "about": self.about, "ms": self.ms}


class Costing(Protocol):
    """A cost model bound to one planning task."""

    @property
    def exact(self) -> bool:
        """False when what was chosen may not be the least: the model's docstring says when."""

    @property
    def excluded(self) -> Mapping[str, str]:
        """Nodes that the model itself leaves out, with the reason as the rest of a sentence."""

    @property
    def short_of_room(self) -> frozenset[str]:
        """Those of the excluded that only lack a slot or KV room at the moment."""

    def prefer(self) -> Choice | None:
        """The preferred route over the window."""

    def least(self, fork: Fork, without: frozenset[str]) -> Quote | None:
        """The route of least total within the fork that uses none of the nodes in `without`."""

    def describe(self, quote: Quote) -> tuple[tuple[Term, ...], dict[str, float]]:
        """Every term, in milliseconds, adding up to the total; and totals by name."""


class CostModel(Protocol):
    """Weighted or measured: what `plan` is given."""

    @property
    def name(self) -> str:
        """As in the configuration: "weighted" or "measured"."""

    def parameters(self) -> dict[str, object]:
        """What the explanation shows beside the candidates."""

    def open(self, given: PlanInput) -> Costing:
        """Binds the model to one planning task."""


def first(quotes: Iterable[Quote]) -> Quote | None:
    """The first by `Quote.order`."""
    return min(quotes, key=lambda quote: quote.order, default=None)
