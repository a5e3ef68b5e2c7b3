"""Whether a shard fits, before a byte of it is loaded."""

from __future__ import annotations

import psutil

from meshnet.engine.base import EngineError
from meshnet.models.memory import MemoryNeed, memory_need

__all__ = ["MemoryNeed", "check_memory", "memory_need"]


def check_memory(need: MemoryNeed, limit: int | None, name: str, first: int, last: int) -> None:
    """Raises EngineError, with what is needed and what is there, where a shard does not fit."""
    have = limit if limit is not None else int(psutil.virtual_memory().available)
    if need.total > have:
        where = "may be used" if limit is not None else "is available on this machine"
        raise EngineError(
            f"layers {first}-{last} of {name} need {_mb(need.total)} (weights {_mb(need.weights)}, context "
            f"{_mb(need.kv)}, compute {_mb(need.compute)}), but {_mb(have)} {where}; take fewer layers, "
            "slots or context"
        )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
