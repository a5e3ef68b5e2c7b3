"""The way to head nodes: one pooled HTTP client, events read in batches as they arrive."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from meshnet.protocol.calls import (
    EVENTS_MEDIA_TYPE,
    AnyEvent,
    GenerateCall,
    Reroute,
    TokenCount,
    decode_event,
)

MAX_LINE_BYTES = 4 << 20
READ_BUFFER = 64 << 10
"""Bytes of a stream that are read ahead of a slow reader; beyond them the head is held back by TCP."""

_encode = msgspec.json.Encoder().encode
_decode_count = msgspec.json.Decoder(TokenCount).decode
_HEADERS = {"content-type": "application/json", "accept": EVENTS_MEDIA_TYPE}


class HeadError(Exception):
    """A head did not do what it was asked. `status` 0: it could not be reached, or its stream broke."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param


class HeadStream:
    """The events of one attempt. `read` waits for the next ones; closing it ends the call on every node."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._rest = b""

    async def read(self) -> list[AnyEvent] | None:
        """All events that have arrived, none when the head only says that it is alive; None at the end.

        Raises HeadError when it breaks.
        """
        content = self._response.content
        while True:
            try:
                data = await content.readany()
            except aiohttp.ClientPayloadError as error:
                raise HeadError(0, "unreachable", "its stream broke off") from error
            except (aiohttp.ClientError, OSError) as error:
                raise HeadError(
                    0, "unreachable", f"its stream broke: {error or type(error).__name__}"
                ) from error
            if not data:
                if self._rest:
                    raise HeadError(0, "unreachable", "its stream ended in the middle of an event")
                return None
            if self._rest:
                data = self._rest + data
            end = data.rfind(b"\n")
            if end < 0:
                if len(data) > MAX_LINE_BYTES:
                    raise HeadError(0, "bad_event", f"it sent an event of more than {MAX_LINE_BYTES} bytes")
                self._rest = data
                continue
            self._rest = data[end + 1 :]
            try:
                return [decode_event(line) for line in data[:end].split(b"\n") if line]
            except msgspec.DecodeError as error:
                raise HeadError(0, "bad_event", f"it sent an event that cannot be read: {error}") from error

    def close(self) -> None:
        """Ends the attempt: the connection is dropped, which is how a head learns that nobody listens."""
        self._response.close()

    def finish(self) -> None:
        """After the last event: the connection goes back to the pool."""
        self._response.release()


class Heads:
    """Calls to nodes' internal HTTP interface. Open inside a running event loop."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0, ttl_dns_cache=10),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            auto_decompress=False,
            read_bufsize=READ_BUFFER,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def open(self, http_url: str, call: GenerateCall) -> HeadStream:
        """Starts an attempt on a head. Raises HeadError."""
        response = await self._post(f"{http_url}/internal/calls", _encode(call))
        return HeadStream(response)

    async def reroute(self, http_url: str, call_id: str, reroute: Reroute) -> None:
        """Gives a running call its new route. Raises HeadError."""
        response = await self._post(f"{http_url}/internal/calls/{call_id}/reroute", _encode(reroute))
        await self._read_all(response)

    async def tokenize(self, http_url: str, call: GenerateCall) -> int:
        """The exact number of prompt tokens. Raises HeadError (400 for what the model's template refuses)."""
        response = await self._post(f"{http_url}/internal/tokenize", _encode(call))
        body = await self._read_all(response)
        try:
            return _decode_count(body).prompt_tokens
        except msgspec.DecodeError as error:
            raise HeadError(0, "bad_event", f"its token count cannot be read: {error}") from error

    async def _post(self, url: str, body: bytes) -> aiohttp.ClientResponse:
        try:
            response = await self._session.post(url, data=body, headers=_HEADERS)
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise HeadError(0, "unreachable", f"{error or type(error).__name__}") from error
        if response.status >= 300:
            body = await self._read_all(response)
            raise _refusal(response.status, body)
        return response

    async def _read_all(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            return await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise HeadError(0, "unreachable", f"{error or type(error).__name__}") from error
        finally:
            response.release()


def _refusal(status: int, body: bytes) -> HeadError:
    """An error answer of a node, in OpenAI's shape where it keeps to it."""
    error: dict[str, Any] = {}
    try:
        decoded = msgspec.json.decode(body[:65_536])
    except msgspec.DecodeError:
        decoded = None
    if isinstance(decoded, dict) and isinstance(decoded.get("error"), dict):
        error = decoded["error"]
    message = str(error.get("message") or f"it answered with status {status}")
    param = error.get("param")
    return HeadError(
        status, str(error.get("code") or "refused"), message, param if isinstance(param, str) else None
    )
