"""Which trackers share these books, and which of them are gone.

Each tracker raises a counter of its own every BEAT_MS. Another one judges by its own clock how long the
counter has stood still, so no two clocks are ever compared: after LEASE_MS without a beat a tracker counts as
lost and what its calls had reserved is given back. One that was merely asleep beats again and is alive again;
its calls of before stay released.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, delete, insert, select, update

from meshnet.tracker.books import schema
from meshnet.tracker.books.records import BooksError, Clock
from meshnet.tracker.books.storage import Storage

BEAT_MS: Final = 2_000
LEASE_MS: Final = 7_000
REMEMBERED_MS: Final = 7 * 86_400_000
MAX_INFO_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Peer:
    """A live tracker on the same books: `url` is where its HTTP API is, `info` what it last published."""

    id: str
    url: str
    info: dict[str, Any]
    started_at: int


@dataclass(frozen=True, slots=True)
class Sighting:
    """A tracker's counter as last seen, and since when it has stood there by the observer's clock."""

    beats: int
    since: int


def observe(
    seen: Mapping[str, Sighting], beats: Mapping[str, int], now: int, lease_ms: int = LEASE_MS
) -> tuple[dict[str, Sighting], list[str]]:
    """One look at the counters of the others (`beats`). Returns what is seen now, and who is lost."""
    sightings: dict[str, Sighting] = {}
    lost: list[str] = []
    for tracker_id, count in beats.items():
        before = seen.get(tracker_id)
        if before is None or before.beats != count or now < before.since:
            sightings[tracker_id] = Sighting(count, now)
            continue
        sightings[tracker_id] = before
        if now - before.since >= lease_ms:
            lost.append(tracker_id)
    return sightings, lost


class Trackers:
    """This process among the trackers of the mesh."""

    def __init__(self, storage: Storage, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock
        self._seen: dict[str, Sighting] = {}
        self.id: Final = uuid.uuid4().hex
        self._registered = False

    async def register(self, url: str) -> None:
        """Announces this tracker at `url`, and forgets those that ended long ago."""
        now = self._clock()

        def write(connection: Connection) -> None:
            trackers = schema.trackers
            connection.execute(delete(trackers).where(trackers.c.ended_at < now - REMEMBERED_MS))
            connection.execute(
                insert(trackers).values(
                    id=self.id, url=url, info="{}", beats=0, started_at=now, ended_at=None
                )
            )

        await self._storage.write(write)
        self._registered = True

    async def beat(self, info: Mapping[str, Any] | None = None) -> None:
        """Says that this tracker lives; `info` (JSON) replaces what it publishes to its peers."""
        values: dict[str, Any] = {"beats": schema.trackers.c.beats + 1, "ended_at": None}
        if info is not None:
            text = json.dumps(info, separators=(",", ":"))
            if len(text) > MAX_INFO_BYTES:
                raise BooksError(
                    f"info has {len(text)} bytes; at most {MAX_INFO_BYTES} are kept", code="bad_info"
                )
            values["info"] = text
        await self._storage.write(
            lambda connection: connection.execute(
                update(schema.trackers).where(schema.trackers.c.id == self.id).values(**values)
            ),
            durable=False,
        )

    async def end(self) -> None:
        """Says that this tracker has ended of its own accord."""
        if not self._registered:
            return
        self._registered = False
        await self._storage.write(
            lambda connection: connection.execute(
                update(schema.trackers)
                .where(schema.trackers.c.id == self.id)
                .values(ended_at=self._clock(), info="{}")
            )
        )

    async def peers(self) -> list[Peer]:
        """The other trackers that are alive, as far as the books know."""
        trackers = schema.trackers
        rows = await self._storage.read(
            lambda connection: connection.execute(
                select(trackers.c.id, trackers.c.url, trackers.c.info, trackers.c.started_at)
                .where(trackers.c.ended_at.is_(None), trackers.c.id != self.id)
                .order_by(trackers.c.started_at, trackers.c.id)
            ).all()
        )
        return [Peer(row.id, row.url, json.loads(row.info), row.started_at) for row in rows]

    async def lost(self, now: int) -> list[str]:
        """The trackers whose calls must be recovered.

        Lost ones (marked here), and ended ones that left some.
        """
        trackers, calls = schema.trackers, schema.calls

        def read(connection: Connection) -> tuple[dict[str, int], list[str]]:
            alive = connection.execute(
                select(trackers.c.id, trackers.c.beats).where(
                    trackers.c.ended_at.is_(None), trackers.c.id != self.id
                )
            ).all()
            owners = connection.execute(
                select(calls.c.tracker).distinct().where(calls.c.status.in_(["open", "held"]))
            ).scalars()
            return {row[0]: row[1] for row in alive}, list(owners)

        alive, owners = await self._storage.read(read)
        self._seen, silent = observe(self._seen, alive, now)
        gone = [
            tracker_id for tracker_id in silent if await self._mark_lost(tracker_id, alive[tracker_id], now)
        ]
        return sorted({*gone, *(owner for owner in owners if owner not in alive and owner != self.id)})

    async def _mark_lost(self, tracker_id: str, beats: int, now: int) -> bool:
        trackers = schema.trackers

        def write(connection: Connection) -> bool:
            marked = connection.execute(
                update(trackers)
                .where(trackers.c.id == tracker_id, trackers.c.beats == beats, trackers.c.ended_at.is_(None))
                .values(ended_at=now, info="{}")
            )
            return marked.rowcount == 1

        return await self._storage.write(write)
