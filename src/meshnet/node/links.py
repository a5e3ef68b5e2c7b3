"""Streams that this node dialled: one per neighbour, shared by all sessions that go there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc
import structlog

from meshnet.node.deadlines import HELLO_S, Deadline, Owed, judge
from meshnet.node.frames import OPTIONS, Message, Outbox, OutboxFull, Traffic
from meshnet.node.lines import Line, LineDialler
from meshnet.protocol import dataplane_pb2 as pb
from meshnet.protocol.dataplane_pb2_grpc import DataPlaneStub
from meshnet.protocol.tls import explained

MONITOR_S = 0.1
STALL_S = 1.0
"""The monitor came late by so much: this process was stopped or starved, and judges nobody by that time."""
IDLE_S = 120.0
"""A stream that no session uses is closed after this long."""

log = structlog.get_logger()

Dial = Callable[[str, str, Sequence[tuple[str, Any]]], grpc.aio.Channel]
"""(address, node id, options) -> a channel on which only that node answers."""
Key = tuple[str, int]
"""(session, stage of the receiver)."""


def dial_plain(address: str, _node_id: str, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
    """Without TLS: whoever answers there."""
    return grpc.aio.insecure_channel(address, options=list(options))


class PeerLost(Exception):
    """A peer cannot be reached or is dead: `node_id` is at fault, `code` as in pb.Lost."""

    def __init__(self, node_id: str, code: str, message: str) -> None:
        super().__init__(message)
        self.node_id = node_id
        self.code = code
        self.message = message


class Receiver(Protocol):
    """Who hears what comes back for one session on a link."""

    def on_credit(self, credit: pb.Credit) -> None: ...

    def on_lost(self, node_id: str, code: str, message: str) -> None: ...


class Link:
    """One dialled stream. Made by `Links`; dead for good once it failed."""

    def __init__(
        self,
        node_id: str,
        address: str,
        hello: pb.Hello,
        forget: Callable[[Link], None],
        traffic: Traffic,
        dial: Dial,
        lines: LineDialler | None,
    ) -> None:
        self.node_id = node_id
        self.address = address
        self.failure: PeerLost | None = None
        self.direct = False
        """Whether its frames go over a line of their own."""
        self.receivers: dict[Key, Receiver] = {}
        self.idle_since = time.monotonic()
        self._hello = hello
        self._forget = forget
        self._dial = dial
        self._lines = lines
        self._outbox = Outbox(traffic)
        self._greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._greeted.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._opening: dict[Key, asyncio.Future[pb.Opened]] = {}
        self._owed: dict[Key, deque[tuple[int, Owed]]] = {}
        self._results: Owed | None = None
        self._heard = self._progressed = self._polled = time.monotonic()
        self._steps = 0
        self._task = asyncio.create_task(self._run(), name=f"link to {node_id}")

    async def ready(self) -> None:
        """Returns when the peer has greeted. Raises PeerLost."""
        await asyncio.shield(self._greeted)

    async def open(self, message: pb.Open, receiver: Receiver, deadline: Deadline) -> pb.Opened:
        """Opens a session there, and all below it. Raises PeerLost; a refusal is in the answer."""
        await self.ready()
        key = (message.session, message.stage)
        future: asyncio.Future[pb.Opened] = asyncio.get_running_loop().create_future()
        self._opening[key] = future
        self.receivers[key] = receiver
        self._owe(key, -1, deadline)
        try:
            self._put(message)
            opened = await future
        except asyncio.CancelledError:
            self.close(pb.Close(session=message.session, stage=message.stage))
            raise
        finally:
            self._opening.pop(key, None)
            self._paid(key, -1)
        if opened.error_code:
            self.leave(key)
        return opened

    def step(self, message: pb.Step, deadline: Deadline) -> None:
        """Sends a step; the peer is dead when it does not answer within `deadline`."""
        self._owe((message.session, message.stage), message.sequence, deadline)
        self._put(message)

    def result(self, message: pb.Result, deadline: Deadline) -> None:
        """Sends what the tail sampled."""
        if self._results is None:
            self._results = Owed(time.monotonic(), deadline)
        self._put(message)

    def close(self, message: pb.Close) -> None:
        """Closes a session there and forgets it here."""
        self.leave((message.session, message.stage))
        with contextlib.suppress(PeerLost):
            self._put(message)

    def leave(self, key: Key) -> None:
        """Stops listening for a session and waiting for its answers."""
        self.receivers.pop(key, None)
        self._owed.pop(key, None)
        future = self._opening.pop(key, None)
        if future is not None and not future.done():
            future.set_exception(PeerLost(self.node_id, "closed", f"{self.node_id} closed the session"))
        if not self.receivers:
            self.idle_since = time.monotonic()

    def answered(self, key: Key, upto: int) -> None:
        """All steps of a session with a sequence below `upto` are done there, as something else proves."""
        owed = self._owed.get(key)
        while owed and 0 <= owed[0][0] < upto:
            owed.popleft()
            self._progressed = time.monotonic()
        if owed is not None and not owed:
            self._owed.pop(key, None)

    def fail(self, code: str, message: str) -> None:
        """Gives the peer up; every session on the link is told once."""
        if self.failure is not None:
            return
        self.failure = PeerLost(self.node_id, code, message)
        self._forget(self)
        self._task.cancel()
        if not self._greeted.done():
            self._greeted.set_exception(self.failure)
        for future in list(self._opening.values()):
            if not future.done():
                future.set_exception(self.failure)
        receivers, self.receivers = list(self.receivers.items()), {}
        opening = set(self._opening)
        self._owed.clear()
        for key, receiver in receivers:
            if key not in opening:
                receiver.on_lost(self.node_id, code, message)

    def inspect(self, now: float) -> None:
        """Called a few times a second: polls a silent peer, gives up a dead one."""
        if self.failure is not None:
            return
        owed = [waiting[0][1] for waiting in self._owed.values()]
        if self._results is not None:
            owed.append(self._results)
        verdicts = {judge(each, now, self._heard, self._progressed, self._polled) for each in owed}
        where = f"{self.node_id} at {self.address}"
        if "silent" in verdicts:
            self.fail("deadline", f"{where} said nothing for {now - self._heard:.1f} s")
        elif "stuck" in verdicts:
            self.fail("deadline", f"{where} made no progress for {now - self._progressed:.1f} s")
        elif "poll" in verdicts:
            self._polled = now
            self._outbox.poll()

    def flush(self) -> None:
        """Lets what was put leave now, where it can."""
        self._outbox.flush()

    def rested(self, now: float) -> None:
        """This process itself stood still: what peers owe counts from now."""
        self._heard = self._progressed = now

    async def stop(self) -> None:
        """Ends the stream."""
        self.fail("closed", "this node closes the stream")
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    @property
    def idle(self) -> bool:
        return not self.receivers and not self._opening and self._greeted.done()

    def _owe(self, key: Key, sequence: int, deadline: Deadline) -> None:
        self._owed.setdefault(key, deque()).append((sequence, Owed(time.monotonic(), deadline)))

    def _paid(self, key: Key, sequence: int) -> None:
        owed = self._owed.get(key)
        if owed and owed[0][0] == sequence:
            owed.popleft()
            self._progressed = time.monotonic()
            if not owed:
                self._owed.pop(key, None)

    def _put(self, message: Message) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            self._outbox.put(message)
        except OutboxFull as error:
            self.fail("deadline", f"{self.node_id} at {self.address} does not read: {error}")
            raise self.failure or PeerLost(self.node_id, "deadline", str(error)) from error

    async def _run(self) -> None:
        where = f"{self.node_id} at {self.address}"
        line: Line | None = None
        try:
            async with self._dial(self.address, self.node_id, OPTIONS) as channel:
                call = DataPlaneStub(channel).Exchange()
                self._outbox.put(self._hello)
                pump = asyncio.create_task(self._outbox.pump(call.write))
                try:
                    async with asyncio.timeout(HELLO_S):
                        first = await call.read()
                    if first is grpc.aio.EOF or not first.HasField("hello"):
                        raise _Ended(f"{where} does not speak this protocol")
                    if first.hello.node_id != self.node_id:
                        raise _Ended(f"at {self.address} answers {first.hello.node_id}, not {self.node_id}")
                    if self._lines is not None:
                        line = await self._lines.dial(self.address, first.hello, self._take, self._line_ended)
                    if line is not None:
                        line.carry(self._outbox)
                    self.direct = line is not None
                    if not self._greeted.done():
                        self._greeted.set_result(None)
                    while (frame := await call.read()) is not grpc.aio.EOF:
                        self._take(frame)
                finally:
                    pump.cancel()
                    call.cancel()
                    if line is not None:
                        line.close()
        except TimeoutError:
            self.fail("unreachable", f"cannot reach {where}: no greeting within {HELLO_S:.0f} s")
        except grpc.aio.AioRpcError as error:
            verb = "lost" if self._greeted.done() else "cannot reach"
            self.fail("unreachable", f"{verb} {where}: {explained(error.details() or error.code().name)}")
        except _Ended as error:
            self.fail("refused", str(error))
        else:
            self.fail("unreachable", f"lost {where}: it ended the stream")

    def _line_ended(self, why: str) -> None:
        self.fail("unreachable", f"lost {self.node_id} at {self.address}: {why}")

    def _take(self, frame: pb.Frame) -> None:
        now = self._heard = time.monotonic()
        if frame.HasField("progress"):
            if frame.progress.steps > self._steps:
                self._steps = frame.progress.steps
                self._progressed = now
            if self._results is not None and self._polled >= self._results.since:
                self._results = None
        for opened in frame.opened:
            future = self._opening.get((opened.session, opened.stage))
            if future is not None and not future.done():
                future.set_result(opened)
        for credit in frame.credits:
            key = (credit.session, credit.stage)
            self.answered(key, credit.upto)
            receiver = self.receivers.get(key)
            if receiver is not None:
                receiver.on_credit(credit)
        for lost in frame.lost:
            key = (lost.session, lost.stage)
            receiver = self.receivers.get(key)
            self.leave(key)
            if receiver is not None:
                receiver.on_lost(lost.node_id, lost.code, lost.message)


class _Ended(Exception):
    """The peer is there, and is not what was dialled."""


class Links:
    """All dialled streams of a node; without `lines` their frames stay on gRPC."""

    def __init__(
        self, hello: Callable[[], pb.Hello], dial: Dial = dial_plain, lines: LineDialler | None = None
    ) -> None:
        self.traffic = Traffic()
        self._hello = hello
        self._dial = dial
        self._lines = lines
        self._links: dict[tuple[str, str], Link] = {}
        self._monitor: asyncio.Task[None] | None = None

    def get(self, node_id: str, address: str) -> Link:
        """The stream to a peer, dialled when there is none."""
        if self._monitor is None:
            self._monitor = asyncio.create_task(self._watch(), name="link monitor")
        key = (node_id, address)
        link = self._links.get(key)
        if link is None or link.failure is not None:
            link = self._links[key] = Link(
                node_id, address, self._hello(), self._drop, self.traffic, self._dial, self._lines
            )
        return link

    def __len__(self) -> int:
        return len(self._links)

    @property
    def lines(self) -> int:
        """How many have a direct line."""
        return sum(link.direct for link in self._links.values())

    def forget(self, why: str) -> None:
        """Gives up all streams; they are dialled again when they are needed."""
        for link in list(self._links.values()):
            link.fail("unreachable", why)

    async def stop(self) -> None:
        """Ends all streams."""
        if self._monitor is not None:
            self._monitor.cancel()
        for link in list(self._links.values()):
            await link.stop()

    def _drop(self, link: Link) -> None:
        key = (link.node_id, link.address)
        if self._links.get(key) is link:
            del self._links[key]

    async def _watch(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(MONITOR_S)
            now = time.monotonic()
            stood_still = now - last > STALL_S
            last = now
            for link in list(self._links.values()):
                if stood_still:
                    link.rested(now)
                link.inspect(now)
                if link.idle and now - link.idle_since > IDLE_S:
                    link.fail("closed", "idle")
