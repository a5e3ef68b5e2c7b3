"""Why a route was chosen: the candidates, each term in milliseconds, and one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshnet.routing.checks import LayerRange
from meshnet.routing.costing import Term
from meshnet.routing.route import Route


@dataclass(frozen=True, slots=True)
class Candidate:
    """One route that was weighed.

    roles   any of "winner", "alternative", "standby", "weighed" (a contender that is none of the others)
    terms   parts of the cost in milliseconds; they add up to `route.cost` within rounding
    totals  sums by name (measured time: queue_ms, prefill_ms, decode_ms, ...; empty for weighted cost)
    """

    route: Route
    roles: tuple[str, ...]
    terms: tuple[Term, ...]
    totals: Mapping[str, float]

    def to_dict(self) -> dict[str, object]:
        """JSON form."""
        return {
            "roles": list(self.roles),
            "route": self.route.to_dict(),
            "total_ms": self.route.cost,
            "terms": [term.to_dict() for term in self.terms],
            "totals": dict(self.totals),
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """The whole decision.

    why         one sentence
    candidates  the winner first, then by total
    excluded    by node id, why a node was not considered
    cost_model  "weighted" or "measured"; parameters: what it was set to
    exact       False when the search was cut short (the cost model's docstring says when)
    """

    model: str
    window: LayerRange
    cost_model: str
    parameters: Mapping[str, object]
    why: str
    candidates: tuple[Candidate, ...]
    excluded: Mapping[str, str]
    exact: bool

    def to_dict(self) -> dict[str, object]:
        """JSON form."""
        return {
            "model": self.model,
            "window": list(self.window),
            "cost_model": self.cost_model,
            "parameters": dict(self.parameters),
            "why": self.why,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "excluded": [
                {"node_id": node_id, "reason": reason} for node_id, reason in sorted(self.excluded.items())
            ],
            "exact": self.exact,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """The winner, the next routes, and the standby that shares no node with the winner, or None."""

    route: Route
    alternatives: tuple[Route, ...]
    standby: Route | None
    explanation: Explanation

    def to_dict(self) -> dict[str, object]:
        """JSON form: what the API, the CLI and the dashboard show."""
        return {
            "route": self.route.to_dict(),
            "alternatives": [route.to_dict() for route in self.alternatives],
            "standby": None if self.standby is None else self.standby.to_dict(),
            "explanation": self.explanation.to_dict(),
        }
