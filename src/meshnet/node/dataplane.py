"""The gRPC server that other nodes dial: streams of frames, health, probes, echoes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol

import grpc
import numpy as np
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from meshnet.engine.base import EngineError, SamplingParams, Step
from meshnet.node.deadlines import HELLO_S
from meshnet.node.frames import OPTIONS, Message, Outbox, OutboxFull
from meshnet.node.lines import Line, LineServer, remember
from meshnet.node.sessions import Refused, Session, Shard
from meshnet.node.stages import Stages
from meshnet.protocol import PROTOCOL_VERSION
from meshnet.protocol import dataplane_pb2 as pb
from meshnet.protocol.addresses import bracketed
from meshnet.protocol.dataplane_pb2_grpc import DataPlaneServicer, add_DataPlaneServicer_to_server
from meshnet.protocol.keys import name_of
from meshnet.protocol.tls import peer_names

MAX_RPCS = 1024
"""Streams of peers, and their questions, at the same time."""
MAX_OPENING = 256
"""Sessions of one stream that may be opening at the same time."""
MAX_RESULTS = 4096
MAX_ECHO_BYTES = 4 << 20
BUSY_S = 10.0
"""A shard whose slots are all in use answers a probe by its progress: a step done within this time."""
SERVICE = "meshnet.dataplane.DataPlane"

log = structlog.get_logger()


class Results(Protocol):
    """Where tokens of this head's calls go."""

    def expect(self, message: pb.Open, node_id: str) -> None:
        """A tail asks to deliver results of a session. Raises Refused."""

    def take_result(self, session: str, tokens: Any, times: Any) -> None: ...


class Inbound:
    """One stream that a peer dialled; the upstream of the sessions that it opened."""

    def __init__(self, node_id: str, end: Callable[[], object]) -> None:
        self.node_id = node_id
        self.outbox = Outbox()
        self.opening: set[asyncio.Task[None]] = set()
        self.results: dict[str, None] = {}
        """Sessions whose tail this is; the oldest are forgotten."""
        self.ticket = b""
        self.line: Line | None = None
        self._end = end

    def ended(self, why: str) -> None:
        """Its line broke: so does the stream."""
        log.debug("line ended", peer=self.node_id, reason=why)
        self._end()

    def put(self, message: Message) -> None:
        """Queues an answer; a peer that does not read loses its stream."""
        try:
            self.outbox.put(message)
        except OutboxFull as error:
            log.warning("stream ended", peer=self.node_id, reason=str(error))
            self._end()

    def credit(self, session: Session) -> None:
        session.answered = session.done
        self.put(pb.Credit(session=session.id, stage=session.stage, upto=session.done))

    def lost(self, session: Session, node_id: str, code: str, message: str) -> None:
        self.put(
            pb.Lost(session=session.id, stage=session.stage, node_id=node_id, code=code, message=message)
        )


class DataPlane(DataPlaneServicer):  # type: ignore[misc]
    """Implements the service. `mesh_id` may become known, and with it streams possible, after the start."""

    def __init__(
        self,
        node_id: str,
        mesh_id: Callable[[], str],
        stages: Stages,
        results: Results,
        tls: Callable[[], bool] = lambda: False,
    ) -> None:
        """With `tls` a peer is who its certificate says. Where `lines` listens, peers get lines there."""
        self._node_id = node_id
        self._mesh_id = mesh_id
        self._stages = stages
        self._results = results
        self._tls = tls
        self.lines = LineServer()
        self.port = 0
        """That is listened on, known before lines are."""

    def hello(self) -> pb.Hello:
        """The first frame of every stream, both ways."""
        return pb.Hello(node_id=self._node_id, protocol_version=PROTOCOL_VERSION, mesh_id=self._mesh_id())

    async def Exchange(self, _requests: Any, context: Any) -> None:  # noqa: N802
        inbound = await self._greet(context)
        inbound.outbox.put(self._greeting(inbound))
        pump = asyncio.create_task(inbound.outbox.pump(context.write))
        try:
            while (frame := await context.read()) is not grpc.aio.EOF:
                self._take(inbound, frame)
        finally:
            pump.cancel()
            self.lines.forget(inbound.ticket)
            if inbound.line is not None:
                inbound.line.close()
            for task in inbound.opening:
                task.cancel()
            self._stages.upstream_gone(inbound)

    def _greeting(self, inbound: Inbound) -> pb.Hello:
        hello = self.hello()
        if self.lines.port:

            def on(line: Line) -> None:
                inbound.line = line
                line.welcome(lambda frame: self._take(inbound, frame), inbound.ended, inbound.outbox)

            inbound.ticket = self.lines.ticket(on)
            hello.grpc_port, hello.line_port, hello.line_ticket = self.port, self.lines.port, inbound.ticket
        return hello

    async def _greet(self, context: Any) -> Inbound:
        code, problem = grpc.StatusCode.FAILED_PRECONDITION, ""
        try:
            async with asyncio.timeout(HELLO_S):
                first = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no greeting")
        if first is grpc.aio.EOF or not first.HasField("hello"):
            problem = "the first frame of a stream is a hello"
        elif first.hello.protocol_version != PROTOCOL_VERSION:
            problem = (
                f"protocol version {first.hello.protocol_version}, this node speaks {PROTOCOL_VERSION}; "
                "run the same meshnet version on all nodes"
            )
        elif not self._mesh_id():
            code, problem = grpc.StatusCode.UNAVAILABLE, "this node has not joined a mesh yet"
        elif first.hello.mesh_id != self._mesh_id():
            problem = f"a node of mesh {first.hello.mesh_id[:64]}; this one belongs to {self._mesh_id()}"
        elif self._tls() and name_of(first.hello.node_id) not in peer_names(context):
            code = grpc.StatusCode.UNAUTHENTICATED
            problem = f"the certificate on this stream is not that of {first.hello.node_id[:128]}"
        if problem:
            await context.abort(code, problem)
        task = asyncio.current_task()
        assert task is not None
        return Inbound(first.hello.node_id[:128], task.cancel)

    def _take(self, inbound: Inbound, frame: pb.Frame) -> None:
        stages = self._stages
        for open_ in frame.opens:
            self._open(inbound, open_)
        if frame.steps:
            self._run(inbound, frame.steps)
        stages.executor.alone = len(frame.results) == 1 and not frame.steps
        for result in frame.results:
            if result.session in inbound.results:
                self._results.take_result(result.session, result.tokens, result.stages)
        stages.executor.alone = False
        stages.executor.flush()
        for close in frame.closes:
            session = stages.sessions.get((close.session, close.stage))
            if session is not None and session.upstream is inbound:
                stages.close(session.name, close.keep_prefix)
        if frame.poll:
            self._answer_poll(inbound)

    def _open(self, inbound: Inbound, message: pb.Open) -> None:
        answer = pb.Opened(session=message.session[:256], stage=message.stage, node_id=self._node_id)
        if message.fingerprint:
            if len(inbound.opening) >= MAX_OPENING:
                answer.error_code = "busy"
                answer.error = f"more than {MAX_OPENING} sessions open on one stream at the same time"
                inbound.put(answer)
                return
            task = asyncio.create_task(self._open_stage(inbound, message))
            inbound.opening.add(task)
            task.add_done_callback(inbound.opening.discard)
            return
        try:
            self._results.expect(message, inbound.node_id)
        except Refused as refused:
            answer.error_code, answer.error = refused.code, refused.message
        else:
            remember(inbound.results, message.session, None, MAX_RESULTS)
        inbound.put(answer)

    async def _open_stage(self, inbound: Inbound, message: pb.Open) -> None:
        try:
            inbound.put(await self._stages.open(message, inbound))
        except Exception:
            # Whatever it was, it is one session's; the peer must not wait, and the stream must live on.
            log.exception("open failed", session=message.session[:256])
            inbound.put(
                pb.Opened(
                    session=message.session,
                    stage=message.stage,
                    node_id=self._node_id,
                    error_code="internal",
                    error="the node ran into a fault of its own; its log says more",
                )
            )

    def _run(self, inbound: Inbound, steps: Any) -> None:
        works = []
        for step in steps:
            session = self._stages.sessions.get((step.session, step.stage))
            if session is None or session.upstream is not inbound:
                inbound.put(
                    pb.Lost(
                        session=step.session[:256],
                        stage=step.stage,
                        node_id=self._node_id,
                        code="closed",
                        message="there is no such session on this stream",
                    )
                )
                continue
            try:
                work = self._stages.flow.accept(session, step)
            except Refused as refused:
                self._stages.refuse_step(session, refused)
                continue
            if work is not None:
                works.append(work)
        if works:
            self._stages.executor.submit(works)

    def _answer_poll(self, inbound: Inbound) -> None:
        inbound.put(pb.Progress(steps=self._stages.executor.load().steps))
        for session in self._stages.sessions.values():
            if session.upstream is inbound and session.done > session.answered:
                inbound.credit(session)

    async def Health(self, request: pb.HealthRequest, _context: Any) -> pb.HealthReply:  # noqa: N802
        state = self._stages.state.health()
        layers = state.pop("served_layers")
        if request.model:
            layers = [
                [shard.info.first, shard.info.last]
                for shard in self._stages.shards
                if shard.model == request.model.lower()
            ]
        ranges = [pb.LayerRange(first=first, last=last) for first, last in layers]
        return pb.HealthReply(served_layers=ranges, **state)

    async def Probe(self, request: pb.ProbeRequest, _context: Any) -> pb.ProbeReply:  # noqa: N802
        shards = [s for s in self._stages.shards if not request.model or s.model == request.model.lower()]
        if not shards:
            return pb.ProbeReply(ok=False, error=f"no shard of {request.model[:128]!r} is loaded here")
        total = 0.0
        for shard in shards:
            try:
                total += await self._probe(shard)
            except EngineError as error:
                return pb.ProbeReply(ok=False, error=str(error))
        return pb.ProbeReply(ok=True, ms=total)

    async def _probe(self, shard: Shard) -> float:
        """Milliseconds of one decode step through the whole shard. Raises EngineError."""
        if self._stages.executor.full:
            raise EngineError("too much waits for the engine of this node")
        slot = self._stages.spare_slot(shard)
        if slot is None:
            load = self._stages.executor.load()
            if load.oldest_ms > BUSY_S * 1000:
                raise EngineError(f"all slots are in use and no step ended for {load.oldest_ms / 1000:.0f} s")
            return 0.0
        # In one piece on the engine thread: the slot is free before and after, so nobody can have it between.
        return await self._stages.executor.call(lambda: probe_step(shard, slot))

    async def Echo(self, request: pb.EchoMessage, context: Any) -> pb.EchoMessage:  # noqa: N802
        if len(request.payload) > MAX_ECHO_BYTES:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"at most {MAX_ECHO_BYTES} bytes are sent back"
            )
        return request


def probe_step(shard: Shard, slot: int) -> float:
    """Runs one position through a free slot, clears it, and returns the milliseconds. Engine thread."""
    engine, info = shard.engine, shard.info
    sampling = SamplingParams(temperature=0.0) if info.is_tail else None
    engine.open(slot, info.first, info.last, sampling)
    try:
        tokens = hidden = None
        if info.is_head:
            tokens = np.zeros(1, dtype=np.int32)
        else:
            hidden = np.full((1, info.n_embd), 0.01, dtype=np.float32)
        started = time.perf_counter()
        (result,) = engine.run([Step(slot, 0, tokens, hidden, int(info.is_tail))])
        ms = (time.perf_counter() - started) * 1000
        if result.hidden is not None and not np.isfinite(result.hidden).all():
            raise EngineError("the probe gave hidden states that are not finite")
    finally:
        engine.close(slot)
    return ms


class DataPlaneServer:
    """The server's sockets and its standard health service."""

    def __init__(self, servicer: DataPlane) -> None:
        self._servicer = servicer
        options = [*OPTIONS, ("grpc.so_reuseport", 0)]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_RPCS)
        add_DataPlaneServicer_to_server(servicer, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.port = 0

    async def start(self, host: str, port: int, credentials: grpc.ServerCredentials | None = None) -> None:
        """Listens, with TLS where there are credentials. Raises OSError where the port cannot be had."""
        target = f"{bracketed(host)}:{port}"
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(target)
            else:
                self.port = self._server.add_secure_port(target, credentials)
        except RuntimeError as error:
            raise OSError(f"{host}:{port} cannot be listened on") from error
        if self.port == 0:
            raise OSError(f"{host}:{port} cannot be listened on")
        self._servicer.port = self.port
        await self.serving(False)
        await self._server.start()

    async def offer_lines(self, host: str, port: int = 0, context: ssl.SSLContext | None = None) -> None:
        """Peers get direct lines from now on. Raises CannotListen."""
        await self._servicer.lines.start(host, port, context)

    async def serving(self, ready: bool) -> None:
        """What the health service says, of the whole server and of the data plane."""
        status = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self._health.set(name, status.SERVING if ready else status.NOT_SERVING)

    async def stop(self, grace: float) -> None:
        await self._servicer.lines.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await self._server.stop(grace)
