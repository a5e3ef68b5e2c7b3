"""Notices that the machine slept, or that its address is another one now."""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.parse
from collections.abc import Callable

LOOK_S = 0.5
SLEPT_S = 3.0
"""Came so late to its look: by now the tracker has given this node up, or soon will."""


def awake_clock() -> float:
    """Seconds of a clock that goes on while the machine sleeps, where the system has one."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)


def what_happened(late_s: float, before: str | None, now: str | None) -> str:
    """Why the line to the tracker must be made anew; empty: nothing happened. None: no network."""
    if before and now and before != now:
        return f"this machine's address is {now} now, it was {before}"
    if late_s >= SLEPT_S:
        return f"this machine slept for {late_s:.0f} s"
    return ""


def own_address(tracker: str) -> str | None:
    """The address by which this machine reaches the tracker; None without a way there. May block."""
    url = urllib.parse.urlsplit(tracker if "//" in tracker else f"http://{tracker}")
    host, port = url.hostname or "127.0.0.1", url.port or 80
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return None


class Whereabouts:
    """`moved(why)` is called when the machine woke or has another address."""

    def __init__(
        self,
        tracker: str,
        moved: Callable[[str], None],
        look: Callable[[str], str | None] = own_address,
        clock: Callable[[], float] = awake_clock,
    ) -> None:
        self._tracker = tracker
        self._moved = moved
        self._look = look
        self._clock = clock
        self._address: str | None = None

    @property
    def address(self) -> str:
        """The last that was known; the host's name before."""
        if self._address is None:
            self._address = self._look(self._tracker)
        return self._address or socket.gethostname()

    async def run(self) -> None:
        last = self._clock()
        while True:
            await asyncio.sleep(LOOK_S)
            late = self._clock() - last - LOOK_S
            found = await asyncio.to_thread(self._look, self._tracker)
            last = self._clock()  # after the look: a slow answer of a name server is no sleep
            why = what_happened(late, self._address, found)
            self._address = found or self._address
            if why:
                self._moved(why)
