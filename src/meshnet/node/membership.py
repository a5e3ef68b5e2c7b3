"""The line to the tracker: finds it, joins, sends heartbeats and reports, takes directives, comes back.

A tracker that is not there is tried for ever, at growing pauses of at most 3 seconds; what is loaded stays
loaded meanwhile. Where several trackers share a mesh, each says where the others are, and a node whose
tracker is gone goes to the next: any will do, for they sign with one key and tell each other their nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc
import structlog

from meshnet.node.joininfo import (
    MAX_TRACKERS,
    JoinFailed,
    JoinInfo,
    TrackerGone,
    meant_for,
    read_join_info,
)
from meshnet.protocol import membership_pb2 as pb
from meshnet.protocol.membership_pb2_grpc import MembershipStub
from meshnet.protocol.tls import explained, is_refused_by_tls

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 3.0
WELCOME_S = 5.0
OUTBOX = 256
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.use_local_subchannel_pool", 1),
]

log = structlog.get_logger()


class Side(Protocol):
    """What the membership client asks of the node."""

    def join_request(self, *, with_token: bool) -> pb.JoinRequest: ...

    def heartbeat(self) -> pb.Heartbeat: ...

    def welcomed(self, welcome: pb.Welcome) -> None: ...

    def directed(self, directive: pb.Directive) -> None: ...

    def peers(self, peers: pb.Peers) -> None: ...

    def noticed(self, notice: pb.Notice) -> None: ...

    def serving(self, model: str) -> None: ...

    def other_trackers(self, trackers: tuple[str, ...]) -> None: ...

    async def prepare(self, tracker: str, info: JoinInfo) -> None: ...

    def channel(self, address: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel: ...


_Stream = grpc.aio.StreamStreamCall[pb.NodeMessage, pb.TrackerMessage]


class Membership:
    """`run` is its task; it ends by JoinFailed, by cancellation, or after `leave`."""

    def __init__(
        self,
        tracker: str,
        side: Side,
        *,
        others: Sequence[str] = (),
        retry: bool = True,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`tracker` is the one that the user named, `others` those of its mesh that were known before."""
        self.joined = asyncio.Event()
        """Set while the tracker knows this node."""
        self._named = self._tracker = tracker
        self._others = tuple(others)
        self._trackers = [tracker, *others]
        self._side = side
        self._retry = retry
        self._chance = chance
        self._outbox: asyncio.Queue[pb.NodeMessage] = asyncio.Queue(OUTBOX)
        self._leaving = False
        self._sequence = 0
        self._was_joined = False
        self._renewing: asyncio.Future[str] | None = None
        self._at: tuple[str, JoinInfo] | None = None

    async def run(self) -> None:
        """Keeps the node a member."""
        pause = FIRST_PAUSE_S
        with_token = False
        while not self._leaving:
            was_joined = False
            try:
                await self._visit(with_token=with_token)
            except _Again as again:
                with_token = again.with_token
                if again.with_token:
                    continue
                problem = str(again)
            except _Renewed as renewed:
                problem = str(renewed)
            except TrackerGone as gone:
                problem = str(gone)
                self._try_next()
            except JoinFailed as failed:
                if self._tracker == self._named:
                    raise
                problem = str(failed)
                self._try_next()
            else:
                problem = "the tracker ended the stream"
            was_joined = self.joined.is_set()
            self.joined.clear()
            if self._leaving:
                return
            if not self._retry:
                raise JoinFailed(f"{problem}; it is not tried again because of --no-retry")
            if was_joined:
                pause = FIRST_PAUSE_S
            wait = pause * (0.5 + self._chance() / 2)
            log.warning("no tracker", reason=problem, next_try_s=round(wait, 2))
            await asyncio.sleep(wait)
            pause = min(pause * 1.7, LONGEST_PAUSE_S)

    def renew(self, why: str) -> None:
        """Leaves the stream that is open for a new one, at once."""
        if self._renewing is not None and not self._renewing.done():
            self._renewing.set_result(why)

    def at(self) -> tuple[str, JoinInfo] | None:
        """The tracker that the node is joined to."""
        return self._at if self.joined.is_set() else None

    def _know(self, told: Sequence[str]) -> None:
        """Takes what a tracker says of the mesh's trackers. The one that the user named is kept always."""
        urls = tuple(url.rstrip("/") for url in told[:MAX_TRACKERS] if meant_for(url, self._tracker))
        self._trackers = list(dict.fromkeys([self._tracker, *urls, self._named]))
        if urls and urls != self._others:
            self._others = urls
            self._side.other_trackers(urls)

    def _try_next(self) -> None:
        """The tracker is gone: the next try goes to the next one that it has named."""
        self._trackers.append(self._trackers.pop(0))
        self._tracker = self._trackers[0]

    @property
    def tracker(self) -> str:
        """The URL of the tracker that this node is, or wants to be, a member at."""
        return self._tracker if "//" in self._tracker else f"http://{self._tracker}"

    def send(self, message: pb.NodeMessage) -> bool:
        """Queues a report; False while there is no tracker, or when it does not read."""
        if not self.joined.is_set():
            return False
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            return False
        return True

    async def leave(self, reason: str) -> None:
        """Says good-bye, where there is somebody to say it to, and ends `run`."""
        self._leaving = True
        if self.send(pb.NodeMessage(leaving=pb.Leaving(reason=reason))):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    while not self._outbox.empty():
                        await asyncio.sleep(0.01)
                    await asyncio.sleep(0.05)

    async def _visit(self, *, with_token: bool) -> None:
        info = await asyncio.to_thread(read_join_info, self._tracker)
        mesh_id = self._side.join_request(with_token=False).mesh_id
        if self._tracker != self._named and info.mesh_id != mesh_id:
            raise TrackerGone(f"at {self._tracker} there is the tracker of another mesh")
        try:
            await self._side.prepare(self._tracker, info)
        except JoinFailed as failed:
            if self._was_joined:  # somebody else at the tracker's address does not end a node that works
                raise TrackerGone(str(failed)) from failed
            raise
        async with self._side.channel(info.grpc_address, OPTIONS) as channel:
            call = MembershipStub(channel).Join()
            try:
                await call.write(pb.NodeMessage(join=self._side.join_request(with_token=with_token)))
                try:
                    async with asyncio.timeout(WELCOME_S):
                        first = await call.read()
                except TimeoutError:
                    raise TrackerGone(f"the tracker at {info.grpc_address} does not answer") from None
                if first is grpc.aio.EOF:
                    raise TrackerGone(f"the tracker at {info.grpc_address} closed the stream")
                if first.HasField("refused"):
                    self._refused(first.refused, with_token=with_token)
                if not first.HasField("welcome"):
                    raise JoinFailed(f"the tracker at {self._tracker} does not speak this protocol")
                self._know(info.trackers)
                self._at = self._tracker, info
                await self._stay(call, first.welcome)
            except grpc.aio.AioRpcError as error:
                details = error.details() or error.code().name
                text = f"the tracker at {info.grpc_address}: {explained(details)}"
                if is_refused_by_tls(details) and not self._was_joined:
                    raise JoinFailed(text) from error
                raise TrackerGone(text) from error
            except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:  # a write after the end
                raise TrackerGone(f"the tracker at {info.grpc_address} ended the stream") from error
            finally:
                call.cancel()

    def _refused(self, refused: pb.Refused, *, with_token: bool) -> None:
        text = f"the tracker refuses this node: {refused.message}"
        if refused.remedy:
            text += f"; {refused.remedy}"
        if refused.retry:
            raise _Again(text)
        came_back = not with_token and self._side.join_request(with_token=False).credential
        if came_back and self._side.join_request(with_token=True).join_token:
            raise _Again(text, with_token=True)
        raise JoinFailed(text)

    async def _stay(self, call: _Stream, welcome: pb.Welcome) -> None:
        while not self._outbox.empty():
            self._outbox.get_nowait()
        self._side.welcomed(welcome)
        self.joined.set()
        self._was_joined = True
        heard = asyncio.get_running_loop().time
        last = heard()
        interval = max(welcome.heartbeat_ms, 100) / 1000
        patience = max(3 * welcome.lease_ms / 1000, 3 * interval)
        writer = asyncio.create_task(self._write(call, interval))
        renewing = self._renewing = asyncio.get_running_loop().create_future()
        try:
            while True:
                read = asyncio.ensure_future(call.read())
                done, _ = await asyncio.wait(
                    {read, writer, renewing}, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                )
                if renewing in done:
                    read.cancel()
                    raise _Renewed(renewing.result())
                if writer in done:
                    read.cancel()
                    writer.result()
                if read not in done:
                    read.cancel()
                    raise TrackerGone(f"the tracker said nothing for {heard() - last:.0f} s")
                message = read.result()
                last = heard()
                if not isinstance(message, pb.TrackerMessage):  # the end of the stream
                    return
                self._take(message)
        finally:
            writer.cancel()

    async def _write(self, call: _Stream, interval: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            wait = due - loop.time()
            if wait <= 0:
                beat = self._side.heartbeat()
                self._sequence += 1
                beat.sequence = self._sequence
                await call.write(pb.NodeMessage(heartbeat=beat))
                due = max(due + interval, loop.time())
                continue
            try:
                async with asyncio.timeout(wait):
                    message = await self._outbox.get()
            except TimeoutError:
                continue
            await call.write(message)

    def _take(self, message: pb.TrackerMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "directive":
            self._side.directed(message.directive)
        elif kind == "peers":
            self._side.peers(message.peers)
        elif kind == "notice":
            self._side.noticed(message.notice)
        elif kind == "serving":
            self._side.serving(message.serving.model)
        elif kind == "ack" and message.ack.trackers:
            self._know(list(message.ack.trackers))
        elif kind == "refused":
            self._refused(message.refused, with_token=True)


class _Renewed(Exception):
    """The stream is left for a new one; nothing is wrong with the tracker."""


class _Again(Exception):
    """Try again, with the join token where the credential was refused."""

    def __init__(self, text: str, *, with_token: bool = False) -> None:
        super().__init__(text)
        self.with_token = with_token
