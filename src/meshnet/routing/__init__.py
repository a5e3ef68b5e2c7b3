"""Routing: which nodes run which layers for a request, what becomes of a route when a node fails, and why.

Pure: states in, routes and reasons out. Nothing here reserves, measures, waits or retries; two calls may
choose the same node. Costs are in equivalent milliseconds (`score_route`, `WeightedCost`) or in the
milliseconds that nodes measured (`MeasuredCost`).
"""

from meshnet.routing.costing import CostModel, Term
from meshnet.routing.errors import NoRouteAvailable, RoutingFailure
from meshnet.routing.explanation import Candidate, Explanation, Plan
from meshnet.routing.failover import FailoverDecision, failover
from meshnet.routing.measured import MeasuredCost, room_exclusions
from meshnet.routing.planner import plan
from meshnet.routing.route import Route, Stage
from meshnet.routing.state import NodeState, RouteWeights, RoutingRequest
from meshnet.routing.times import Link, NodeTimes
from meshnet.routing.weighted import WeightedCost, route_cost, score_route, stage_cost

__all__ = [
    "Candidate",
    "CostModel",
    "Explanation",
    "FailoverDecision",
    "Link",
    "MeasuredCost",
    "NoRouteAvailable",
    "NodeState",
    "NodeTimes",
    "Plan",
    "Route",
    "RouteWeights",
    "RoutingFailure",
    "RoutingRequest",
    "Stage",
    "Term",
    "WeightedCost",
    "failover",
    "plan",
    "room_exclusions",
    "route_cost",
    "score_route",
    "stage_cost",
]
