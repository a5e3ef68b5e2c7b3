"""Routes: the stages that cover a window exactly once, in order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from meshnet.routing import checks
from meshnet.routing.checks import LayerRange


@dataclass(frozen=True, slots=True)
class Stage:
    """One node's contiguous run of layers, both ends inclusive."""

    node_id: str
    start_layer: int
    end_layer: int

    def __post_init__(self) -> None:
        checks.name("stage.node_id", self.node_id)
        checks.layer_range("stage layers", (self.start_layer, self.end_layer))

    @property
    def layers(self) -> int:
        """How many layers the stage runs."""
        return self.end_layer - self.start_layer + 1

    def to_dict(self) -> dict[str, object]:
        """JSON form."""
        return {"node_id": self.node_id, "start_layer": self.start_layer, "end_layer": self.end_layer}

    def __str__(self) -> str:
        return f"{self.node_id} ({self.start_layer}-{self.end_layer})"


@dataclass(frozen=True, slots=True)
class Route:
    """Stages in order, with what they cost.

    node_ids   the node of each stage
    stages     node and layers of each stage; empty when the route is known by names alone
    cost       equivalent milliseconds by the cost model that chose it; infinity when no model has priced it
    window     the layers covered (first, last), or None when not known
    model      a label
    """

    node_ids: tuple[str, ...]
    stages: tuple[Stage, ...]
    cost: float
    window: LayerRange | None
    model: str

    @classmethod
    def from_stages(
        cls, stages: Iterable[Stage], cost: float, window: LayerRange | None = None, model: str = ""
    ) -> Route:
        """A route of stages that are known with their layers."""
        listed = tuple(stages)
        return cls(tuple(stage.node_id for stage in listed), listed, cost, window, model)

    @classmethod
    def from_node_ids(
        cls, node_ids: Iterable[str], window: LayerRange | None = None, model: str = ""
    ) -> Route:
        """A route as it comes over a network, by names alone: no layers per stage, no cost.

        ValueError on bad input.
        """
        ids = checks.names("node_ids", node_ids)
        checked = None if window is None else checks.layer_range("window", window)
        return cls(ids, (), math.inf, checked, model)

    def hops(self) -> int:
        """The number of borders between stages."""
        return max(len(self.node_ids) - 1, 0)

    def to_dict(self) -> dict[str, object]:
        """JSON form; a cost that is not known is null."""
        return {
            "model": self.model,
            "window": None if self.window is None else list(self.window),
            "node_ids": list(self.node_ids),
            "stages": [stage.to_dict() for stage in self.stages],
            "hops": self.hops(),
            "cost_ms": self.cost if math.isfinite(self.cost) else None,
        }

    def __str__(self) -> str:
        return " -> ".join(map(str, self.stages or self.node_ids)) or "(no stage)"


def merged(stages: Iterable[Stage]) -> tuple[Stage, ...]:
    """Adjoining stages of one node as one stage: a node is charged once while the layers stay with it."""
    result: list[Stage] = []
    for stage in stages:
        last = result[-1] if result else None
        if last is not None and last.node_id == stage.node_id and last.end_layer + 1 == stage.start_layer:
            result[-1] = Stage(last.node_id, last.start_layer, stage.end_layer)
        else:
            result.append(stage)
    return tuple(result)


def covers(stages: tuple[Stage, ...], window: LayerRange) -> bool:
    """True when the stages run every layer of the window exactly once, in order."""
    return (
        bool(stages)
        and stages[0].start_layer == window[0]
        and stages[-1].end_layer == window[1]
        and all(a.end_layer + 1 == b.start_layer for a, b in pairwise(stages))
    )
