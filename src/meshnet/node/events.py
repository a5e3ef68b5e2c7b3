"""Events of a call on their way to whoever reads its response.

Bounded by its writer: a head looks at `full` before it feeds the next step, so that a slow reader holds it
back; only what is on its way already still comes in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from meshnet.protocol.calls import AnyEvent

MAX_EVENTS = 64


class EventQueue:
    """One writer, one reader, on one event loop. `room` is called when a full queue was read."""

    def __init__(self, limit: int = MAX_EVENTS) -> None:
        self.room: Callable[[], None] = lambda: None
        self._limit = limit
        self._events: deque[AnyEvent] = deque()
        self._filled = asyncio.Event()
        self._ended = False

    @property
    def full(self) -> bool:
        """Whether the writer should wait before it causes more events."""
        return len(self._events) >= self._limit

    def put(self, event: AnyEvent) -> None:
        self._events.append(event)
        self._filled.set()

    def end(self) -> None:
        """No more events will come."""
        self._ended = True
        self._filled.set()

    async def take(self) -> list[AnyEvent]:
        """All events that wait, at least one; empty at the end."""
        while not self._events and not self._ended:
            self._filled.clear()
            await self._filled.wait()
        was_full = self.full
        events = list(self._events)
        self._events.clear()
        if was_full:
            self.room()
        return events
