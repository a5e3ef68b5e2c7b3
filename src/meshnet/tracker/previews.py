"""Dry runs: what a call would take now, as the router explains it; and tickets for direct use of a node."""

from __future__ import annotations

import secrets
from typing import Any

from meshnet.protocol.errors import ApiError
from meshnet.routing import NoRouteAvailable, RouteWeights, RoutingRequest
from meshnet.tracker import planning
from meshnet.tracker.orchestrator import TICKET_MS, Orchestrator
from meshnet.tracker.placement import Chosen, Placement
from meshnet.tracker.planning import ModelRouting, RouteRefused, View
from meshnet.tracker.reservations import Need
from meshnet.tracker.shelf import Shelf
from meshnet.tracker.tuning import Tuning, parse_weights

FIELDS = ("model", "layer_range", "prompt_tokens", "expected_tokens", "weights", "cost_model", "alternatives")
MAX_ALTERNATIVES = 20


def preview(shelf: Shelf, tuning: Tuning, placement: Placement, body: dict[str, Any]) -> dict[str, Any]:
    """The plan for a call like the one described. Raises ApiError: 400, 404, or 503 without a route."""
    for name in body:
        if name not in FIELDS:
            raise ApiError(
                400, f"{name!r} is not one of {', '.join(FIELDS)}", code="unknown_parameter", param=name
            )
    model_id = find_model(shelf, body.get("model"))
    routing = _routing(tuning.of(model_id), body)
    request = _request(body)
    alternatives = _whole(body, "alternatives", 3, MAX_ALTERNATIVES)
    need = Need(1, request.prompt_tokens + request.expected_tokens)
    problem: NoRouteAvailable | None = None
    for view in placement.views(model_id):
        try:
            found = planning.choose(
                view,
                routing,
                request,
                _capped(need, view),
                placement.room_of(model_id),
                alternatives=alternatives,
            )
        except NoRouteAvailable as error:
            problem = problem or error
            continue
        return {
            "model": model_id,
            "cost_model": routing.cost_model,
            "weights": routing.weights.to_dict(),
            **found.to_dict(),
        }
    problem = problem or NoRouteAvailable(model_id, None)
    raise ApiError(503, str(problem), type="server_error", code="no_route", retry_after=5)


def _capped(need: Need, view: View) -> Need:
    return Need(need.slots, min(need.tokens, view.n_ctx))


def find_model(shelf: Shelf, name: Any) -> str:
    if name is None:
        found = shelf.default_id()
        if found:
            return found
        raise ApiError(404, "the mesh serves no model", code="model_not_found", param="model")
    if not isinstance(name, str):
        raise ApiError(400, "model must be a string", code="invalid_type", param="model")
    model = shelf.find(name)
    if model is None:
        raise ApiError(
            404, f"The model '{name[:100]}' does not exist.", code="model_not_found", param="model"
        )
    return model.model_id


def _routing(kept: ModelRouting, body: dict[str, Any]) -> ModelRouting:
    cost_model = body.get("cost_model", kept.cost_model)
    if cost_model not in ("measured", "weighted"):
        raise ApiError(400, f"cost_model is {cost_model!r}; it is measured or weighted", param="cost_model")
    weights = kept.weights.to_dict()
    if "weights" in body:
        weights |= parse_weights(body["weights"], "weights")
    return ModelRouting(cost_model, RouteWeights.from_dict(weights))


def _request(body: dict[str, Any]) -> RoutingRequest:
    window = body.get("layer_range")
    try:
        return RoutingRequest(
            layer_range=None if window is None else tuple(window),
            prompt_tokens=_whole(body, "prompt_tokens", 0, 10**7),
            expected_tokens=_whole(body, "expected_tokens", 256, 10**7),
        )
    except (TypeError, ValueError) as error:
        raise ApiError(400, f"layer_range: {error}", param="layer_range") from error


def _whole(body: dict[str, Any], name: str, default: int, most: int) -> int:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ApiError(400, f"{name} is {value!r}; it is a whole number from 0 to {most}", param=name)
    return value


def signed_ticket(orchestrator: Orchestrator, shelf: Shelf, body: dict[str, Any]) -> dict[str, Any]:
    """`{"ticket", "expires_ms"}` for a route over the named nodes, or over the cheapest. Holds no room."""
    for name in body:
        if name not in ("model", "nodes"):
            raise ApiError(400, f"{name!r} is not one of model, nodes", code="unknown_parameter", param=name)
    model_id = find_model(shelf, body.get("model"))
    names = body.get("nodes", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ApiError(400, "nodes must be a list of names", code="invalid_type", param="nodes")
    call_id = f"call-{secrets.token_hex(12)}"
    chosen = _chosen(orchestrator, model_id, names)
    ticket = orchestrator.sign(call_id, model_id, 0, chosen)
    return {
        "ticket": ticket,
        "call_id": call_id,
        "route": orchestrator.recorder.route(chosen.stages),
        "expires_ms": orchestrator.books.clock() + TICKET_MS,
    }


def _chosen(orchestrator: Orchestrator, model_id: str, names: list[str]) -> Chosen:
    placement = orchestrator.placement
    nodes = []
    for name in names:
        node = orchestrator.roster.find(name)
        if node is None:
            raise ApiError(404, f"there is no node {name[:100]!r}", code="unknown_node", param="nodes")
        nodes.append(node)
    problem = f"no live node serves {model_id!r}"
    for view in placement.views(model_id):
        try:
            if nodes:
                if not all(node.node_id in view.addresses for node in nodes):
                    problem = "a named node cannot be used now"
                    continue
                return Chosen(planning.forced(nodes, model_id, view.layers), view, "")
            found = planning.choose(
                view,
                orchestrator.routing_of(model_id),
                RoutingRequest(),
                Need(1, 1),
                placement.room_of(model_id),
            )
            return Chosen(found.route.stages, view, found.explanation.why)
        except NoRouteAvailable as error:
            problem = str(error)
        except RouteRefused as error:
            raise ApiError(409, error.message, code="gap", param="nodes") from error
    raise ApiError(503, problem, type="server_error", code="no_route", retry_after=5)
