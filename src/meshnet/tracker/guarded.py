"""uvicorn's HTTP protocol, with limits on what a slow or greedy peer may hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from meshnet.protocol.errors import error_body

PRESENCE = "meshnet.presence"
_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Busy",
}


class Presence:
    """Whether the peer of a connection is still there; requests find it in their scope under PRESENCE."""

    __slots__ = ("gone", "on_gone")

    def __init__(self) -> None:
        self.gone = False
        self.on_gone: Callable[[], object] | None = None
        """Called once, when the connection is lost; for whoever answers now."""

    def leave(self) -> None:
        self.gone = True
        if self.on_gone is not None:
            self.on_gone()


class GuardedProtocol(HttpToolsProtocol):
    """Subclasses set the limits; see `guarded`."""

    header_timeout_s = 15.0
    max_header_bytes = 64 << 10
    max_connections = 4_096

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True
        self._begun = False
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._presence = Presence()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(503, "too many connections; try again later", "too_many_connections")
            return
        self._limit_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_done()
        super().connection_lost(exc)
        self._presence.leave()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._begun and self._header_timer is None:
            # Most headers come in one piece, and need no timer.
            self._limit_headers()
        if self._in_headers and self._header_bytes > self.max_header_bytes:
            self._too_large()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[PRESENCE] = self._presence  # type: ignore[literal-required]
        self._begun = True

    def on_headers_complete(self) -> None:
        self._headers_done()
        # What arrives in one piece is complete before it was counted, and a body may come along with it.
        if sum(len(name) + len(value) for name, value in self.headers) > self.max_header_bytes:
            self._too_large()
            return
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers = True
        self._header_bytes = 0

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not an HTTP request", "bad_request")

    def _limit_headers(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout_s, self._too_slow)

    def _headers_done(self) -> None:
        self._in_headers = self._begun = False
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        if not self.transport.is_closing():
            if self._header_bytes:
                self._refuse(408, "the request's headers did not arrive in time", "slow_request")
            else:
                self.transport.close()

    def _too_large(self) -> None:
        if not self.transport.is_closing():
            self._refuse(
                431, f"the request's headers exceed {self.max_header_bytes} bytes", "headers_too_large"
            )

    def _refuse(self, status: int, message: str, code: str) -> None:
        self._headers_done()
        body = error_body(message, "invalid_request_error", code)
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
            status,
            _REASONS[status],
            len(body),
        )
        self.transport.write(head + b"connection: close\r\n\r\n" + body)
        self.transport.close()


def guarded(header_timeout_s: float, max_header_bytes: int, max_connections: int) -> type[GuardedProtocol]:
    """The protocol class with these limits."""
    return type(
        "LimitedProtocol",
        (GuardedProtocol,),
        {
            "header_timeout_s": header_timeout_s,
            "max_header_bytes": max_header_bytes,
            "max_connections": max_connections,
        },
    )
