"""Notices changes that another process made to what this one has cached.

Each change to keys, prices, settings or accounts raises a counter in its own transaction. A tracker reads the
counters every POLL_MS and drops what is out of date, so a key revoked through another tracker, or by the
command line, stops working here within STALE_MS; through this process it stops at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from sqlalchemy import Connection, select

from meshnet.tracker.books import schema
from meshnet.tracker.books.records import Clock
from meshnet.tracker.books.storage import Storage, upsert

Topic = Literal["keys", "prices", "settings"]

POLL_MS: Final = 500
STALE_MS: Final = 1_500


def bump(connection: Connection, topic: Topic) -> None:
    """Tells every process that what it cached of `topic` is out of date. Part of the caller's transaction."""
    upsert(
        connection,
        schema.versions,
        [{"topic": topic, "version": 1}],
        add=("version",),
    )


class Watch:
    """The counters as last seen. Whoever caches registers what to do when its topic has changed."""

    def __init__(self, storage: Storage, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock
        self._seen: dict[str, int] = {}
        self._polled_at: int | None = None
        self._listeners: dict[Topic, list[Callable[[], None]]] = {}

    def on_change(self, topic: Topic, listener: Callable[[], None]) -> None:
        """`listener` is called when `topic` was changed, by this process or another."""
        self._listeners.setdefault(topic, []).append(listener)

    def stale(self, now: int) -> bool:
        """True when the counters were last read too long ago to trust a cache."""
        return self._polled_at is None or not 0 <= now - self._polled_at < STALE_MS

    async def poll(self) -> None:
        """Reads the counters and tells the listeners of topics that changed."""
        started = self._clock()
        rows = await self._storage.read(
            lambda connection: connection.execute(
                select(schema.versions.c.topic, schema.versions.c.version)
            ).all()
        )
        for topic, version in rows:
            if self._seen.get(topic) != version:
                self._seen[topic] = version
                self.changed(topic)
        self._polled_at = started

    async def ensure(self) -> None:
        """Reads the counters if they are stale. Costs a comparison while the tracker's housekeeping runs."""
        if self.stale(self._clock()):
            await self.poll()

    def changed(self, topic: Topic) -> None:
        """This process has changed `topic` itself: drop what is cached without waiting for a poll."""
        for listener in self._listeners.get(topic, ()):
            listener()
