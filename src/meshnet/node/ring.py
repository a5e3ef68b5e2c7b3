"""The hidden states a node has sent, kept so that a lost stage can be rebuilt without its predecessors.

One ring per node, bounded in bytes: what was sent longest ago goes first, whichever session it belongs to.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshnet.engine.base import Hidden

DEFAULT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Kept:
    """One step's output as it was computed: its rows at `position`.., what to sample after, its tokens."""

    position: int
    hidden: Hidden
    sample: int
    prefill: bool
    tokens: tuple[int, ...]

    @property
    def rows(self) -> int:
        return int(self.hidden.shape[0])

    @property
    def end(self) -> int:
        return self.position + self.rows


class SentRing:
    """By session number, contiguous runs of kept steps, oldest first."""

    def __init__(self, limit: int = DEFAULT_BYTES) -> None:
        self.limit = limit
        self.bytes = 0
        self._runs: dict[int, deque[Kept]] = {}
        self._order: OrderedDict[tuple[int, int], None] = OrderedDict()
        """(session, end of the step) by time of sending."""

    def add(self, session: int, kept: Kept) -> None:
        """Keeps a step; what the session held from its position on is replaced."""
        self.truncate(session, kept.position)
        run = self._runs.setdefault(session, deque())
        if run and run[-1].end != kept.position:
            self.drop(session)
            run = self._runs.setdefault(session, deque())
        run.append(kept)
        self._order[session, kept.end] = None
        self.bytes += kept.hidden.nbytes
        while self.bytes > self.limit and self._order:
            (owner, _), _ = self._order.popitem(last=False)
            oldest = self._runs[owner]
            self.bytes -= oldest.popleft().hidden.nbytes
            if not oldest:
                del self._runs[owner]

    def covers(self, session: int, first: int, end: int) -> bool:
        """Whether positions first..end-1 are all here, and a kept step begins at `first`."""
        run = self._runs.get(session)
        return run is not None and run[-1].end >= end and any(kept.position == first for kept in run)

    def since(self, session: int, first: int) -> list[Kept]:
        """The steps from position `first` on, in order."""
        return [kept for kept in self._runs.get(session, ()) if kept.position >= first]

    def truncate(self, session: int, position: int) -> None:
        """Forgets what reaches beyond `position`: a prefill chunk as a whole, of drafts those behind it."""
        run = self._runs.get(session)
        while run and run[-1].end > position:
            gone = run.pop()
            self.bytes -= gone.hidden.nbytes
            del self._order[session, gone.end]
            left = position - gone.position
            if left > 0 and not gone.prefill:
                kept = Kept(
                    gone.position, gone.hidden[:left].copy(), min(gone.sample, 1), False, gone.tokens[:left]
                )
                run.append(kept)
                self._order[session, position] = None
                self.bytes += kept.hidden.nbytes
        if run is not None and not run:
            del self._runs[session]

    def share(self, source: int, target: int, end: int) -> None:
        """Lets a fork keep what its source sent below `end`; the bytes count once more."""
        for kept in list(self._runs.get(source, ())):
            if kept.end <= end:
                self.add(target, kept)

    def drop(self, session: int) -> None:
        """Forgets a session."""
        for kept in self._runs.pop(session, ()):
            self.bytes -= kept.hidden.nbytes
            del self._order[session, kept.end]


def merge(steps: Sequence[Kept], rows: int) -> list[Kept]:
    """The steps as they are to be sent again: decode steps in a row become one of up to `rows` rows (as many
    as are proven to give the same bits), prefill chunks stay as they are. Only the last step's token can
    still be unknown, so only after it is sampled."""
    merged: list[Kept] = []
    group: list[Kept] = []

    def close_group() -> None:
        if group:
            hidden = np.concatenate([step.hidden for step in group]) if len(group) > 1 else group[0].hidden
            tokens = tuple(token for step in group for token in step.tokens)
            merged.append(Kept(group[0].position, hidden, 0, False, tokens))
            group.clear()

    for step in steps:
        size = sum(kept.rows for kept in group)
        if step.prefill or size + step.rows > rows:
            close_group()
        if step.prefill:
            merged.append(replace(step, sample=0))
        else:
            group.append(step)
    close_group()
    if merged:
        merged[-1] = replace(merged[-1], sample=steps[-1].sample)
    return merged
