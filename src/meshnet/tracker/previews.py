"""Dry runs: what a call would take now, as the router explains it; and tickets for direct use of a node."""

from __future__ import annotations

from typing import Any

from meshnet.protocol.errors import ApiError
from meshnet.routing import NoRouteAvailable, RouteWeights, RoutingRequest
from meshnet.tracker import planning
from meshnet.tracker.forms import PreviewForm, TicketForm
from meshnet.tracker.jobs import Chosen
from meshnet.tracker.orchestrator import Orchestrator
from meshnet.tracker.placement import Placement
from meshnet.tracker.planning import ModelRouting, RouteRefused, View
from meshnet.tracker.reservations import Need
from meshnet.tracker.shelf import Shelf
from meshnet.tracker.signing import TICKET_MS, new_call_id
from meshnet.tracker.tuning import Tuning


def preview(shelf: Shelf, tuning: Tuning, placement: Placement, form: PreviewForm) -> dict[str, Any]:
    """The plan for a call like the one described. Raises ApiError: 400, 404, or 503 without a route."""
    model_id = find_model(shelf, form.model)
    kept = tuning.of(model_id)
    named = form.weights.named() if form.weights is not None else {}
    routing = ModelRouting(
        form.cost_model or kept.cost_model, RouteWeights.from_dict({**kept.weights.to_dict(), **named})
    )
    try:
        request = RoutingRequest(form.layer_range, form.prompt_tokens, form.expected_tokens)
    except ValueError as error:
        raise ApiError(400, str(error), param="layer_range") from error
    problem: NoRouteAvailable | None = None
    for view in placement.views(model_id):
        if form.layer_range is not None and form.layer_range[1] >= view.layers:
            raise ApiError(
                400,
                f"layer_range ends at {form.layer_range[1]}; {model_id!r} has {view.layers} layers",
                param="layer_range",
            )
        try:
            found = planning.choose(
                view,
                routing,
                request,
                full_nodes(placement, view, form.prompt_tokens + form.expected_tokens),
                alternatives=form.alternatives,
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


def full_nodes(placement: Placement, view: View, tokens: int) -> frozenset[str]:
    """The nodes that have no room now for one session of so many tokens."""
    need, room_of = Need(1, min(tokens, view.n_ctx)), placement.room_of(view.model)
    return frozenset(node_id for node_id in view.addresses if not need.within(room_of(node_id)))


def find_model(shelf: Shelf, name: str | None) -> str:
    """The id of a model, or of the default one. Raises ApiError (404)."""
    if name is None:
        found = shelf.default_id()
        if found:
            return found
        raise ApiError(404, "the mesh serves no model", code="model_not_found", param="model")
    model = shelf.find(name)
    if model is None:
        raise ApiError(
            404, f"The model '{name[:100]}' does not exist.", code="model_not_found", param="model"
        )
    return model.model_id


def signed_ticket(orchestrator: Orchestrator, shelf: Shelf, form: TicketForm) -> dict[str, Any]:
    """`{"ticket", "expires_ms"}` for a route over the named nodes, or over the cheapest. Holds no room."""
    model_id = find_model(shelf, form.model)
    call_id = new_call_id()
    chosen = _chosen(orchestrator, model_id, form.nodes)
    ticket = orchestrator.signer.sign(call_id, model_id, 0, chosen)
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
                view, orchestrator.routing_of(model_id), RoutingRequest(), full_nodes(placement, view, 1)
            )
            return Chosen(found.route.stages, view, found.explanation.why)
        except NoRouteAvailable as error:
            problem = str(error)
        except RouteRefused as error:
            raise ApiError(409, error.message, code="gap", param="nodes") from error
    raise ApiError(503, problem, type="server_error", code="no_route", retry_after=5)
