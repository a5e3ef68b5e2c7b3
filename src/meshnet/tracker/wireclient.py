"""A small HTTP/1.1 client for calls to nodes: kept connections, bodies as they come, waits that can be ended.

A general client costs more per request than everything else that the front door does. This one knows a single
use: POST of JSON to a node of the mesh, and a body that is whole or streamed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httptools

from meshnet.protocol.addresses import bracketed
from meshnet.protocol.calls import TICKET_HEADER

HIGH_WATER = 64 << 10
"""Bytes read ahead of whoever reads the body; beyond them the peer is held back by TCP."""
MAX_IDLE = 256
IDLE_S = 60.0
"""Nodes keep a silent connection for longer (KEEP_ALIVE_S in node/http.py)."""
SPARE_DELAY_S = 0.05
"""So long after the last idle connection was taken another is opened, if none has come back by then."""
_TICKET = TICKET_HEADER.encode("ascii")
TICK_S = 0.1


Key = tuple[str, int, str]
"""Host, port, and the name that the peer must prove to have (empty: none)."""


class WireError(Exception):
    """The peer cannot be reached, its connection broke, or it does not speak HTTP."""


class TimeUp(Exception):
    """Nothing came before the deadline."""


class Exchange(asyncio.Protocol):
    """One connection, one request at a time. Only one method waits at a time; `interrupt` ends that wait."""

    def __init__(self, client: WireClient, key: Key) -> None:
        self._client = client
        self._key = key
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._interrupt: Exception | None = None
        self._error: WireError | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._paused = False
        self._headers = False
        self._complete = False
        self._reusable = False
        self.status = 0
        self.used = False
        """Has waited in the pool, where the peer may have closed it unnoticed."""
        self.deadline = 0.0

    # ------------------------------------------------------------ asyncio's and the parser's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"it does not answer in HTTP: {error}")
            self.close()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.forget(self)
        if not self._complete:
            self._fail("its stream broke off" if self._headers else str(exc or "it closed the connection"))
        self._reusable = False
        self._wake()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._headers = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._size += len(body)
        if self._size > HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self._complete = True
        self._reusable = self._parser.should_keep_alive()

    # ------------------------------------------------------------ one request

    def send(self, head: bytes, body: bytes) -> None:
        """Sends a request; `opened` and `read` give its answer."""
        assert self._transport is not None
        self.status, self._headers, self._complete, self._reusable = 0, False, False, False
        self._body.clear()
        self._size = 0
        self._error = self._interrupt = None
        self._transport.write(b"%s%d\r\n\r\n%s" % (head, len(body), body))

    @property
    def silent(self) -> bool:
        """True while nothing of an answer has come."""
        return not self._headers

    async def opened(self, deadline: float) -> int:
        """The status of the answer. Raises WireError, TimeUp and whatever `interrupt` was given."""
        while not self._headers:
            if self._error is not None:
                raise self._error
            await self._wait(deadline)
        return self.status

    async def read(self, deadline: float) -> bytes:
        """What has come of the body since the last time; empty at its end. Raises as `opened` does."""
        while not self._body:
            if self._complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait(deadline)
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._size = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def read_all(self, limit: int, deadline: float) -> bytes:
        """The whole body. Raises WireError when it is longer than `limit`."""
        parts, size = [], 0
        while data := await self.read(deadline):
            parts.append(data)
            size += len(data)
            if size > limit:
                self.close()
                raise WireError(f"its answer is longer than {limit} bytes")
        return b"".join(parts)

    def interrupt(self, why: Exception) -> None:
        """Ends the wait that is going on, or the next one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(why)
        else:
            self._interrupt = why

    def close(self) -> None:
        """Drops the connection; the peer sees that nobody listens. Safe to call twice."""
        self._reusable = False
        if self._transport is not None:
            self._transport.abort()

    def finish(self) -> None:
        """The answer was read, or nobody wants the rest: the connection goes back to the pool if it can."""
        if self._complete and self._reusable:
            self._client.keep(self._key, self)
        else:
            self.close()

    def expire(self) -> None:
        """Ends the wait that is going on, unless what it waits for has come in the same moment."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeUp())

    async def _wait(self, deadline: float) -> None:
        if self._interrupt is not None:
            why, self._interrupt = self._interrupt, None
            raise why
        self._waiter = self._loop.create_future()
        self.deadline = deadline
        self._client.watch(self)
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._client.unwatch(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, message: str) -> None:
        if self._error is None:
            self._error = WireError(message)


class WireClient:
    """The pool, and the one timer behind all deadlines (which are exact to TICK_S)."""

    def __init__(self, connect_timeout_s: float, context: Callable[[], ssl.SSLContext] | None = None) -> None:
        """With a `context` only https:// is spoken, else only http://."""
        self._connect_timeout_s = connect_timeout_s
        self._context = context
        self._scheme = "http" if context is None else "https"
        self._idle: dict[Key, deque[tuple[float, Exchange]]] = {}
        self._waiting: set[Exchange] = set()
        self._open: set[Exchange] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._targets: dict[str, tuple[str, int, bytes]] = {}
        self._spares: dict[Key, asyncio.TimerHandle | asyncio.Task[None]] = {}

    async def post(
        self,
        base_url: str,
        path: str,
        body: bytes,
        ticket: str,
        *,
        name: str = "",
        fresh: bool = False,
    ) -> Exchange:
        """Sends a request over a kept connection (unless `fresh`) or a new one. Raises WireError.

        `name`: whom the certificate of the peer must be for, with TLS.
        """
        host, port, host_header = self._target(base_url)
        key = (host, port, name)
        exchange = None if fresh else self._take(key)
        if exchange is None:
            exchange = await self._connect(*key)
        if not self._idle.get(key) and key not in self._spares:
            # While calls come faster than connections are free, the next one need not wait for a new one.
            timer = asyncio.get_running_loop().call_later(SPARE_DELAY_S, self._begin_spare, key)
            self._spares[key] = timer
        head = (
            b"POST %s HTTP/1.1\r\nhost: %s\r\n%s: %s\r\ncontent-type: application/json\r\ncontent-length: "
            % (path.encode("ascii"), host_header, _TICKET, ticket.encode("ascii"))
        )
        exchange.send(head, body)
        return exchange

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for spare in self._spares.values():
            spare.cancel()
        for exchange in list(self._open):
            exchange.close()
        await asyncio.sleep(0)

    # ------------------------------------------------------------ for exchanges

    def watch(self, exchange: Exchange) -> None:
        self._waiting.add(exchange)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def unwatch(self, exchange: Exchange) -> None:
        self._waiting.discard(exchange)

    def keep(self, key: Key, exchange: Exchange) -> None:
        exchange.used = True
        idle = self._idle.setdefault(key, deque())
        idle.append((asyncio.get_running_loop().time(), exchange))
        if len(idle) > MAX_IDLE:
            idle.popleft()[1].close()

    def forget(self, exchange: Exchange) -> None:
        self._open.discard(exchange)
        self._waiting.discard(exchange)

    # ------------------------------------------------------------ within

    def _begin_spare(self, key: Key) -> None:
        if self._idle.get(key):
            del self._spares[key]
        else:
            self._spares[key] = asyncio.create_task(self._open_spare(key), name="spare connection")

    async def _open_spare(self, key: Key) -> None:
        try:
            self.keep(key, await self._connect(*key))
        except WireError:
            pass  # whoever needs the peer will say what is wrong with it
        finally:
            del self._spares[key]

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for exchange in [item for item in self._waiting if item.deadline <= now]:
            exchange.expire()
        # Without anybody waiting there is nothing to time; the next wait starts it again.
        self._timer = loop.call_later(TICK_S, self._tick) if self._waiting else None

    def _take(self, key: Key) -> Exchange | None:
        """The connection used last; those idle for too long are closed."""
        idle = self._idle.get(key)
        oldest = asyncio.get_running_loop().time() - IDLE_S
        while idle and idle[0][0] < oldest:
            idle.popleft()[1].close()
        while idle:
            exchange = idle.pop()[1]
            if exchange in self._open:
                return exchange
        return None

    async def _connect(self, host: str, port: int, name: str) -> Exchange:
        loop = asyncio.get_running_loop()
        context = self._context() if self._context is not None else None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, exchange = await loop.create_connection(
                    lambda: Exchange(self, (host, port, name)),
                    host,
                    port,
                    ssl=context,
                    server_hostname=name if context is not None else None,
                )
        except TimeoutError:
            raise WireError(f"no connection to {host}:{port} within {self._connect_timeout_s:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise WireError(
                f"at {host}:{port} answers somebody with another certificate than the node's "
                f"({error.verify_message})"
            ) from error
        except OSError as error:
            raise WireError(f"no connection to {host}:{port}: {error.strerror or error}") from error
        self._open.add(exchange)
        return exchange

    def _target(self, base_url: str) -> tuple[str, int, bytes]:
        found = self._targets.get(base_url)
        if found is None:
            parts: Any = urlsplit(base_url)
            try:
                host, port = parts.hostname or "", parts.port or 80
            except ValueError:
                host, port = "", 0
            if parts.scheme != self._scheme or not host:
                raise WireError(f"{base_url!r} is no address of the form {self._scheme}://HOST:PORT")
            shown = bracketed(host)
            if len(self._targets) > 10_000:
                self._targets.clear()
            found = self._targets[base_url] = (
                host,
                port,
                f"{shown}:{port}".encode("ascii", "replace"),
            )
        return found
