"""A limit on failed tries per address, against guessing keys and tokens. Bounded memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MINUTE_S = 60.0
TRACKED = 10_000


class FailedTries:
    """`per_minute` failures in a minute are answered; then the address waits. Success costs nothing."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = per_minute
        self._clock = clock
        self._failures: OrderedDict[str, list[float]] = OrderedDict()

    def wait_s(self, address: str) -> int:
        """Whole seconds that the address must wait; 0 when it may try."""
        times = self._failures.get(address)
        if times is None:
            return 0
        now = self._clock()
        while times and now - times[0] >= MINUTE_S:
            times.pop(0)
        if not times:
            del self._failures[address]
        if len(times) < self._limit:
            return 0
        return max(1, round(MINUTE_S - (now - times[0])))

    def failed(self, address: str) -> None:
        times = self._failures.setdefault(address, [])
        times.append(self._clock())
        del times[: -self._limit]
        self._failures.move_to_end(address)
        if len(self._failures) > TRACKED:
            self._failures.popitem(last=False)
