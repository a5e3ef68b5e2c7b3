"""The client of a running call: what goes to it, within the time that a reader may take."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from meshnet.protocol.calls import AnyEvent
from meshnet.protocol.errors import ApiError
from meshnet.tracker.patience import rest
from meshnet.tracker.sinks import Sink

log = structlog.get_logger("meshnet.calls")


class StalledReader(Exception):
    """The client has read nothing for too long."""


@dataclass(slots=True)
class Client:
    """A slow reader holds up whoever sends to it, and by that the head; a stalled one is given up."""

    sink: Sink
    stalled_s: float

    def begin(self, events: Sequence[AnyEvent]) -> Coroutine[Any, Any, None] | None:
        """Sends at once; where the client does not keep up, the rest is to be awaited, before anything else.

        That raises StalledReader.
        """
        return self._begin(self.sink.send(events))

    async def keep_alive(self, phase: str, detail: str) -> None:
        """Raises StalledReader."""
        await self._within(self.sink.keep_alive(phase, detail))

    async def last(self, events: Sequence[AnyEvent]) -> None:
        """The end of the answer. A client that is gone or stuck by now changes nothing any more."""
        await self._last(self.sink.send(events))

    async def fail(self, error: ApiError) -> None:
        """The same for an error."""
        await self._last(self.sink.fail(error))

    def _begin(self, sending: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None] | None:
        # Nearly always the client keeps up and this does not wait at all; then it needs no timer either.
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return None
        return self._finish(sending, waits_for)

    async def _within(self, sending: Coroutine[Any, Any, None]) -> None:
        unsent = self._begin(sending)
        if unsent is not None:
            await unsent

    async def _finish(self, sending: Coroutine[Any, Any, None], waits_for: Any) -> None:
        try:
            async with asyncio.timeout(self.stalled_s):
                await rest(sending, waits_for)
        except TimeoutError:
            raise StalledReader(f"the client read nothing for {self.stalled_s:g} s") from None

    async def _last(self, sending: Coroutine[Any, Any, None]) -> None:
        try:
            await self._within(sending)
        except (StalledReader, OSError):
            log.info("the end of a call could not be delivered")
