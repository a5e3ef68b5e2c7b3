"""The node's HTTP side: calls from the tracker, OpenAI requests with a ticket, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from meshnet.node.call import Call
from meshnet.node.headcalls import HeadCalls
from meshnet.node.headmodel import HeadModel
from meshnet.node.metrics import CONTENT_TYPE, Metrics
from meshnet.node.sessions import Shard
from meshnet.node.stages import Stages
from meshnet.protocol import calls
from meshnet.protocol.chunks import AnswerAssembler, ChunkRenderer, Envelope
from meshnet.protocol.errors import ApiError
from meshnet.protocol.openai import (
    ChatRequest,
    CompletionRequest,
    Limits,
    parse_chat,
    parse_completion,
)

T = TypeVar("T")
MAX_BODY_BYTES = 16 << 20
MAX_REQUEST_ID = 128
DEFAULT_MAX_TOKENS = 1024
KEEP_ALIVE_S = 75
"""How long a connection may be silent between two requests; trackers keep theirs for less."""

STOPPED = calls.CallError(503, "shutdown", "the node has ended the call")

_decode_call = msgspec.json.Decoder(calls.GenerateCall).decode
_decode_reroute = msgspec.json.Decoder(calls.Reroute).decode
_encode = msgspec.json.Encoder().encode


class EventResponse(Response):
    """A call's events as they come. When the reader goes, the call is cancelled, at once and everywhere."""

    def __init__(
        self,
        heads: HeadCalls,
        call: Call,
        render: Callable[[calls.AnyEvent], bytes],
        media_type: str,
        headers: dict[str, str] | None = None,
        *,
        alive: bytes,
    ) -> None:
        super().__init__(b"", 200, {"cache-control": "no-store", **(headers or {})}, media_type)
        del self.headers["content-length"]
        self._heads = heads
        self._call = call
        self._render = render
        self._alive = alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        listening = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({sending, listening}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            listening.cancel()
            sending.cancel()
            await asyncio.shield(self._heads.cancel(self._call))

    async def _send(self, send: Send) -> None:
        await self._open(send)
        while (events := await self._take()) != []:
            body = self._alive if events is None else b"".join(map(self._render, events))
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _open(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _take(self) -> list[calls.AnyEvent] | None:
        """What has happened, nothing at the end; None after ALIVE_S without anything."""
        try:
            async with asyncio.timeout(calls.ALIVE_S):
                return await self._call.events.take()
        except TimeoutError:
            return None


class ClientStream(EventResponse):
    """The same for a client of its own: an error before the first byte is a status, a lost route is final."""

    async def _send(self, send: Send) -> None:
        opened = final = False
        while not final:
            events = await self._take()
            body = self._alive
            if events is not None:
                said = [_lost_is_final(event) for event in events] or [STOPPED]
                final = isinstance(said[-1], calls.Done | calls.CallError)
                if not opened and isinstance(said[-1], calls.CallError):
                    error = said[-1]
                    self.status_code, self.body = error.status, _as_api_error(error).body()
                    self.headers["content-type"] = "application/json"
                    self.headers["content-length"] = str(len(self.body))
                    await self._open(send)
                    await send({"type": "http.response.body", "body": self.body})
                    return
                body = b"".join(map(self._render, said))
            if body and not opened:
                opened = True
                await self._open(send)
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": not final})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class NodeHttp:
    """The routes. `model_of` gives what a head knows of a shard's model."""

    def __init__(
        self,
        node_id: str,
        stages: Stages,
        heads: HeadCalls,
        metrics: Metrics,
        model_of: Callable[[Shard], HeadModel],
        ready: Callable[[], bool],
        more: Sequence[Route] = (),
    ) -> None:
        """`more` are routes that are served beside these."""
        self._node_id = node_id
        self._stages = stages
        self._heads = heads
        self._metrics = metrics
        self._model_of = model_of
        self._ready = ready
        self._more = list(more)
        self._since = int(time.time())

    def app(self) -> Starlette:
        routes = [
            Route("/healthz", self._health),
            Route("/metrics", self._show_metrics),
            Route("/internal/calls", _guarded(self._start), methods=["POST"]),
            Route("/internal/calls/{call_id}/reroute", _guarded(self._reroute), methods=["POST"]),
            Route("/internal/tokenize", _guarded(self._tokenize), methods=["POST"]),
            Route("/v1/models", _guarded(self._models)),
            Route("/v1/models/{model}", _guarded(self._one_model)),
            Route("/v1/chat/completions", _guarded(self._chat), methods=["POST"]),
            Route("/v1/completions", _guarded(self._complete), methods=["POST"]),
            *self._more,
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _not_here})

    # ---------------------------------------------------------------- open

    async def _health(self, _request: Request) -> Response:
        body = _encode({"ready": self._ready(), **self._stages.state.health()})
        return Response(body, 200 if self._ready() else 503, media_type="application/json")

    async def _show_metrics(self, _request: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    # ---------------------------------------------------------------- for the tracker

    async def _start(self, request: Request) -> Response:
        call = await self._heads.start(await self._asked(request, _decode_call))
        return EventResponse(
            self._heads,
            call,
            lambda event: calls.encode_event(event) + b"\n",
            calls.EVENTS_MEDIA_TYPE,
            alive=b"\n",
        )

    async def _reroute(self, request: Request) -> Response:
        asked = await self._asked(request, _decode_reroute)
        self._heads.reroute(request.path_params["call_id"], asked)
        return Response(status_code=202)

    async def _tokenize(self, request: Request) -> Response:
        count = calls.TokenCount(await self._heads.tokenize(await self._asked(request, _decode_call)))
        return Response(_encode(count), media_type="application/json")

    async def _asked(self, request: Request, decode: Callable[[bytes], T]) -> T:
        """The body of somebody who has a ticket. Raises ApiError; of others nothing is read."""
        self._heads.admit(_ticket(request))
        body = await _body(request)
        try:
            return decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ApiError(400, f"The body cannot be read: {error}", code="invalid_json") from error

    # ---------------------------------------------------------------- for clients with a ticket

    async def _models(self, request: Request) -> Response:
        self._heads.admit(_ticket(request))
        return Response(_encode({"object": "list", "data": self._listed()}), media_type="application/json")

    async def _one_model(self, request: Request) -> Response:
        self._heads.admit(_ticket(request))
        wanted = request.path_params["model"]
        for model in self._listed():
            if model["id"] == wanted.lower():
                return Response(_encode(model), media_type="application/json")
        raise ApiError(404, f"This node has no model '{wanted}'.", code="model_not_found", param="model")

    def _listed(self) -> list[dict[str, Any]]:
        """The models that this node can begin, as OpenAI lists them; `created` is when it started."""
        names = dict.fromkeys(shard.model for shard in self._stages.shards if shard.info.is_head)
        return [
            {"id": name, "object": "model", "created": self._since, "owned_by": self._node_id}
            for name in names
        ]

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, "chat", parse_chat)

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, "completion", parse_completion)

    async def _answer(
        self,
        request: Request,
        kind: str,
        parse: Callable[[bytes, Limits], ChatRequest | CompletionRequest],
    ) -> Response:
        text = _ticket(request)
        ticket, shard = self._heads.admit(text)
        model = self._model_of(shard)
        body = parse(await _body(request), Limits(n_vocab=model.tokenizer.n_vocab))
        if body.model.lower() not in model.names:
            raise ApiError(
                404,
                f"The ticket is for model '{shard.model}', not for '{body.model}'.",
                code="model_not_found",
                param="model",
            )
        asked = calls.GenerateCall(
            call_id=ticket.call_id,
            epoch=ticket.epoch,
            kind=kind,
            model=shard.model,
            request=body.to_request(),
            ticket=text,
            seed=secrets.randbits(63) if body.seed is None else body.seed,
            max_tokens=body.max_tokens or DEFAULT_MAX_TOKENS,
            prefix_key=ticket.call_id,
        )
        call = await self._heads.start(asked, part=True)
        envelope = Envelope(call.call_id, int(time.time()), shard.model, f"fp_{ticket.fingerprint[:12]}")
        headers = {"x-meshnet-call": call.call_id, "x-request-id": _request_id(request)}
        if body.stream:
            renderer = ChunkRenderer(body, envelope, model.tool_format)

            headers["x-accel-buffering"] = "no"
            return ClientStream(
                self._heads, call, renderer.feed, "text/event-stream", headers, alive=b": alive\n\n"
            )
        assembler = AnswerAssembler(body, envelope, model.tool_format)
        listening = asyncio.create_task(_until_gone(request.receive))
        assembling = asyncio.create_task(_assemble(call, assembler))
        try:
            await asyncio.wait({listening, assembling}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()
            assembling.cancel()
            await asyncio.shield(self._heads.cancel(call))
        error = assembler.error
        if error is not None:
            raise _as_api_error(error)
        if not assembler.done:
            raise ApiError(499, "the client went away", code="client_gone")
        return Response(assembler.body(), headers=headers, media_type="application/json")


async def _assemble(call: Call, assembler: AnswerAssembler) -> None:
    while events := await call.events.take():
        for event in events:
            assembler.feed(_lost_is_final(event))
            if assembler.error is not None:
                return


def _lost_is_final(event: calls.AnyEvent) -> calls.AnyEvent:
    """Nobody reroutes a client's own call: a lost node ends it."""
    if isinstance(event, calls.LostNode):
        return calls.CallError(502, "route_lost", f"node {event.node_id} was lost: {event.message}")
    return event


def _as_api_error(error: calls.CallError) -> ApiError:
    return ApiError(error.status, error.message, type=error.type, code=error.code, param=error.param)


def _request_id(request: Request) -> str:
    """The client's, where it is usable, else a new one."""
    given = request.headers.get("x-request-id", "")
    usable = 0 < len(given) <= MAX_REQUEST_ID and given.isascii() and given.isprintable()
    return given if usable else f"req-{secrets.token_hex(12)}"


async def _not_here(request: Request, error: Exception) -> Response:
    """What Starlette refuses, in the shape of all other errors."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        told = ApiError(405, f"{path} does not take {request.method}", code="method_not_allowed")
    else:
        told = ApiError(error.status_code, f"there is nothing at {path}", code="not_found")
    return Response(told.body(), told.status, error.headers, "application/json")


def _guarded(
    handler: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """Errors in OpenAI's shape."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            headers = {}
            if error.retry_after is not None:
                headers["retry-after"] = str(max(1, round(error.retry_after)))
            return Response(error.body(), error.status, headers, "application/json")

    return guarded


def _ticket(request: Request) -> str:
    """The ticket in X-Meshnet-Route, or as the bearer. Raises ApiError."""
    text = request.headers.get(calls.TICKET_HEADER, "")
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if not text and kind.lower() == "bearer":
        text = value.strip()
    if not text:
        raise ApiError(
            401,
            "A node answers only with a ticket: ask the tracker (POST /api/tickets) and send it in "
            "X-Meshnet-Route or as the bearer token.",
            type="authentication_error",
            code="no_ticket",
        )
    return text


async def _body(request: Request) -> bytes:
    parts = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"The body has more than {MAX_BODY_BYTES} bytes.", code="body_too_large")
        parts.append(part)
    return b"".join(parts)


class _QuietServer(uvicorn.Server):
    """Signals belong to whoever runs the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Runs the app on the loop that gRPC uses, too."""

    def __init__(
        self, app: Starlette, listener: socket.socket, context: ssl.SSLContext | None = None
    ) -> None:
        self._listener = listener
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        config.load()
        config.ssl = context
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="http")

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
