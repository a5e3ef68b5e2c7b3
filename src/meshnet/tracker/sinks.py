"""Where a call's events go: an SSE stream, or one JSON answer. Written straight to ASGI, pre-encoded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from meshnet.protocol.calls import AnyEvent, Done
from meshnet.protocol.chunks import AnswerAssembler, ChunkRenderer, keep_alive
from meshnet.protocol.errors import ApiError

Send = Callable[[Any], Awaitable[None]]
Header = tuple[bytes, bytes]

STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)
JSON = (b"content-type", b"application/json")


class Sink(Protocol):
    """Takes the events of a call in order. `started`: something of the answer has gone out."""

    @property
    def started(self) -> bool: ...

    @property
    def shows(self) -> bool:
        """Whether the client sees tokens as they come."""

    @property
    def sent_bytes(self) -> int: ...

    def prepare(self) -> None:
        """Makes ready what the first events will need, while there is time."""

    async def send(self, events: Sequence[AnyEvent]) -> None: ...

    async def keep_alive(self, phase: str, detail: str) -> None: ...

    async def fail(self, error: ApiError) -> None:
        """An HTTP status before the first byte, an error event after it."""

    def use_model(self, model: str) -> None:
        """The fallback model answers; nothing has been sent yet."""

    def route(self, text: str) -> None:
        """For the header X-Meshnet-Route, while there is still time for one."""


class StreamSink:
    """Server-sent events; what arrived together goes out in one piece."""

    def __init__(self, send: Send, make: Callable[[], ChunkRenderer], headers: list[Header]) -> None:
        self._send = send
        self._make = make
        self._made: ChunkRenderer | None = None
        self._headers = headers
        self._open = False
        self.sent_bytes = 0

    @property
    def _renderer(self) -> ChunkRenderer:
        if self._made is None:
            self._made = self._make()
        return self._made

    def prepare(self) -> None:
        self._made = self._renderer

    @property
    def started(self) -> bool:
        return self._made is not None and self._made.started

    @property
    def shows(self) -> bool:
        return True

    async def send(self, events: Sequence[AnyEvent]) -> None:
        data = b"".join(map(self._renderer.feed, events))
        last = bool(events) and type(events[-1]) is Done
        if data or last:
            await self._write(data, more=not last)

    async def keep_alive(self, phase: str, detail: str) -> None:
        await self._write(keep_alive(phase, detail))

    async def fail(self, error: ApiError) -> None:
        if self._open:
            await self._write(self._renderer.fail(error), more=False)
        else:
            self._open = True
            await send_error(self._send, error, self._headers)

    def use_model(self, model: str) -> None:
        self._renderer.use_model(model)

    def route(self, text: str) -> None:
        _set_route(self._headers, text)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        if not self._open:
            self._open = True
            headers = [*STREAM_HEADERS, *self._headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self.sent_bytes += len(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class AnswerSink:
    """One JSON object at the end, put together from the same events that a stream shows."""

    def __init__(self, send: Send, assemble: Callable[[], AnswerAssembler], headers: list[Header]) -> None:
        self._send = send
        self._assemble = assemble
        self._assembler = assemble()
        self._headers = headers
        self.sent_bytes = 0

    def prepare(self) -> None:
        """All is ready."""

    @property
    def started(self) -> bool:
        return False

    @property
    def shows(self) -> bool:
        return False

    async def send(self, events: Sequence[AnyEvent]) -> None:
        for event in events:
            self._assembler.feed(event)
        if events and type(events[-1]) is Done:
            body = self._assembler.body()
            self.sent_bytes = len(body)
            await send_json(self._send, 200, body, self._headers)

    async def keep_alive(self, phase: str, detail: str) -> None:
        """A JSON answer has no room for comments."""

    async def fail(self, error: ApiError) -> None:
        await send_error(self._send, error, self._headers)

    def use_model(self, model: str) -> None:
        """Begins anew: what another model had said so far was never shown."""
        self._assembler = self._assemble()
        self._assembler.use_model(model)

    def route(self, text: str) -> None:
        _set_route(self._headers, text)


def _set_route(headers: list[Header], text: str) -> None:
    headers[:] = [header for header in headers if header[0] != b"x-meshnet-route"]
    headers.append((b"x-meshnet-route", text.encode("ascii", "replace")))


async def send_json(send: Send, status: int, body: bytes, headers: Sequence[Header] = ()) -> None:
    """A whole JSON answer."""
    length = (b"content-length", str(len(body)).encode())
    no_store = (b"cache-control", b"no-store")
    await send(
        {"type": "http.response.start", "status": status, "headers": [JSON, length, no_store, *headers]}
    )
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError, headers: Sequence[Header] = ()) -> None:
    """An error in OpenAI's shape, with Retry-After where it has one."""
    extra = list(headers)
    if error.retry_after is not None:
        extra.append((b"retry-after", str(max(1, round(error.retry_after))).encode()))
    if error.status == 401:
        extra.append((b"www-authenticate", b"Bearer"))
    await send_json(send, error.status, error.body(), extra)
