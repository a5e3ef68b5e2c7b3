"""Direct lines: the frames of a stream between two nodes over a TCP connection of their own.

The gRPC stream says who the peer is and stays open beside it. In its greeting the answerer names the port of
its lines and a ticket that is good once; the dialler connects there, shows the ticket, and from then on both
send their frames on the line, each as four bytes of length (little endian) and the frame. It saves the turns
of two event loops and of gRPC's threads per frame. Where a line cannot be had (a firewall, a forwarded port),
the frames stay on the gRPC stream. A line that breaks ends the stream.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import TypeVar, cast

import structlog
from google.protobuf.message import DecodeError

from meshnet.listening import listen
from meshnet.node.frames import MAX_MESSAGE_BYTES, Outbox
from meshnet.protocol import dataplane_pb2 as pb

K = TypeVar("K")
V = TypeVar("V")
TICKET_BYTES = 32
LINE_S = 1.0
"""A line stands within this time, or the frames stay on the gRPC stream."""
AGAIN_S = 300.0
"""An address where no line could be had is not tried again so long."""
MAX_NAMED = 256
MAX_STRANGERS = 64
"""Connections that have not shown a ticket yet."""
BUFFER_BYTES = 1 << 20
"""What waits in the connection before the outbox holds back."""
_LENGTH = struct.Struct("<I")
_GREETING = b"\0\0\0\0"
"""The answerer's first bytes, an empty frame: the ticket is good."""

log = structlog.get_logger()


class Line(asyncio.Protocol):
    """One connection. `outbox` writes to it once it stands; `take` gets each frame that comes, `gone` why the
    line has ended, once. Without a `take` (the answerer's end) bytes wait for the ticket to bring one."""

    def __init__(
        self,
        take: Callable[[pb.Frame], None] | None = None,
        gone: Callable[[str], object] | None = None,
        admit: Callable[[Line, bytes], None] | None = None,
    ) -> None:
        self._take = take
        self._gone = gone
        self._admit = admit
        self._outbox: Outbox | None = None
        self._transport: asyncio.Transport | None = None
        self._bytes = bytearray()
        self._why = ""
        self.stands: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stands.add_done_callback(lambda done: done.cancelled() or done.exception())

    # ---------------------------------------------------------------- the event loop's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        waiting = self._bytes
        if not waiting and self._take is not None and len(data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data)
            if length == len(data) - _LENGTH.size:  # one whole frame, as most are
                self._on_frame(data[_LENGTH.size :])
                return
        waiting += data
        if self._admit is not None:
            if len(waiting) < TICKET_BYTES:
                return
            ticket = bytes(waiting[:TICKET_BYTES])
            del waiting[:TICKET_BYTES]
            admit, self._admit = self._admit, None
            admit(self, ticket)
        begin, have = 0, len(waiting)
        while self._take is not None and have - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(waiting, begin)
            if length > MAX_MESSAGE_BYTES:
                self.end(f"a frame of {length} bytes; {MAX_MESSAGE_BYTES} are taken")
                return
            if have - begin - _LENGTH.size < length:
                break
            begin += _LENGTH.size
            frame = bytes(waiting[begin : begin + length])
            begin += length
            self._on_frame(frame)
        del waiting[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(str(exc) if exc else "it closed the line")

    def pause_writing(self) -> None:
        if self._outbox is not None:
            self._outbox.hold(True)

    def resume_writing(self) -> None:
        if self._outbox is not None:
            self._outbox.hold(False)

    # ---------------------------------------------------------------- its owner's calls

    def carry(self, outbox: Outbox) -> None:
        """From now on the outbox's messages go over this line."""
        self._outbox = outbox
        outbox.direct(self._send)

    def welcome(self, take: Callable[[pb.Frame], None], gone: Callable[[str], object], out: Outbox) -> None:
        """The ticket was good: this end of the line is its owner's."""
        self._take, self._gone = take, gone
        assert self._transport is not None
        self._transport.write(_GREETING)
        self.carry(out)

    def show(self, ticket: bytes) -> None:
        """The dialler's first bytes."""
        assert self._transport is not None
        self._transport.write(ticket)

    def watch(self, gone: Callable[[str], object]) -> None:
        """Who hears from now on why the line has ended."""
        self._gone = gone
        if self._why:
            self._ended(self._why)

    def end(self, why: str) -> None:
        """Ends the line; who watches it hears why."""
        if self._transport is not None:
            self._transport.close()
        self._ended(why)

    def close(self) -> None:
        """The same by who watches it: nobody is told. What was written still leaves."""
        self._gone = None
        self.end("closed here")

    # ---------------------------------------------------------------- inner

    def _send(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            if len(frame) < BUFFER_BYTES:
                self._transport.write(_LENGTH.pack(len(frame)) + frame)
            else:
                self._transport.write(_LENGTH.pack(len(frame)))
                self._transport.write(frame)

    def _on_frame(self, data: bytes) -> None:
        if not self.stands.done():
            self.stands.set_result(None)
            if not data:
                return
        assert self._take is not None
        try:
            self._take(pb.Frame.FromString(data))
        except DecodeError:
            self.end("what came is no frame")
        except Exception:
            log.exception("a frame could not be taken")
            self.end("a fault of this node's own; its log says more")

    def _ended(self, why: str) -> None:
        self._why = self._why or why
        self._take = self._admit = None
        self._bytes.clear()
        if not self.stands.done():
            self.stands.set_exception(ConnectionError(why))
        gone, self._gone = self._gone, None
        if gone is not None:
            gone(why)


class LineDialler:
    """The dialler's end: remembers where no line could be had. `context`: for TLS to a node; None where the
    mesh speaks plain."""

    def __init__(
        self, context: Callable[[], ssl.SSLContext | None] = lambda: None, name_of: Callable[[str], str] = str
    ) -> None:
        self._context = context
        self._name_of = name_of
        self._failed: dict[str, float] = {}

    async def dial(
        self, address: str, hello: pb.Hello, take: Callable[[pb.Frame], None], gone: Callable[[str], object]
    ) -> Line | None:
        """A line to who greeted on `address` (HOST:PORT as dialled); None where there is none to be had."""
        host, _, port = address.rpartition(":")
        # Behind a forwarded port there is no saying where the other port leads.
        if not hello.line_port or port != str(hello.grpc_port) or len(hello.line_ticket) != TICKET_BYTES:
            return None
        if self._failed.get(address, -AGAIN_S) + AGAIN_S > time.monotonic():
            return None
        try:
            async with asyncio.timeout(LINE_S):
                line = await self._connect(host.strip("[]"), hello, take)
        except (OSError, TimeoutError) as error:
            remember(self._failed, address, time.monotonic(), MAX_NAMED)
            log.info("no direct line", peer=hello.node_id, at=f"{host}:{hello.line_port}", reason=str(error))
            return None
        line.watch(gone)
        self._failed.pop(address, None)
        return line

    async def _connect(self, host: str, hello: pb.Hello, take: Callable[[pb.Frame], None]) -> Line:
        """A line whose ticket was good. Raises OSError."""
        context = self._context()
        _, line = await asyncio.get_running_loop().create_connection(
            lambda: Line(take),
            host,
            hello.line_port,
            ssl=context,
            server_hostname=self._name_of(hello.node_id) if context else None,
        )
        try:
            line.show(hello.line_ticket)
            await line.stands
        except BaseException:
            line.close()
            raise
        return line


class LineServer:
    """The answerer's end: listens, and gives each line to who made its ticket."""

    def __init__(self) -> None:
        self.port = 0
        self._tickets: dict[bytes, Callable[[Line], None]] = {}
        self._strangers: set[Line] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int = 0, context: ssl.SSLContext | None = None) -> None:
        """Listens. Raises CannotListen."""
        listener = listen(host, port, flag="--line-port")
        self._server = await asyncio.get_running_loop().create_server(
            self._accept, sock=listener, ssl=context
        )
        self.port = listener.getsockname()[1]

    def ticket(self, owner: Callable[[Line], None]) -> bytes:
        """Good once, for whoever is told it on a stream that is proven. The oldest are forgotten."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        remember(self._tickets, ticket, owner, MAX_NAMED)
        return ticket

    def forget(self, ticket: bytes) -> None:
        self._tickets.pop(ticket, None)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for line in list(self._strangers):
            line.end("this node stops")

    def _accept(self) -> Line:
        if len(self._strangers) >= MAX_STRANGERS:
            next(iter(self._strangers)).end("too many connections wait")
        line = Line(gone=lambda _why: self._strangers.discard(line), admit=self._admit)
        self._strangers.add(line)
        asyncio.get_running_loop().call_later(2 * LINE_S, self._too_late, line)
        return line

    def _admit(self, line: Line, ticket: bytes) -> None:
        self._strangers.discard(line)
        owner = self._tickets.pop(ticket, None)
        if owner is None:
            line.end("no such ticket")
        else:
            owner(line)

    def _too_late(self, line: Line) -> None:
        if line in self._strangers:
            line.end("no ticket came")


def remember(known: dict[K, V], key: K, value: V, most: int) -> None:
    """Into a dictionary of at most so many; the oldest go first."""
    known[key] = value
    while len(known) > most:
        del known[next(iter(known))]
