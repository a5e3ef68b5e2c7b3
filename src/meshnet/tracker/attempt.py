"""One attempt of a call at a head: opens it, reads what comes, gives it new routes. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.protocol.calls import AnyEvent, GenerateCall, Reroute
from meshnet.tracker.heads import HeadError, Heads, HeadStream
from meshnet.tracker.members import Way
from meshnet.tracker.wireclient import Exchange, TimeUp


class Silent(Exception):
    """Nothing came from the head for `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"nothing came from it for {seconds:.1f} s")


class Disturbed(Exception):
    """`disturb` was called: something else must be looked at first."""


@dataclass(slots=True)
class Attempt:
    """The way to one head. Only one of its methods waits at a time."""

    heads: Heads
    head: Way
    stream: HeadStream | None = None
    _asking: Exchange | None = None
    _disturbed: bool = False
    _heard_at: float = 0.0

    def disturb(self) -> None:
        """Makes the method that waits now raise Disturbed, or else the next `read`."""
        if self._asking is not None:
            self._asking.interrupt(Disturbed())
        elif self.stream is not None:
            self.stream.interrupt(Disturbed())
        else:
            self._disturbed = True

    async def open(self, request: GenerateCall, patience_s: float) -> None:
        """Raises HeadError, Silent and Disturbed."""
        deadline = asyncio.get_running_loop().time() + patience_s
        try:
            self.stream = await self.heads.open(self.head, request, deadline, self._ask)
        except TimeUp:
            raise Silent(patience_s) from None
        finally:
            self._asking = None
        self.heard()

    async def reroute(self, call_id: str, request: Reroute, patience_s: float) -> None:
        """Raises HeadError, Silent and Disturbed."""
        deadline = asyncio.get_running_loop().time() + patience_s
        try:
            await self.heads.reroute(self.head, call_id, request, deadline, self._ask)
        except TimeUp:
            raise Silent(patience_s) from None
        finally:
            self._asking = None
        self.heard()

    def _ask(self, exchange: Exchange) -> None:
        self._asking = exchange
        if self._disturbed:
            self._disturbed = False
            exchange.interrupt(Disturbed())

    def heard(self) -> None:
        """The head has spoken, or whatever held us up is no fault of its."""
        self._heard_at = asyncio.get_running_loop().time()

    async def read(self, patience_s: float, at_most_s: float) -> Sequence[AnyEvent] | None:
        """The next events, none when the head only says that it is alive; None after `at_most_s`.

        Raises HeadError, Silent and Disturbed.
        """
        assert self.stream is not None
        now = asyncio.get_running_loop().time()
        patient_until, until = self._heard_at + patience_s, now + at_most_s
        try:
            events = await self.stream.read(min(patient_until, until))
        except TimeUp:
            if until < patient_until:
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
