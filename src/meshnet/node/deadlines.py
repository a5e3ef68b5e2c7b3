"""When a peer is dead: by measured times and signs of progress, never by an open socket. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FLOOR_S = 3.0
CEILING_S = 10.0
MOST_S = 1800.0
"""Whatever a peer says that it needs."""
DECODE_FACTOR = 20.0
PREFILL_FACTOR = 4.0
OPEN_S = 5.0
"""Per stage that has to open."""
POLL_AFTER = 1 / 3
"""Part of a deadline after which a peer is asked for a sign of progress."""
HELLO_S = 3.0
"""Time to connect and to be greeted."""

Verdict = Literal["ok", "poll", "silent", "stuck"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """Seconds without a sign of life, and without progress, after which a peer that owes an answer is dead.

    They differ because a machine that is short of time for computing still answers a question in no time.
    """

    silent: float
    stuck: float


def decode_deadline(decode_ms: float, chunk_ms: float) -> Deadline:
    """For a peer that owes a decode step. `decode_ms`: what a step takes there; `chunk_ms`: a prefill chunk,
    behind which it may have to wait."""
    estimate = (DECODE_FACTOR * decode_ms + PREFILL_FACTOR * chunk_ms) / 1000
    return Deadline(min(max(FLOOR_S, estimate), CEILING_S), CEILING_S)


def prefill_deadline(rows: int, row_ms: float) -> Deadline:
    """For a peer that owes a prefill chunk of `rows` rows."""
    estimate = PREFILL_FACTOR * rows * row_ms / 1000
    return Deadline(min(max(FLOOR_S, estimate), CEILING_S), min(max(CEILING_S, estimate), MOST_S))


def open_deadline(stages: int, chunk_ms: float) -> Deadline:
    """For a peer that has to open a session on `stages` stages, each behind a running chunk."""
    estimate = min(stages * (OPEN_S + PREFILL_FACTOR * chunk_ms / 1000), MOST_S)
    return Deadline(min(estimate, stages * OPEN_S), estimate)


@dataclass(frozen=True, slots=True)
class Owed:
    """Something a peer has to answer."""

    since: float
    deadline: Deadline


def judge(owed: Owed, now: float, heard: float, progressed: float, polled: float) -> Verdict:
    """What to do about the oldest thing that a peer owes.

    `heard`: when anything came from it; `progressed`: when it last answered something or its engine's count
    of steps rose; `polled`: when it was last asked.
    """
    silent = now - max(owed.since, heard)
    if silent > owed.deadline.silent:
        return "silent"
    if now - max(owed.since, progressed) > owed.deadline.stuck:
        return "stuck"
    pause = owed.deadline.silent * POLL_AFTER
    if silent > pause and now - polled > pause:
        return "poll"
    return "ok"
