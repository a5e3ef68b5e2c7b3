"""Idle sessions: what a call left in a slot, to be gone on from by the next turn of the same conversation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from meshnet.engine.base import Tokens

LEAST_POSITIONS = 16
"""A shorter prefix is not worth a slot."""

Spans = tuple[tuple[int, int], ...]
"""Half-open ranges of positions that were computed in one engine call each."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A slot that holds `tokens` and serves nobody. `key` keeps the prefixes of accounts apart."""

    shard: int
    slot: int
    start: int
    end: int
    key: str
    tokens: Tokens
    spans: Spans = ()
    """Known at heads only."""
    source: str = ""
    """The session that left it, under the same id on every stage of its route."""


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the longest common beginning."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def whole_spans(spans: Spans, length: int, rows: int) -> int:
    """The most of `length` positions that can be computed again to the same bits: a span of up to `rows`
    positions may be cut anywhere, a longer one ran on another kernel and counts as a whole or not at all."""
    for first, end in spans:
        if first < length < end and end - first > rows:
            return first
    return length


class Prefixes:
    """Idle sessions of a node, least recently left first."""

    def __init__(self) -> None:
        self._idle: OrderedDict[tuple[int, int], Idle] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def count(self, shard: int) -> int:
        """Idle sessions of one shard."""
        return sum(idle.shard == shard for idle in self._idle.values())

    def put(self, idle: Idle) -> None:
        self._idle[idle.shard, idle.slot] = idle

    def take(
        self,
        shard: int,
        start: int,
        end: int,
        key: str,
        tokens: Tokens,
        most: int,
        *,
        rows: int = 0,
        source: str = "",
    ) -> tuple[Idle, int] | None:
        """The idle session that shares the longest beginning with `tokens`, and how long that is, `most` at
        most; it is no longer idle. None where nothing worth going on from is left.

        `rows` as in `whole_spans`. `source`: only what this session left is looked at.
        """
        best: tuple[Idle, int] | None = None
        for idle in self._idle.values():
            if (idle.shard, idle.start, idle.end, idle.key) != (shard, start, end, key):
                continue
            if source and idle.source != source:
                continue
            length = whole_spans(idle.spans, min(common_prefix(idle.tokens, tokens), most), rows)
            if length >= LEAST_POSITIONS and (best is None or length >= best[1]):
                best = (idle, length)
        if best is not None:
            del self._idle[best[0].shard, best[0].slot]
        return best

    def longest(self, shard: int, start: int, end: int, key: str, tokens: Tokens, most: int) -> int:
        """How long a beginning `take` would find."""
        lengths = (
            min(common_prefix(idle.tokens, tokens), most)
            for idle in self._idle.values()
            if (idle.shard, idle.start, idle.end, idle.key) == (shard, start, end, key)
        )
        best = max(lengths, default=0)
        return best if best >= LEAST_POSITIONS else 0

    def evict(self, shard: int) -> Idle | None:
        """Gives up the idle session that was left longest ago."""
        for place, idle in self._idle.items():
            if idle.shard == shard:
                del self._idle[place]
                return idle
        return None

    def drop(self, shard: int) -> Iterable[Idle]:
        """Gives up all of a shard's."""
        gone = [idle for idle in self._idle.values() if idle.shard == shard]
        for idle in gone:
            del self._idle[idle.shard, idle.slot]
        return gone
