"""What every long-running process of ours does: about its parent, and once it has started."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys

PARENT_ENV = "MESHNET_PARENT_PID"
POLL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


def parent_is_gone(expected: int) -> bool:
    """True when the process that started us is no longer our parent."""
    return os.getppid() != expected


async def watch_parent(stop: asyncio.Event) -> None:
    """Sets `stop` when the parent named by MESHNET_PARENT_PID is gone; returns at once without one.

    On Linux the kernel sends SIGTERM as well, so that a busy loop cannot miss it.
    """
    text = os.environ.get(PARENT_ENV, "")
    if not text.isdecimal():
        return
    expected = int(text)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    while not parent_is_gone(expected):
        await asyncio.sleep(POLL_SECONDS)
    stop.set()


def settle() -> None:
    """What is here now stays: each full collection that looked through it would hold all streams up, on a
    tracker for 0.07 s."""
    gc.collect()
    gc.freeze()
