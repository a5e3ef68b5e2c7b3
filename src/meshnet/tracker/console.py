"""The console: a bounded ring of events in memory; a call's progress updates its one entry in place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

Entry = dict[str, Any]


class Console:
    """Entries have a `seq`, by which they are found and updated, in the order in which they came.

    Every addition and every update takes the next number of one counter; `since` answers with all entries
    that were added or changed after a number, so that a poller misses no update in place.
    """

    def __init__(self, size: int, wall_ms: Callable[[], int]) -> None:
        self._size = size
        self._wall_ms = wall_ms
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._touched: dict[int, int] = {}
        self._counter = 0
        self._listeners: list[Callable[[Entry], None]] = []

    def on_entry(self, listener: Callable[[Entry], None]) -> None:
        """`listener(entry)` for each entry added or updated."""
        self._listeners.append(listener)

    def add(
        self, event: str, line: str, *, level: str = "info", call_id: str | None = None, **fields: Any
    ) -> int:
        """Adds an entry and returns its seq; the oldest goes when the ring is full."""
        self._counter += 1
        seq = self._counter
        entry: Entry = {"seq": seq, "ms": self._wall_ms(), "level": level, "event": event, "line": line}
        if call_id is not None:
            entry["call_id"] = call_id
        entry.update(fields)
        self._entries[seq] = entry
        self._touched[seq] = seq
        if len(self._entries) > self._size:
            oldest, _ = self._entries.popitem(last=False)
            del self._touched[oldest]
        self._tell(entry)
        return seq

    def update(self, seq: int, line: str, **fields: Any) -> bool:
        """Changes an entry in place; False when it has left the ring."""
        entry = self._entries.get(seq)
        if entry is None:
            return False
        self._counter += 1
        entry = {**entry, "line": line, "ms": self._wall_ms(), **fields}
        self._entries[seq] = entry
        self._touched[seq] = self._counter
        self._tell(entry)
        return True

    def since(self, number: int, visible: Callable[[Entry], bool]) -> tuple[list[Entry], int]:
        """Entries added or changed after `number`, and the number to ask with next."""
        found = [
            entry for seq, entry in self._entries.items() if self._touched[seq] > number and visible(entry)
        ]
        return found, self._counter

    def _tell(self, entry: Entry) -> None:
        for listener in self._listeners:
            listener(entry)
