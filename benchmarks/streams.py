"""A light client for many streams at once: time to the first token, and how many events came."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

CONTENT = re.compile(rb'"content": ?"[^"]')


@dataclass(frozen=True)
class Target:
    """An OpenAI endpoint. `base_url` ends in /v1."""

    name: str
    base_url: str
    key: str = ""
    model: str = "fake"

    def request(self, tokens: int) -> bytes:
        parts = urlsplit(self.base_url)
        body = json.dumps(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
                "stream": True,
                "max_tokens": tokens,
            }
        ).encode()
        head = (
            f"POST {parts.path}/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\n"
            f"content-type: application/json\r\naccept: text/event-stream\r\n"
            f"content-length: {len(body)}\r\n"
        )
        if self.key:
            head += f"authorization: Bearer {self.key}\r\n"
        return head.encode() + b"\r\n" + body


@dataclass
class Outcome:
    """One stream. Times in seconds; `error` empty where it ended with [DONE]."""

    first: float = 0.0
    wall: float = 0.0
    events: int = 0
    error: str = ""


@dataclass
class Burst:
    """What one round against one target gave."""

    outcomes: list[Outcome] = field(default_factory=list)
    wall: float = 0.0

    @property
    def firsts(self) -> list[float]:
        """Milliseconds to the first content, of the streams that ended well."""
        return [outcome.first * 1e3 for outcome in self.outcomes if not outcome.error]

    @property
    def events(self) -> int:
        return sum(outcome.events for outcome in self.outcomes)

    def check(self, name: str) -> None:
        """Raises RuntimeError where a stream failed: figures with failures in them say nothing."""
        errors = {outcome.error for outcome in self.outcomes if outcome.error}
        if errors:
            raise RuntimeError(f"{name}: {'; '.join(sorted(errors))}")


class Connection(asyncio.Protocol):
    """One kept-alive connection; one stream at a time, read without parsing more than needed."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Outcome] | None = None
        self._outcome = Outcome()
        self._begun = 0.0
        self._tail = b""
        self._headers = True

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._finish(f"connection closed {exc or ''}".strip())

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def stream(self, request: bytes) -> Outcome:
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._outcome, self._tail, self._headers = Outcome(), b"", True
        self._begun = time.perf_counter()
        self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._headers:
            data = self._tail + data
            if b"\r\n\r\n" not in data:
                self._tail = data
                return
            self._headers = False
            if not data.startswith(b"HTTP/1.1 200"):
                self._finish(data[:300].decode("latin-1"))
                self.close()
                return
            data, self._tail = data.partition(b"\r\n\r\n")[2], b""
        joined = self._tail + data
        outcome = self._outcome
        # The last bytes are looked at again: what is searched for may be cut.
        outcome.events += joined.count(b"data: {") - self._tail.count(b"data: {")
        if not outcome.first and CONTENT.search(joined):
            outcome.first = now - self._begun
        if joined.endswith(b"0\r\n\r\n") and b"data: [DONE]" in joined:
            outcome.wall = now - self._begun
            self._finish("" if outcome.first else "no content")
        self._tail = joined[-64:] if outcome.first else joined[-4096:]

    def _finish(self, error: str) -> None:
        if self._done is not None and not self._done.done():
            self._outcome.error = error
            self._done.set_result(self._outcome)


async def burst(target: Target, streams: int, requests: int, tokens: int, stagger: float) -> Burst:
    """`streams` at once, each `requests` times, each starting at a random moment within `stagger` seconds."""
    parts = urlsplit(target.base_url)
    request = target.request(tokens)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    out = Burst()
    loop = asyncio.get_running_loop()

    async def one() -> None:
        await asyncio.sleep(random.random() * stagger)
        connection: Connection | None = None
        for _ in range(requests):
            if connection is None or not connection.open:
                _, connection = await loop.create_connection(Connection, host, port)
            out.outcomes.append(await connection.stream(request))
        if connection is not None:
            connection.close()

    begin = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(streams)))
    out.wall = time.perf_counter() - begin
    return out
