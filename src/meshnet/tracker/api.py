"""The management API and the open pages: nodes, models, calls, console, settings, sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from meshnet import __version__
from meshnet.protocol import PROTOCOL_VERSION
from meshnet.protocol.addresses import bracketed
from meshnet.protocol.enrolment import MAX_BYTES as MAX_ENROLMENT
from meshnet.protocol.enrolment import PATH as ENROLMENT
from meshnet.protocol.errors import ApiError
from meshnet.protocol.invitation import Invitation
from meshnet.tracker import forms
from meshnet.tracker.answers import Tracker, answer, encode, key_of
from meshnet.tracker.auth import client_address, cookie_header, cookie_of, require_admin
from meshnet.tracker.bodies import read_body
from meshnet.tracker.books.records import KeyInfo
from meshnet.tracker.collection import Collection
from meshnet.tracker.dialling import link_problems
from meshnet.tracker.feed import EVERYONE, NODE_INTERVAL_S, Audience
from meshnet.tracker.forms import read_form
from meshnet.tracker.members import Node
from meshnet.tracker.metrics import CONTENT_TYPE
from meshnet.tracker.placing import preview_placement
from meshnet.tracker.previews import preview, signed_ticket
from meshnet.tracker.views import model_view, node_view, openai_model
from meshnet.tracker.watching import Watching

Endpoint = Callable[[Request], Awaitable[Response]]


class Api:
    """The endpoints, bound to one tracker. `request.state.key` is the caller's key, except on open paths."""

    def __init__(self, tracker: Tracker) -> None:
        self.t = tracker
        tracker.roster.on_change(self._node_changed)
        self._models_shown: dict[str, bytes] = {}

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Endpoint]] = [
            ("GET", "/healthz", self.healthz),
            ("GET", "/readyz", self.readyz),
            ("GET", "/metrics", self.metrics),
            ("GET", "/v1/models", self.list_openai_models),
            ("GET", "/v1/models/{model:path}", self.get_openai_model),
            ("GET", "/api/join-info", self.join_info),
            ("POST", ENROLMENT, self.enrol),
            ("POST", "/api/session", self.sign_in),
            ("GET", "/api/session", self.who_am_i),
            ("DELETE", "/api/session", self.sign_out),
            ("GET", "/api/nodes", self.list_nodes),
            ("POST", "/api/nodes/{node}/drain", self.drain),
            ("DELETE", "/api/nodes/{node}/drain", self.undrain),
            ("GET", "/api/models", self.list_models),
            ("POST", "/api/route/preview", self.route_preview),
            ("POST", "/api/place/preview", self.place_preview),
            ("GET", "/api/settings/routing", self.get_routing),
            ("PUT", "/api/settings/routing", self.put_routing),
            ("GET", "/api/statistics", self.statistics),
            ("POST", "/api/tickets", self.make_ticket),
            ("POST", "/api/invite", self.invite),
        ]
        own = [Route(path, endpoint, methods=[method]) for method, path, endpoint in table]
        return [*own, *Collection(self.t).routes(), *Watching(self.t, self._mesh).routes()]

    def _mesh(self, key: KeyInfo) -> dict[str, Any]:
        return {"models": self._models(key), "nodes": self._nodes() if key.scope == "admin" else []}

    # ------------------------------------------------------------ open

    async def healthz(self, request: Request) -> Response:
        return answer({"status": "ok", "version": __version__})

    async def readyz(self, request: Request) -> Response:
        """Ready when some model is fully covered by ready nodes."""
        models = self.t.shelf.models()
        complete = [model_id for model_id, model in models.items() if model.complete]
        missing = {m.model_id: [list(gap) for gap in m.gaps] for m in models.values() if not m.complete}
        body = {"ready": bool(complete), "models": complete, "missing": missing}
        return answer(body, 200 if complete else 503, None if complete else {"retry-after": "5"})

    async def metrics(self, request: Request) -> Response:
        metrics, placement = self.t.metrics, self.t.orchestrator.placement
        now = self.t.roster.clock()
        metrics.tasks.set(len(asyncio.all_tasks()))
        metrics.in_flight.set(self.t.recorder.table.in_flight)
        metrics.waiting.set(placement.waiting)
        metrics.viewers.set(self.t.feed.viewers)
        metrics.nodes.clear()
        metrics.free_slots.clear()
        metrics.free_kv.clear()
        for node in self.t.roster.state.nodes.values():
            metrics.nodes.labels(node.status(now)).inc()
        for node_id, model in placement.state.rooms:
            room = placement.room_of(model)(node_id)
            metrics.free_slots.labels(self.t.roster.name_of(node_id), model).set(room.slots)
            metrics.free_kv.labels(self.t.roster.name_of(node_id), model).set(room.tokens)
        return Response(metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    async def join_info(self, request: Request) -> Response:
        host = self.t.settings.advertise or request.url.hostname or self.t.settings.host
        return answer(
            {
                "mesh_id": self.t.books.mesh.id,
                "name": self.t.settings.name,
                "grpc_address": f"{bracketed(host)}:{self.t.grpc_port}",
                "version": __version__,
                "protocol_version": PROTOCOL_VERSION,
                "trackers": self.t.peers.all_urls(),
                "tls": self.t.registrar is not None,
                "ca": self._ca(),
            }
        )

    def _ca(self) -> str:
        """The fingerprint by which nodes know this mesh; empty without TLS."""
        return self.t.registrar.authority.fingerprint if self.t.registrar is not None else ""

    async def enrol(self, request: Request) -> Response:
        if self.t.registrar is None:
            raise ApiError(403, "this mesh runs without TLS: there are no certificates", code="no_tls")
        body = await read_body(request.scope, request.receive, MAX_ENROLMENT, forms.BODY_TIMEOUT_S)
        return answer(await self.t.registrar.enrol(body, client_address(request.scope)))

    # ------------------------------------------------------------ sessions

    async def sign_in(self, request: Request) -> Response:
        secret = (await read_form(request, forms.SessionForm, needed=True)).key
        key = await self.t.authenticator.check(secret, client_address(request.scope))
        sessions = self.t.authenticator.sessions
        response = answer({"scope": key.scope, "name": key.name})
        secure = request.url.scheme == "https"
        response.raw_headers.append(cookie_header(sessions.seal(secret), sessions.lifetime_s, secure))
        return response

    async def who_am_i(self, request: Request) -> Response:
        key = key_of(request)
        return answer({"scope": key.scope, "name": key.name})

    async def sign_out(self, request: Request) -> Response:
        response = answer({"signed_out": cookie_of(request.scope) is not None})
        response.raw_headers.append(cookie_header("", 0, request.url.scheme == "https"))
        return response

    # ------------------------------------------------------------ models

    async def list_openai_models(self, request: Request) -> Response:
        key = key_of(request)
        models = [m for m in self.t.shelf.models().values() if key.may_use(m.model_id)]
        shelf, created = self.t.shelf, self.t.started_s
        return answer({"object": "list", "data": [openai_model(m, created, shelf.names(m)) for m in models]})

    async def get_openai_model(self, request: Request) -> Response:
        model = self.t.orchestrator.model_for(key_of(request), request.path_params["model"])
        return answer(openai_model(model, self.t.started_s, self.t.shelf.names(model)))

    async def list_models(self, request: Request) -> Response:
        return answer({"models": self._models(key_of(request))})

    def _models(self, key: KeyInfo) -> list[dict[str, Any]]:
        default = self.t.shelf.default_id()
        return [self._model(model_id, default) for model_id in self.t.shelf.models() if key.may_use(model_id)]

    def _model(self, model_id: str, default: str) -> dict[str, Any]:
        shelf = self.t.shelf
        model = shelf.models()[model_id]
        return model_view(
            model, self.t.tuning.of(model_id), shelf.names(model), model_id == default, self._own_url()
        )

    def _own_url(self) -> str:
        settings = self.t.settings
        host = settings.advertise or ("127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host)  # noqa: S104
        scheme = "https" if settings.https_only else "http"
        return f"{scheme}://{bracketed(host)}:{settings.port}"

    # ------------------------------------------------------------ nodes

    async def list_nodes(self, request: Request) -> Response:
        require_admin(key_of(request))
        return answer({"nodes": self._nodes()})

    def _nodes(self) -> list[dict[str, Any]]:
        return [self._node(node) for node in self.t.roster.state.nodes.values()]

    def _node(self, node: Node) -> dict[str, Any]:
        now = self.t.roster.clock()
        engine = self._engine_note(node)
        notes = [*((engine,) if engine else ()), *link_problems(self.t.roster.state, node)]
        return node_view(node, now, self.t.experience.trust(node.node_id), notes)

    def _engine_note(self, node: Node) -> str:
        """Says so where unlike engine versions keep nodes of one model off each other's routes."""
        mine = {shard.model for shard in node.shards}
        for other in self.t.roster.state.nodes.values():
            unlike = other.engine_version != node.engine_version
            if unlike and other.connected and any(shard.model in mine for shard in other.shards):
                return (
                    f"runs engine {node.engine_version}, {other.name} runs {other.engine_version}: they "
                    "never share a route; install the same version of meshnet on both"
                )
        return ""

    async def drain(self, request: Request) -> Response:
        require_admin(key_of(request))
        form = await read_form(request, forms.DrainForm)
        return answer(await self._drained(request.path_params["node"], True, form.reason))

    async def undrain(self, request: Request) -> Response:
        require_admin(key_of(request))
        return answer(await self._drained(request.path_params["node"], False, ""))

    async def _drained(self, name: str, on: bool, reason: str) -> dict[str, Any]:
        node = self.t.roster.find(name)
        if node is None:
            raise ApiError(404, f"there is no node {name[:100]!r}", code="unknown_node", param="node")
        await self.t.peers.set_drain(node.node_id, on, reason)
        return self._node(self.t.roster.state.nodes[node.node_id])

    def _node_changed(self, node_id: str, node: Node | None) -> None:
        feed = self.t.feed
        if not feed.watched:
            return
        if node is None:
            feed.remove("node", node_id, Audience())
        else:
            feed.touch("node", node_id, NODE_INTERVAL_S, lambda: self._node_shown(node_id))
        self._show_models()

    def _node_shown(self, node_id: str) -> tuple[Any, Audience] | None:
        node = self.t.roster.state.nodes.get(node_id)
        return None if node is None else (self._node(node), Audience())

    def _show_models(self) -> None:
        """Models follow from nodes: only what differs from what was last shown goes out."""
        default = self.t.shelf.default_id()
        shown = {}
        for model_id in self.t.shelf.models():
            value = self._model(model_id, default)
            shown[model_id] = encoded = encode(value)
            if self._models_shown.get(model_id) != encoded:
                self.t.feed.upsert("model", value, EVERYONE)
        for model_id in self._models_shown.keys() - shown.keys():
            self.t.feed.remove("model", model_id, EVERYONE)
        self._models_shown = shown

    # ------------------------------------------------------------ routing

    async def route_preview(self, request: Request) -> Response:
        require_admin(key_of(request))
        form = await read_form(request, forms.PreviewForm)
        return answer(preview(self.t.shelf, self.t.tuning, self.t.orchestrator.placement, form))

    async def place_preview(self, request: Request) -> Response:
        require_admin(key_of(request))
        form = await read_form(request, forms.PlaceForm)
        return answer(preview_placement(self.t.shelf, self.t.roster, form, self.t.library.model))

    async def get_routing(self, request: Request) -> Response:
        require_admin(key_of(request))
        return answer(self.t.tuning.view())

    async def put_routing(self, request: Request) -> Response:
        require_admin(key_of(request))
        form = await read_form(request, forms.RoutingSettingsForm, needed=True)
        await self.t.tuning.change(form, self.t.shelf.id_of)
        if self.t.feed.watched:
            self._show_models()
        unserved = sorted(name for name in form.models if self.t.shelf.find(name) is None)
        return answer({**self.t.tuning.view(), "unserved": unserved})

    async def statistics(self, request: Request) -> Response:
        require_admin(key_of(request))
        return answer(self.t.experience.view())

    async def make_ticket(self, request: Request) -> Response:
        require_admin(key_of(request))
        return answer(
            signed_ticket(self.t.orchestrator, self.t.shelf, await read_form(request, forms.TicketForm))
        )

    async def invite(self, request: Request) -> Response:
        require_admin(key_of(request))
        form = await read_form(request, forms.InviteForm)
        token, secret = await self.t.books.joins.create(
            "invitation", valid_ms=form.expires_s * 1000, max_uses=form.uses
        )
        host = self.t.settings.advertise or request.url.hostname or self.t.settings.host
        port = request.url.port or (443 if request.url.scheme == "https" else 80)
        link = Invitation(host, port, self.t.books.mesh.id, secret, self._ca()).link()
        return answer(
            {
                "join_link": link,
                "command": f"meshnet node '{link}'",
                "token": secret,
                "expires_ms": token.expires_at,
            }
        )
