"""The event stream's source: numbered upserts and removals, a ring to resume from, bounded outboxes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode
RING = 2_048
CALL_INTERVAL_S = 0.25
NODE_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Audience:
    """Who may see an event: admins always; the key named, or every key."""

    key_id: int | None = None
    everyone: bool = False

    def includes(self, viewer: Viewer) -> bool:
        return viewer.admin or self.everyone or (self.key_id is not None and self.key_id == viewer.key_id)


ADMINS = Audience()
EVERYONE = Audience(everyone=True)


@dataclass(frozen=True, slots=True)
class Numbered:
    number: int
    audience: Audience
    data: bytes
    """The event as it goes out."""


class Viewer:
    """One open event stream. When its outbox overflows it is emptied and a fresh snapshot is due."""

    def __init__(self, size: int, admin: bool, key_id: int | None) -> None:
        self.admin = admin
        self.key_id = key_id
        self.stale = True
        self.sent_at = time.monotonic()
        self._size = size
        self._outbox: deque[bytes] = deque()
        self._ready = asyncio.Event()
        self._ready.set()

    def push(self, data: bytes) -> None:
        if self.stale:
            return
        if len(self._outbox) >= self._size:
            self._outbox.clear()
            self.stale = True
        else:
            self._outbox.append(data)
        self._ready.set()

    async def wait(self, timeout_s: float) -> bool:
        """True when there is something to send; False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return False
        return True

    def take(self) -> bytes:
        """Everything that waits, as one piece."""
        data = b"".join(self._outbox)
        self._outbox.clear()
        self.sent_at = time.monotonic()
        if not self.stale:
            self._ready.clear()
        return data

    def resumed(self, backlog: list[bytes]) -> None:
        """From now on events are pushed; `backlog` comes before them."""
        self.stale = False
        self._outbox.extend(backlog)
        if backlog:
            self._ready.set()
        else:
            self._ready.clear()


class Feed:
    """Publishes changes to viewers. While nobody watches, nothing is encoded and nothing can be resumed."""

    def __init__(self, outbox: int) -> None:
        self._outbox = outbox
        self._number = 0
        self._ring: deque[Numbered] = deque(maxlen=RING)
        self._viewers: set[Viewer] = set()
        self._due: dict[tuple[str, str], Callable[[], tuple[Any, Audience] | None]] = {}
        self._sent_at: dict[tuple[str, str], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def number(self) -> int:
        return self._number

    @property
    def watched(self) -> bool:
        return bool(self._viewers)

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    def open(self, admin: bool, key_id: int | None) -> Viewer:
        viewer = Viewer(self._outbox, admin, key_id)
        self._viewers.add(viewer)
        return viewer

    def close(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers:
            # What happens from here on is not recorded, so nobody can resume across it.
            self._ring.clear()
            self._number += 1
            self._due.clear()
            self._sent_at.clear()

    def resume(self, viewer: Viewer, last: int) -> bool:
        """Goes on after event `last`; False when the ring no longer reaches back that far."""
        reaches = last == self._number or (bool(self._ring) and self._ring[0].number <= last + 1)
        if not reaches or last > self._number:
            return False
        viewer.resumed([e.data for e in self._ring if e.number > last and e.audience.includes(viewer)])
        return True

    def snapshot(self, viewer: Viewer, value: dict[str, Any]) -> bytes:
        """The snapshot event; events after it follow in the viewer's outbox."""
        viewer.take()
        viewer.resumed([])
        value = {**value, "seq": self._number}
        return b"id: %d\nevent: snapshot\ndata: %s\n\n" % (self._number, _encode(value))

    def upsert(self, kind: str, value: Any, audience: Audience) -> None:
        if self._viewers:
            self._publish(b"upsert", {"kind": kind, "value": value}, audience)

    def remove(self, kind: str, item_id: str, audience: Audience) -> None:
        self._due.pop((kind, item_id), None)
        self._sent_at.pop((kind, item_id), None)
        if self._viewers:
            self._publish(b"remove", {"kind": kind, "id": item_id}, audience)

    def touch(
        self,
        kind: str,
        item_id: str,
        interval_s: float,
        view: Callable[[], tuple[Any, Audience] | None],
    ) -> None:
        """An upsert at most every `interval_s` per item; the last state always goes out."""
        if not self._viewers:
            return
        item = (kind, item_id)
        now = asyncio.get_running_loop().time()
        due = self._sent_at.get(item, 0.0) + interval_s
        if due <= now:
            self._send(item, view, now)
            return
        self._due[item] = view
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(due - now, self._flush)

    def _flush(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        soonest = None
        for item in list(self._due):
            interval = CALL_INTERVAL_S if item[0] == "call" else NODE_INTERVAL_S
            due = self._sent_at.get(item, 0.0) + interval
            if due <= now + 0.005:
                self._send(item, self._due.pop(item), now)
            else:
                soonest = due if soonest is None else min(soonest, due)
        if soonest is not None:
            self._timer = asyncio.get_running_loop().call_later(soonest - now, self._flush)

    def _send(
        self, item: tuple[str, str], view: Callable[[], tuple[Any, Audience] | None], now: float
    ) -> None:
        self._due.pop(item, None)
        shown = view()
        if shown is None:
            return
        self._sent_at[item] = now
        self.upsert(item[0], *shown)

    def _publish(self, event: bytes, value: dict[str, Any], audience: Audience) -> None:
        self._number += 1
        data = b"id: %d\nevent: %s\ndata: %s\n\n" % (self._number, event, _encode(value))
        self._ring.append(Numbered(self._number, audience, data))
        for viewer in self._viewers:
            if audience.includes(viewer):
                viewer.push(data)
