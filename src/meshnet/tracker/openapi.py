"""The OpenAPI document of the tracker's interface: made from the forms that requests are read with."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from meshnet import __version__
from meshnet.protocol.bodies import ChatBody, CompletionBody
from meshnet.protocol.enrolment import EnrolRequest
from meshnet.protocol.openai import CHAT_NEUTRAL, COMPLETION_NEUTRAL
from meshnet.tracker import forms, shapes
from meshnet.tracker.books.api import OPERATIONS as BOOKS

REF = "#/components/schemas/"
SECURITY: dict[str, list[dict[str, list[str]]]] = {"open": [], "loopback": [{}, {"key": []}]}
SCOPES = {
    "open": "Open to all.",
    "loopback": "Open where the tracker listens on loopback only; else it needs any key.",
    "use": "Needs any key; with the scope use it shows what is the key's own.",
    "admin": "Needs a key with the scope admin.",
}
NOT_TAKEN = {"ImagePart", "AudioPart", "FilePart", "FunctionMessage"}
"""Parts of OpenAI's interface that are recognised only to be refused by name."""
FORMS = (
    forms.SessionForm,
    forms.DrainForm,
    forms.RoutingSettingsForm,
    forms.PreviewForm,
    forms.TicketForm,
    forms.PlaceForm,
    forms.InviteForm,
    EnrolRequest,
    forms.LoadModelForm,
    forms.DefaultModelForm,
    forms.AliasForm,
    forms.PlaceAgainForm,
)


@dataclass(frozen=True, slots=True)
class Operation:
    """`body` and `answer` name schemas; an answer may be a media type. `scope` is a key of SCOPES."""

    method: str
    path: str
    summary: str
    answer: str
    body: str | None = None
    scope: str = "admin"
    status: int = 200
    body_needed: bool = True
    also: tuple[int, ...] = ()
    query: tuple[tuple[str, dict[str, Any]], ...] = ()


OPERATIONS = (
    Operation("get", "/healthz", "The tracker lives", "Health", scope="open"),
    Operation(
        "get", "/readyz", "A model is fully covered by ready nodes", "Ready", scope="open", also=(503,)
    ),
    Operation("get", "/metrics", "Metrics for Prometheus", "text/plain", scope="loopback"),
    Operation("get", "/openapi.json", "This document", "Object", scope="open"),
    Operation("get", "/v1/models", "Models, as OpenAI lists them", "OpenAiModels", scope="use"),
    Operation("get", "/v1/models/{model}", "One model", "OpenAiModel", scope="use"),
    Operation("post", "/v1/chat/completions", "A chat completion", "Answer", "ChatBody", scope="use"),
    Operation("post", "/v1/completions", "A text completion", "Answer", "CompletionBody", scope="use"),
    Operation("get", "/api/join-info", "What a node needs to know to join", "JoinInfo", scope="open"),
    Operation(
        "post",
        "/api/enroll",
        "A node's certificate, for a proof that it knows a join token or its credential",
        "Enrolled",
        "EnrolRequest",
        scope="open",
    ),
    Operation("post", "/api/session", "Exchange a key for a cookie", "Session", "SessionForm", scope="open"),
    Operation("get", "/api/session", "Who one is", "Session", scope="use"),
    Operation("delete", "/api/session", "Sign out", "SignedOut", scope="open"),
    Operation("get", "/api/nodes", "All nodes", "Nodes"),
    Operation(
        "post", "/api/nodes/{node}/drain", "Drain a node (id or name)", "Node", "DrainForm", body_needed=False
    ),
    Operation("delete", "/api/nodes/{node}/drain", "Take a drained node back", "Node"),
    Operation("get", "/api/models", "All models, with coverage", "Models", scope="use"),
    Operation(
        "post", "/api/models", "Have a model served by the mesh", "LoadedModel", "LoadModelForm", status=202
    ),
    Operation("delete", "/api/models/{model}", "Let go of a model", "UnloadedModel"),
    Operation(
        "put",
        "/api/models/default",
        "The model of clients without a wish",
        "DefaultModel",
        "DefaultModelForm",
        body_needed=False,
    ),
    Operation("put", "/api/models/aliases/{alias}", "A further name for a model", "Alias", "AliasForm"),
    Operation("delete", "/api/models/aliases/{alias}", "Forget a further name", "Alias"),
    Operation("get", "/api/placement", "Where models are placed, and what moves", "PlacementState"),
    Operation(
        "post",
        "/api/placement",
        "Place a model anew",
        "PlacementState",
        "PlaceAgainForm",
        status=202,
        body_needed=False,
    ),
    Operation("get", "/api/calls", "Calls, in flight first", "Calls", scope="use"),
    Operation("get", "/api/calls/{call}", "One call with its timeline", "Call", scope="use"),
    Operation("delete", "/api/calls/{call}", "Cancel a call", "Cancelled", scope="use"),
    Operation("get", "/api/events", "Snapshot, then upserts and removals", "text/event-stream", scope="use"),
    Operation(
        "get",
        "/api/console",
        "Console entries that came or changed after `since`",
        "Console",
        scope="use",
        query=(("since", {"type": "integer", "minimum": 0, "maximum": forms.MAX_SEQ, "default": 0}),),
    ),
    Operation(
        "post",
        "/api/route/preview",
        "What a call would take now, and why",
        "Plan",
        "PreviewForm",
        body_needed=False,
    ),
    Operation(
        "post",
        "/api/place/preview",
        "Which node should hold which layers",
        "Placement",
        "PlaceForm",
        body_needed=False,
    ),
    Operation("get", "/api/settings/routing", "Cost model and weights", "RoutingSettings"),
    Operation("put", "/api/settings/routing", "Merge a change", "RoutingSettings", "RoutingSettingsForm"),
    Operation("get", "/api/statistics", "Figures of nodes and routes over the window", "Statistics"),
    Operation(
        "post", "/api/tickets", "A ticket for direct use of nodes", "Ticket", "TicketForm", body_needed=False
    ),
    Operation("post", "/api/invite", "A join link", "Invitation", "InviteForm", body_needed=False),
)


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas: dict[str, Any] = dict(shapes.SCHEMAS)
    for struct in (ChatBody, CompletionBody, *FORMS):
        _, parts = msgspec.json.schema_components([struct], ref_template=REF + "{name}")
        schemas.update({name: _taken(part) for name, part in parts.items() if name not in NOT_TAKEN})
    for body, neutral in (("ChatBody", CHAT_NEUTRAL), ("CompletionBody", COMPLETION_NEUTRAL)):
        for name, values in neutral.items():
            schemas[body]["properties"][name] = {"enum": [None, *values]}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    own = {(operation.method, operation.path) for operation in OPERATIONS}
    for item in BOOKS:
        method = item.method.lower()
        if (method, item.path) in own:
            continue
        if item.body is not None:
            schemas[item.body.__name__] = _pydantic(item.body, schemas)
        paths.setdefault(item.path, {})[method] = _described(
            Operation(
                method,
                item.path,
                item.summary,
                "text/csv" if item.path.endswith("/export") else "Object",
                item.body.__name__ if item.body is not None else None,
                scope=item.scope,
                status=item.status,
                query=_query(item.query, schemas),
            )
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "meshnet tracker",
            "version": __version__,
            "description": "An OpenAI-compatible endpoint over a mesh of nodes, and its management API.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation) -> dict[str, Any]:
    if "/" in operation.answer:
        content: dict[str, Any] = {operation.answer: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": {"$ref": REF + operation.answer}}}
    if operation.answer == "Answer":
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {
        str(operation.status): {"description": "Success", "content": content},
        "4XX": {
            "description": "Refused",
            "content": {"application/json": {"schema": {"$ref": REF + "Error"}}},
        },
        "503": {
            "description": "Not now; Retry-After says when to try again",
            "content": {"application/json": {"schema": {"$ref": REF + "Error"}}},
        },
    }
    for status in operation.also:
        responses[str(status)] = {"description": "Not yet", "content": content}
    described: dict[str, Any] = {
        "operationId": f"{operation.method}{_camel(operation.path)}",
        "summary": operation.summary,
        "responses": responses,
        "security": SECURITY.get(operation.scope, [{"key": []}]),
        "description": SCOPES[operation.scope],
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        described["requestBody"] = {
            "required": operation.body_needed,
            "content": {"application/json": {"schema": {"$ref": REF + operation.body}}},
        }
    return described


def _camel(path: str) -> str:
    words = re.split(r"[^a-zA-Z0-9]+", path)
    return "".join(word[:1].upper() + word[1:] for word in words if word)


def _taken(schema: Any) -> Any:
    """A schema without the parts that are always refused."""
    if isinstance(schema, list):
        return [_taken(item) for item in schema if not _refused(item)]
    if isinstance(schema, dict):
        return {key: _taken(value) for key, value in schema.items() if not _refused(value)}
    return schema


def _refused(item: Any) -> bool:
    reference = item.get("$ref") if isinstance(item, dict) else item
    return isinstance(reference, str) and reference.removeprefix(REF) in NOT_TAKEN and REF in reference


def _pydantic(model: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template=REF + "{model}")
    schemas.update(schema.pop("$defs", {}))
    return schema


def _query(model: type[BaseModel] | None, schemas: dict[str, Any]) -> tuple[tuple[str, dict[str, Any]], ...]:
    if model is None:
        return ()
    return tuple(_pydantic(model, schemas).get("properties", {}).items())


def document_route() -> Route:
    """`/openapi.json`, encoded once."""
    body: bytes = msgspec.json.encode(document())

    async def endpoint(request: Request) -> Response:
        return Response(body, media_type="application/json")

    handler: Callable[[Request], Any] = endpoint
    return Route("/openapi.json", handler, methods=["GET"])
