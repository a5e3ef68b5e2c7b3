"""The way to head nodes: calls, new routes and token counts over their internal HTTP interface."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

import msgspec

from meshnet.protocol.calls import AnyEvent, GenerateCall, Reroute, TokenCount, decode_event
from meshnet.tracker.members import Way
from meshnet.tracker.wireclient import Exchange, TimeUp, WireClient, WireError

MAX_LINE_BYTES = 4 << 20
MAX_ANSWER_BYTES = 1 << 20
ANSWER_S = 30.0

_encode = msgspec.json.Encoder().encode
_decode_count = msgspec.json.Decoder(TokenCount).decode


class HeadError(Exception):
    """A head did not do what it was asked. `status` 0: it could not be reached, or its stream broke."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param


Began = Callable[[Exchange], None]


def _nobody(exchange: Exchange) -> None:
    """Nobody interrupts this one."""


class HeadStream:
    """The events of one attempt. Closing it ends the call on every node."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._rest = b""

    async def read(self, deadline: float) -> list[AnyEvent] | None:
        """All events that have arrived, none when the head only says that it is alive; None at the end.

        Raises HeadError when it breaks, TimeUp, and whatever `interrupt` was given.
        """
        while True:
            try:
                data = await self._exchange.read(deadline)
            except WireError as error:
                raise HeadError(0, "unreachable", str(error)) from error
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

    def interrupt(self, why: Exception) -> None:
        """Makes the `read` that waits, or the next one, raise `why`."""
        self._exchange.interrupt(why)

    def close(self) -> None:
        """Ends the attempt: the connection is dropped, which is how a head learns that nobody listens."""
        self._exchange.close()

    def finish(self) -> None:
        """After the last event: the connection goes back to the pool once its end has come."""
        self._exchange.finish()


class Heads:
    """Calls to nodes. Made inside a running event loop."""

    def __init__(self, connect_timeout_s: float, context: Callable[[], ssl.SSLContext] | None = None) -> None:
        """`context`: for nodes that speak TLS."""
        self._client = WireClient(connect_timeout_s, context)

    async def close(self) -> None:
        await self._client.close()

    async def open(
        self, node: Way, call: GenerateCall, deadline: float, began: Began = _nobody
    ) -> HeadStream:
        """Starts an attempt on a head. Raises HeadError and TimeUp.

        `began` is told of the exchange, whose `interrupt` ends the wait for its answer.
        """
        return HeadStream(await self._post(node, "/internal/calls", call, deadline, began))

    async def reroute(
        self, node: Way, call_id: str, reroute: Reroute, deadline: float, began: Began = _nobody
    ) -> None:
        """Gives a running call its new route. Raises HeadError and TimeUp; `began` as above."""
        path = f"/internal/calls/{call_id}/reroute"
        await self._answer(await self._post(node, path, reroute, deadline, began))

    async def tokenize(self, node: Way, call: GenerateCall) -> int:
        """The exact number of prompt tokens. Raises HeadError (400 for what the model's template refuses)."""
        deadline = asyncio.get_running_loop().time() + ANSWER_S
        try:
            exchange = await self._post(node, "/internal/tokenize", call, deadline)
            body = await self._answer(exchange)
        except TimeUp:
            raise HeadError(0, "deadline", f"it counted no tokens within {ANSWER_S:g} s") from None
        try:
            return _decode_count(body).prompt_tokens
        except msgspec.DecodeError as error:
            raise HeadError(0, "bad_event", f"its token count cannot be read: {error}") from error

    async def _post(
        self, node: Way, path: str, asked: GenerateCall | Reroute, deadline: float, began: Began = _nobody
    ) -> Exchange:
        """An exchange whose answer has begun with a good status."""
        body, ticket = _encode(asked), asked.ticket
        exchange: Exchange | None = None
        try:
            exchange = await self._client.post(node.url, path, body, ticket, name=node.name)
            began(exchange)
            try:
                status = await exchange.opened(deadline)
            except WireError:
                # A kept connection that the node has closed meanwhile: nothing came, so ask once more.
                if not (exchange.used and exchange.silent):
                    raise
                exchange = await self._client.post(node.url, path, body, ticket, name=node.name, fresh=True)
                began(exchange)
                status = await exchange.opened(deadline)
        except WireError as error:
            raise HeadError(0, "unreachable", str(error)) from error
        except BaseException:
            if exchange is not None:
                exchange.close()
            raise
        if status >= 300:
            raise _refusal(status, await self._answer(exchange))
        return exchange

    async def _answer(self, exchange: Exchange) -> bytes:
        deadline = asyncio.get_running_loop().time() + ANSWER_S
        try:
            body = await exchange.read_all(MAX_ANSWER_BYTES, deadline)
        except WireError as error:
            raise HeadError(0, "unreachable", str(error)) from error
        except BaseException:
            exchange.close()
            raise
        exchange.finish()
        return body


def _refusal(status: int, body: bytes) -> HeadError:
    """An error answer of a node, in OpenAI's shape where it keeps to it."""
    error: dict[str, Any] = {}
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        decoded = None
    if isinstance(decoded, dict) and isinstance(decoded.get("error"), dict):
        error = decoded["error"]
    message = str(error.get("message") or f"it answered with status {status}")
    param = error.get("param")
    return HeadError(
        status, str(error.get("code") or "refused"), message, param if isinstance(param, str) else None
    )
