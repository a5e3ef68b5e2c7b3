"""A TCP proxy that makes a link worse: delay, bandwidth, cut, swallow and trickle.

Kernel traffic shaping is not available everywhere; this is one small process-local stand-in. Settings
can be changed while connections run; every test that needs a bad link uses this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass, replace

CHUNK = 64 * 1024
MAX_BUFFERED = 4 * 1024 * 1024
"""Bytes in flight per direction before the proxy stops reading from the sender."""


@dataclass(frozen=True)
class Link:
    """How one direction behaves.

    `delay_s`: added to every byte. `bytes_per_s`: serialisation rate, 0 for unlimited. `swallow`:
    accepts everything and passes nothing on. `trickle`: one byte at a time, every `trickle_s`.
    """

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    swallow: bool = False
    trickle_s: float = 0.0


class Proxy:
    """Listens on 127.0.0.1 and forwards to one target. Use as `async with Proxy(host, port) as p`."""

    def __init__(self, host: str, port: int, *, link: Link | None = None) -> None:
        self.target = (host, port)
        self.up = self.down = link or Link()
        self.port = 0
        self.connections = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._refuse = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        """Listens; `port` 0 takes a free one."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    def set(self, **changes: float | bool) -> None:
        """Changes both directions, for running and new connections."""
        self.up = replace(self.up, **changes)  # type: ignore[arg-type]
        self.down = replace(self.down, **changes)  # type: ignore[arg-type]

    def cut(self) -> None:
        """Breaks every connection and refuses new ones until `mend`."""
        self._refuse = True
        for writer in list(self._writers):
            writer.transport.abort()

    def mend(self) -> None:
        """Ends a cut or a swallow."""
        self._refuse = False
        self.set(swallow=False)

    async def close(self) -> None:
        """Ends the proxy and every connection through it."""
        self.cut()
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> Proxy:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuse:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            return
        self.connections += 1
        self._writers |= {writer, far_writer}
        pumps = [
            asyncio.ensure_future(self._pump(reader, far_writer, up=True)),
            asyncio.ensure_future(self._pump(far_reader, writer, up=False)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            # A half-closed side may still be answered for a moment.
            await asyncio.wait(pumps, timeout=1.0)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in (writer, far_writer):
                self._writers.discard(end)
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        queue: deque[tuple[float, bytes]] = deque()
        arrived = asyncio.Event()
        room = asyncio.Event()
        room.set()
        buffered = 0
        ended = False
        free_at = 0.0

        async def read() -> None:
            nonlocal buffered, ended, free_at
            while data := await reader.read(CHUNK):
                link = self.up if up else self.down
                now = time.monotonic()
                free_at = max(free_at, now)
                if link.bytes_per_s:
                    free_at += len(data) / link.bytes_per_s
                queue.append((free_at + link.delay_s, data))
                buffered += len(data)
                arrived.set()
                if buffered > MAX_BUFFERED:
                    room.clear()
                    await room.wait()
            ended = True
            arrived.set()

        reading = asyncio.ensure_future(read())
        try:
            while True:
                while not queue:
                    if ended:
                        with contextlib.suppress(OSError):
                            writer.write_eof()
                        return
                    arrived.clear()
                    await arrived.wait()
                due, data = queue.popleft()
                buffered -= len(data)
                if buffered <= MAX_BUFFERED:
                    room.set()
                if (wait := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                await self._forward(writer, data, up=up)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _forward(self, writer: asyncio.StreamWriter, data: bytes, *, up: bool) -> None:
        link = self.up if up else self.down
        if link.swallow:
            return
        if up:
            self.bytes_up += len(data)
        else:
            self.bytes_down += len(data)
        if link.trickle_s:
            for index in range(len(data)):
                writer.write(data[index : index + 1])
                await writer.drain()
                await asyncio.sleep(link.trickle_s)
            return
        writer.write(data)
        await writer.drain()
