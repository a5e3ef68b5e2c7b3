"""Costs as whole numbers of 1e-9 ms, so that sums are exact and ties are ties."""

from __future__ import annotations

import math

PER_MS = 1_000_000_000
EXACT_FLOAT = 1e15
"""From here on a float of milliseconds has no fraction worth rounding, and scaling it as a float could
overflow.
"""


def to_units(ms: float) -> int:
    """Milliseconds as units of 1e-9 ms, rounded once. ValueError when the cost is not finite."""
    if ms < EXACT_FLOAT:
        return round(ms * 1e9)
    if math.isinf(ms):
        raise ValueError("a cost is infinite: a weight times a measured value is beyond 1e308 ms")
    return int(ms) * PER_MS


def to_ms(units: int) -> float:
    """Units of 1e-9 ms as milliseconds."""
    return units / PER_MS
