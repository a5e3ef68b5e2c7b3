"""The front door: /v1/chat/completions and /v1/completions, straight on ASGI."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

import structlog

from meshnet.protocol.chunks import AnswerAssembler, ChunkRenderer, Envelope
from meshnet.protocol.errors import ApiError
from meshnet.protocol.openai import ChatRequest, CompletionRequest, parse_chat, parse_completion
from meshnet.tracker.auth import Authenticator, header, require_admin
from meshnet.tracker.bodies import ClientGone, Receive, check_json, read_body
from meshnet.tracker.catalogue import Model
from meshnet.tracker.guarded import PRESENCE, Presence
from meshnet.tracker.orchestrator import Accepted, Orchestrator
from meshnet.tracker.settings import TrackerSettings
from meshnet.tracker.shelf import Shelf
from meshnet.tracker.signing import draw
from meshnet.tracker.sinks import AnswerSink, Header, Send, Sink, StreamSink, send_error

MAX_REQUEST_ID = 128
MAX_FORCED = 64
Kind = Literal["chat", "completion"]
PATHS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}

log = structlog.get_logger("meshnet.door")


class FrontDoor:
    """Takes OpenAI requests in and hands the answer out as it comes."""

    def __init__(
        self,
        settings: TrackerSettings,
        authenticator: Authenticator,
        orchestrator: Orchestrator,
        shelf: Shelf,
    ) -> None:
        self._settings = settings
        self._authenticator = authenticator
        self._orchestrator = orchestrator
        self._shelf = shelf

    async def __call__(self, scope: Any, receive: Receive, send: Send, kind: Kind) -> None:
        """One request. Every refusal has OpenAI's error shape; the connection stays open where it can."""
        request_id = request_id_of(scope)
        headers: list[Header] = [(b"x-request-id", request_id.encode()), *scope.get("meshnet.headers", ())]
        try:
            accepted = await self._accept(scope, receive, send, kind, request_id, headers)
        except ApiError as error:
            self._orchestrator.recorder.metrics.refused.labels(error.code).inc()
            await send_error(send, error, headers)
            return
        except ClientGone:
            return
        await self._run(accepted, scope[PRESENCE])

    async def _accept(
        self, scope: Any, receive: Receive, send: Send, kind: Kind, request_id: str, headers: list[Header]
    ) -> Accepted:
        settings = self._settings
        key = await self._authenticator.key_of(scope)
        check_json(scope)
        body = await read_body(scope, receive, settings.max_body_bytes, settings.body_timeout_s)
        request: ChatRequest | CompletionRequest
        request = parse_chat(body) if kind == "chat" else parse_completion(body)
        forced = forced_nodes(scope)
        if forced:
            require_admin(key)

        def make_sink(call_id: str, model: Model) -> Sink:
            headers.append((b"x-meshnet-call", call_id.encode()))
            return self._sink(send, request, call_id, model, headers)

        return await self._orchestrator.accept(key, request, request_id, make_sink, forced)

    def _sink(
        self,
        send: Send,
        request: ChatRequest | CompletionRequest,
        call_id: str,
        model: Model,
        headers: list[Header],
    ) -> Sink:
        envelope = Envelope(call_id, int(time.time()), model.model_id, f"fp_{model.fingerprint[:12]}")
        tools = isinstance(request, ChatRequest) and bool(request.tools)
        form = self._shelf.tool_format(model) if tools else None
        if request.stream:
            return StreamSink(send, lambda: ChunkRenderer(request, envelope, form), headers)
        return AnswerSink(send, lambda: AnswerAssembler(request, envelope, form), headers)

    async def _run(self, accepted: Accepted, client: Presence) -> None:
        """Runs a call to its end, which comes at once where its client goes away, in whatever phase it is."""

        def gone() -> None:
            self._orchestrator.cancel(accepted.run.order.call_id, "client_gone", "the client went away")

        client.on_gone = gone
        if client.gone:
            # It went while the call was accepted. A call can be ended once it runs.
            asyncio.get_running_loop().call_soon(gone)
        try:
            await self._orchestrator.run(accepted)
        finally:
            client.on_gone = None


def request_id_of(scope: Any) -> str:
    """The client's X-Request-Id where it is usable, else a new one."""
    given = header(scope, b"x-request-id")
    if given and len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable():
        return given
    return f"req-{draw(96):024x}"


def forced_nodes(scope: Any) -> tuple[str, ...]:
    """The nodes of X-Meshnet-Nodes, in order. Raises ApiError (400) for an empty name or too many."""
    value = header(scope, b"x-meshnet-nodes")
    if value is None:
        return ()
    names = tuple(name.strip() for name in value.split(","))
    if not all(names) or len(names) > MAX_FORCED:
        raise ApiError(
            400,
            f"X-Meshnet-Nodes is {value[:100]!r}; it lists 1 to {MAX_FORCED} node names or ids, with commas",
            param="X-Meshnet-Nodes",
        )
    return names
