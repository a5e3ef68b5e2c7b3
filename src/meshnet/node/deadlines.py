"""When a peer is dead: from measured times, never from an open socket. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FLOOR_S = 2.0
DECODE_CEILING_S = 10.0
DECODE_FACTOR = 20.0
PREFILL_FACTOR = 4.0
OPEN_S = 5.0
"""Per stage that has to open."""
POLL_AFTER = 1 / 3
"""Part of a deadline after which a peer is asked for a sign of progress."""
HELLO_S = 3.0
"""Time to connect and to be greeted."""

Verdict = Literal["ok", "poll", "dead"]


def decode_deadline(decode_ms: float, chunk_ms: float) -> float:
    """Seconds without any progress after which a peer that owes a decode step is dead.

    `decode_ms`: what a step takes there; `chunk_ms`: a prefill chunk, behind which it may have to wait.
    """
    return min(max(FLOOR_S, (DECODE_FACTOR * decode_ms + PREFILL_FACTOR * chunk_ms) / 1000), DECODE_CEILING_S)


def prefill_deadline(rows: int, row_ms: float) -> float:
    """The same for a peer that owes a prefill chunk of `rows` rows."""
    return max(FLOOR_S, PREFILL_FACTOR * rows * row_ms / 1000)


@dataclass(frozen=True, slots=True)
class Owed:
    """Something a peer has to answer."""

    since: float
    deadline: float


def open_deadline(stages: int, chunk_ms: float) -> float:
    """The same for a peer that has to open a session on `stages` stages, each behind a running chunk."""
    return stages * (OPEN_S + PREFILL_FACTOR * chunk_ms / 1000)


def judge(owed: Owed, now: float, heard: float, progressed: float, polled: float) -> Verdict:
    """What to do about the oldest thing that a peer owes.

    `heard`: when anything came from it; `progressed`: when it last answered something or its engine's count
    of steps rose; `polled`: when it was last asked.
    """
    silent = now - max(owed.since, progressed)
    if silent > owed.deadline:
        return "dead"
    pause = owed.deadline * POLL_AFTER
    if silent > pause and now - polled > pause:
        return "poll"
    return "ok"
