"""Events of a call on their way to whoever reads its response; bounded, so that a slow reader holds the head
back instead of filling its memory."""

from __future__ import annotations

import asyncio
from collections import deque

from meshnet.protocol.calls import AnyEvent

MAX_EVENTS = 64


class EventQueue:
    """One writer, one reader, on one event loop."""

    def __init__(self, limit: int = MAX_EVENTS) -> None:
        self._limit = limit
        self._events: deque[AnyEvent] = deque()
        self._filled = asyncio.Event()
        self._drained = asyncio.Event()
        self._ended = False

    async def put(self, event: AnyEvent) -> None:
        """Waits while the queue is full."""
        while len(self._events) >= self._limit:
            self._drained.clear()
            await self._drained.wait()
        self._events.append(event)
        self._filled.set()

    def offer(self, event: AnyEvent) -> bool:
        """Puts an event that may be left out; False where the queue is full."""
        if len(self._events) >= self._limit:
            return False
        self._events.append(event)
        self._filled.set()
        return True

    def end(self) -> None:
        """No more events will come."""
        self._ended = True
        self._filled.set()

    async def take(self) -> list[AnyEvent]:
        """All events that wait, at least one; empty at the end."""
        while not self._events and not self._ended:
            self._filled.clear()
            await self._filled.wait()
        events = list(self._events)
        self._events.clear()
        self._drained.set()
        return events
