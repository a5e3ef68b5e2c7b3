"""One attempt of a call at a head: opens it, reads what comes, gives it new routes. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.protocol.calls import AnyEvent, GenerateCall, Reroute
from meshnet.tracker.heads import HeadError, Heads, HeadStream


class Silent(Exception):
    """Nothing came from the head for `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"nothing came from it for {seconds:.1f} s")


class Disturbed(Exception):
    """`disturb` was called: something else must be looked at first."""


@dataclass(slots=True)
class Attempt:
    """The way to one head. Only one of its methods waits at a time; `disturb` ends that wait."""

    heads: Heads
    http_url: str
    stream: HeadStream | None = None
    _scope: asyncio.Timeout | None = None
    _disturbed: bool = False
    _heard_at: float = 0.0

    def disturb(self) -> None:
        """Makes the method that waits now raise Disturbed, or the next one that will."""
        self._disturbed = True
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def open(self, request: GenerateCall, patience_s: float) -> None:
        """Raises HeadError, Silent and Disturbed."""
        async with self._waiting(patience_s):
            self.stream = await self.heads.open(self.http_url, request)
        self.heard()

    async def reroute(self, call_id: str, request: Reroute, patience_s: float) -> None:
        """Raises HeadError, Silent and Disturbed."""
        async with self._waiting(patience_s):
            await self.heads.reroute(self.http_url, call_id, request)
        self.heard()

    def heard(self) -> None:
        """The head has spoken, or whatever held us up is no fault of its."""
        self._heard_at = asyncio.get_running_loop().time()

    async def read(self, patience_s: float, at_most_s: float) -> Sequence[AnyEvent] | None:
        """The next events, none when the head only says that it is alive; None after `at_most_s`.

        Raises HeadError, Silent and Disturbed.
        """
        assert self.stream is not None
        left = patience_s - (asyncio.get_running_loop().time() - self._heard_at)
        try:
            async with self._waiting(min(left, at_most_s)):
                events = await self.stream.read()
        except Silent:
            if left > at_most_s:
                return None
            raise Silent(patience_s) from None
        if events is None:
            raise HeadError(0, "unreachable", "it ended its stream before the call's end")
        return events

    def finish(self) -> None:
        """After the last event: the connection goes back to the pool."""
        if self.stream is not None:
            self.stream.finish()
            self.stream = None

    def close(self) -> None:
        """Drops the connection, which ends the call on every node. Safe to call twice."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def _waiting(self, seconds: float) -> _Waiting:
        return _Waiting(self, seconds)


class _Waiting:
    """A timeout that can also be cut short by `disturb`."""

    __slots__ = ("_attempt", "_scope", "_seconds")

    def __init__(self, attempt: Attempt, seconds: float) -> None:
        self._attempt = attempt
        self._seconds = seconds
        self._scope = asyncio.timeout(0.0 if attempt._disturbed else seconds)

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        self._attempt._scope = self._scope

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self._attempt._scope = None
        try:
            await self._scope.__aexit__(kind, error, trace)  # type: ignore[arg-type]
        except TimeoutError:
            if self._attempt._disturbed:
                self._attempt._disturbed = False
                raise Disturbed from None
            raise Silent(self._seconds) from None
