"""A node for the tracker's tests: it speaks the real wire (membership, Probe, /internal/calls), computes
nothing. What it answers is scripted; what it was asked is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import msgspec
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from meshnet.protocol import PROTOCOL_VERSION, dataplane_pb2, dataplane_pb2_grpc, membership_pb2_grpc
from meshnet.protocol import membership_pb2 as pb
from meshnet.protocol.calls import (
    EVENTS_MEDIA_TYPE,
    CallError,
    ChoiceEnd,
    Done,
    Event,
    GenerateCall,
    LostNode,
    Opened,
    Prefill,
    Reroute,
    Rerouted,
    Stages,
    StageTimes,
    TokenCount,
    TokenEvent,
    Weighed,
    WeighedToken,
    encode_event,
)
from meshnet.protocol.tickets import Ticket, verify_ticket

decode_call = msgspec.json.Decoder(GenerateCall).decode
decode_reroute = msgspec.json.Decoder(Reroute).decode


@dataclass
class Script:
    """How the node answers calls. Token k of a choice is the text ` tk`, whoever computes it."""

    tokens: int = 8
    interval_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    """Between the last token and the end."""
    prompt_tokens: int = 5
    tokenize_s: float = 0.0
    prefill_steps: int = 0
    prefill_step_s: float = 0.0
    error: CallError | None = None
    refuse_status: int = 0
    probe_error: str = ""
    reason: str = "length"
    by: str = "limit"
    spans: tuple[tuple[int, int], ...] = ()
    end_token: int = -1
    weighs: Callable[[int], WeighedToken] | None = None
    """How the node sees a token of an answer that it is asked to check."""
    compute_ms: float = 5.0
    """Of the whole call, per stage."""
    pad: int = 0
    """Extra characters per token, for slow readers."""


@dataclass
class Seen:
    """One attempt as the node saw it."""

    call: GenerateCall
    ticket: Ticket
    reroutes: list[Reroute] = field(default_factory=list)
    computed: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    rerouted: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Queue[tuple[str, str]] = field(default_factory=asyncio.Queue)
    frozen: bool = False
    says_alive: bool = False
    """While it is frozen."""


class WireNode:
    """`start(grpc_address)` joins; `stop()` leaves in order, `vanish()` as if killed."""

    def __init__(
        self,
        token: str,
        *,
        layers: tuple[int, int] = (0, 29),
        model: str = "toy",
        model_layers: int = 30,
        name: str = "",
        fingerprint: str = "f" * 64,
        entries: tuple[int, ...] = (),
        mid_shard_entry: bool = False,
        slots: int = 8,
        n_ctx: int = 2048,
        decode_ms: float = 1.0,
        engine_version: str = "engine-1",
        numerics_class: str = "class-a",
        template: str = "",
        aliases: tuple[str, ...] = (),
        node_id: str = "",
    ) -> None:
        self.token = token
        self.node_id = node_id or f"node-{uuid.uuid4().hex[:8]}"
        self.name = name or self.node_id
        self.layers = layers
        self.model = model
        self.model_layers = model_layers
        self.fingerprint = fingerprint
        self.entries = entries
        self.mid_shard_entry = mid_shard_entry
        self.slots = slots
        self.n_ctx = n_ctx
        self.decode_ms = decode_ms
        self.prefill_ms = 0.01
        self.engine_version = engine_version
        self.numerics_class = numerics_class
        self.template = template
        self.aliases = aliases
        self.protocol_version = PROTOCOL_VERSION
        self.script = Script()
        self.seen: list[Seen] = []
        self.open_calls: dict[str, Seen] = {}
        self.directives: list[pb.Directive] = []
        self.peers_told: list[pb.Peers] = []
        self.trackers: list[str] = []
        self.refused: pb.Refused | None = None
        self.welcome: pb.Welcome | None = None
        self.credential = ""
        self.mesh_id = ""
        self.boot_id = uuid.uuid4().int >> 66
        self.shard_state = "ready"
        self.waiting_steps = 0
        self.oldest_step_ms = 0.0
        self.progress = 0
        self.probes = 0
        self.beating = True
        self.grpc_address = ""
        self.http_url = ""
        self.outbox: asyncio.Queue[pb.NodeMessage | None] = asyncio.Queue()
        self.ended = asyncio.Event()
        self.in_mesh = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._server: grpc.aio.Server | None = None
        self._channel: grpc.aio.Channel | None = None
        self._runner: web.AppRunner | None = None
        self._stream: Any = None

    # ------------------------------------------------------------ life

    async def start(self, tracker: str) -> WireNode:
        """Listens, joins, and returns once welcomed or refused."""
        await self.listen()
        await self.join(tracker)
        return self

    async def listen(self) -> None:
        self._server = grpc.aio.server()
        dataplane_pb2_grpc.add_DataPlaneServicer_to_server(_DataPlane(self), self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.grpc_address = f"127.0.0.1:{port}"
        app = web.Application()
        app.router.add_post("/internal/calls", self._calls)
        app.router.add_post("/internal/calls/{call}/reroute", self._reroute)
        app.router.add_post("/internal/tokenize", self._tokenize)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.http_url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]

    async def join(self, tracker: str) -> None:
        self.outbox = asyncio.Queue()
        self.ended.clear()
        self.in_mesh.clear()
        self.refused = None
        self._channel = grpc.aio.insecure_channel(tracker)
        stub = membership_pb2_grpc.MembershipStub(self._channel)
        self._stream = stub.Join(self._messages())
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]
        self.outbox.put_nowait(pb.NodeMessage(join=self.join_request()))
        waiting = [asyncio.create_task(self.in_mesh.wait()), asyncio.create_task(self.ended.wait())]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        for task in waiting:
            task.cancel()

    async def leave(self) -> None:
        """Breaks the membership stream as a killed process does; the ports stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._stream is not None:
            self._stream.cancel()
        if self._channel is not None:
            await self._channel.close(0)

    async def vanish(self) -> None:
        """Everything is gone at once, as by SIGKILL."""
        for seen in list(self.open_calls.values()):
            seen.closed.set()
        await self.leave()
        if self._runner is not None:
            for site in list(self._runner.sites):
                await site.stop()
            server = self._runner.server
            assert server is not None
            for connection in list(server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await self._runner.cleanup()
        if self._server is not None:
            await self._server.stop(0)

    async def stop(self) -> None:
        with contextlib.suppress(Exception):
            self.outbox.put_nowait(pb.NodeMessage(leaving=pb.Leaving(reason="test over")))
            await asyncio.sleep(0.02)
        await self.vanish()

    # ------------------------------------------------------------ membership

    def shard(self) -> pb.Shard:
        shard = pb.Shard(
            model=self.model,
            fingerprint=self.fingerprint,
            arch="llama",
            start_layer=self.layers[0],
            end_layer=self.layers[1],
            model_layers=self.model_layers,
            entry_layers=sorted({self.layers[0], *self.entries}),
            mid_shard_entry=self.mid_shard_entry,
            n_slots=self.slots,
            n_ctx=self.n_ctx,
            n_embd=64,
            times=self.times(),
            capacity_score=10.0,
            state=self.shard_state,
            progress=1.0,
            numerics_class=self.numerics_class,
            memory_bytes=1 << 20,
        )
        if self.layers[0] == 0:
            shard.card.CopyFrom(
                pb.ModelCard(
                    name="Toy model",
                    aliases=self.aliases,
                    chat_template=self.template,
                    tools=bool(self.template),
                    n_ctx_train=self.n_ctx,
                    n_vocab=1000,
                    quantisation="F32",
                    bytes=1 << 20,
                )
            )
        return shard

    def times(self) -> pb.Times:
        return pb.Times(
            decode_ms_per_layer=self.decode_ms,
            prefill_ms_per_token_layer=self.prefill_ms,
            embed_ms=0.1,
            output_ms=0.5,
        )

    def join_request(self) -> pb.JoinRequest:
        return pb.JoinRequest(
            protocol_version=self.protocol_version,
            meshnet_version="0.1.0",
            engine_version=self.engine_version,
            node_id=self.node_id,
            name=self.name,
            join_token="" if self.credential else self.token,
            credential=self.credential,
            mesh_id=self.mesh_id,
            http_url=self.http_url,
            grpc_address=self.grpc_address,
            hardware=pb.Hardware(name="Test CPU", os="linux", cores=2, memory_bytes=1 << 34, device="cpu"),
            shards=[self.shard()],
            numerics_class=self.numerics_class,
            memory_limit_bytes=1 << 33,
            memory_free_bytes=1 << 32,
            boot_id=self.boot_id,
        )

    def say(self, message: pb.NodeMessage) -> None:
        self.outbox.put_nowait(message)

    def report(self) -> None:
        self.say(pb.NodeMessage(shards=pb.ShardReport(shards=[self.shard()])))

    def heartbeat(self, sequence: int) -> pb.Heartbeat:
        held = [seen.call.call_id for seen in self.open_calls.values()]
        busy = sum(int(seen.call.request.get("n", 1)) for seen in self.open_calls.values())
        return pb.Heartbeat(
            sequence=sequence,
            latency_ms=self.decode_ms * 10,
            current_load=busy / self.slots,
            shards=[
                pb.ShardHealth(
                    model=self.model,
                    start_layer=self.layers[0],
                    end_layer=self.layers[1],
                    free_slots=max(0, self.slots - busy),
                    free_kv_tokens=max(0, self.slots - busy) * self.n_ctx,
                    times=self.times(),
                    ready=self.shard_state == "ready",
                    sessions=held,
                )
            ],
            progress=self.progress,
            waiting_steps=self.waiting_steps,
            oldest_step_ms=self.oldest_step_ms,
            memory_free_bytes=1 << 32,
        )

    async def _messages(self) -> AsyncIterator[pb.NodeMessage]:
        while (message := await self.outbox.get()) is not None:
            yield message

    async def _read(self) -> None:
        try:
            async for message in self._stream:
                kind = message.WhichOneof("kind")
                if kind == "welcome":
                    self.welcome = message.welcome
                    self.credential = message.welcome.credential
                    self.mesh_id = message.welcome.mesh_id
                    self.in_mesh.set()
                elif kind == "refused":
                    self.refused = message.refused
                elif kind == "ack" and message.ack.trackers:
                    self.trackers = list(message.ack.trackers)
                elif kind == "directive":
                    self.directives.append(message.directive)
                elif kind == "peers":
                    self.peers_told.append(message.peers)
        except grpc.aio.AioRpcError:
            pass
        finally:
            self.ended.set()

    async def _beat(self) -> None:
        await self.in_mesh.wait()
        assert self.welcome is not None
        for sequence in itertools.count(1):
            if self.beating:
                self.say(pb.NodeMessage(heartbeat=self.heartbeat(sequence)))
            await asyncio.sleep(self.welcome.heartbeat_ms / 1000)

    # ------------------------------------------------------------ calls

    def _ticket(self, text: str) -> Ticket:
        assert self.welcome is not None
        key = Ed25519PublicKey.from_public_bytes(self.welcome.ticket_public_key)
        return verify_ticket(text, key, mesh_id=self.welcome.mesh_id, now_ms=0)

    async def _tokenize(self, request: web.Request) -> web.Response:
        call = decode_call(await request.read())
        self._ticket(call.ticket)
        await asyncio.sleep(self.script.tokenize_s)
        return web.Response(body=msgspec.json.encode(TokenCount(self.script.prompt_tokens)))

    async def _reroute(self, request: web.Request) -> web.Response:
        seen = self.open_calls.get(request.match_info["call"])
        if seen is None:
            return web.json_response(
                {"error": {"code": "unknown_call", "message": "no such call"}}, status=404
            )
        reroute = decode_reroute(await request.read())
        seen.ticket = self._ticket(reroute.ticket)
        seen.reroutes.append(reroute)
        seen.rerouted.set()
        return web.json_response({})

    async def _calls(self, request: web.Request) -> web.StreamResponse:
        call = decode_call(await request.read())
        ticket = self._ticket(call.ticket)
        script = self.script
        if script.refuse_status:
            error = {"message": "not now", "type": "server_error", "code": "no_slots", "param": None}
            return web.json_response({"error": error}, status=script.refuse_status)
        seen = Seen(call, ticket)
        self.seen.append(seen)
        self.open_calls[call.call_id] = seen
        response = web.StreamResponse(headers={"content-type": EVENTS_MEDIA_TYPE})
        await response.prepare(request)

        async def emit(*events: Event) -> None:
            await response.write(b"".join(encode_event(event) + b"\n" for event in events) or b"\n")

        try:
            await self._generate(seen, script, emit)
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            seen.closed.set()
            if self.open_calls.get(call.call_id) is seen:
                del self.open_calls[call.call_id]
        return response

    async def _generate(self, seen: Seen, script: Script, emit: Callable[..., Any]) -> None:
        call = seen.call
        n = int(call.request.get("n", 1))
        if script.error is not None:
            await emit(script.error)
            return
        await asyncio.sleep(script.first_s)
        await emit(Opened(script.prompt_tokens, spans=script.spans))
        if call.check:
            weigh = script.weighs or (lambda token: WeighedToken(token, -0.1, -0.1, token, True))
            await emit(Weighed(tuple(map(weigh, call.check))), Done(script.prompt_tokens, 0))
            return
        for step in range(script.prefill_steps):
            await emit(Prefill(step + 1, script.prefill_steps))
            await asyncio.sleep(script.prefill_step_s)
        done = [len(call.resume[c]) if call.resume else 0 for c in range(n)]
        total = min(script.tokens, call.max_tokens)
        while any(done[c] < total for c in range(n) if c not in call.ended):
            await self._hitches(seen, emit)
            for choice in range(n):
                if choice not in call.ended and done[choice] < total:
                    k = done[choice]
                    done[choice] += 1
                    seen.computed += 1
                    self.progress += 1
                    await emit(TokenEvent(choice, (100 + k,), f" t{k}" + "x" * script.pad))
            if script.interval_s:
                await asyncio.sleep(script.interval_s)
        await asyncio.sleep(script.last_s)
        await self._hitches(seen, emit)
        await emit(Stages(self.stage_times(seen, sum(done))))
        ends = [
            ChoiceEnd(c, script.reason, script.by, "", script.end_token)
            for c in range(n)
            if c not in call.ended
        ]
        await emit(*ends, Done(script.prompt_tokens, sum(done)))

    async def _hitches(self, seen: Seen, emit: Callable[..., Any]) -> None:
        while seen.frozen:
            await asyncio.sleep(0.02)
            if seen.says_alive:
                await emit()
        if not seen.lost.empty():
            node_id, code = seen.lost.get_nowait()
            seen.rerouted.clear()
            await emit(LostNode(node_id, code, f"{code} in a test"))
            await seen.rerouted.wait()
            await emit(Rerouted(seen.reroutes[-1].epoch, 3, 1.0))

    def stage_times(self, seen: Seen, tokens: int) -> tuple[StageTimes, ...]:
        return tuple(
            StageTimes(
                s.node_id,
                s.start_layer,
                s.end_layer,
                self.script.compute_ms,
                0.5,
                0.2,
                tokens,
                self.script.prompt_tokens,
                tokens,
            )
            for s in seen.ticket.stages
        )


class _DataPlane(dataplane_pb2_grpc.DataPlaneServicer):  # type: ignore[misc]
    def __init__(self, node: WireNode) -> None:
        self._node = node

    async def Probe(self, request: Any, context: Any) -> dataplane_pb2.ProbeReply:
        self._node.probes += 1
        error = self._node.script.probe_error
        return dataplane_pb2.ProbeReply(ok=not error, ms=1.0, error=error)
