"""What this process may use of its machine: cores and memory, by affinity, control groups, what is free."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")


def give_back_memory() -> None:
    """Returns to the system what was freed, where the allocator keeps it (glibc does, by the 100 MB)."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def usable_cores(root: Path = _ROOT) -> int:
    """Cores that compute threads may use: the affinity mask, and no more than a control group's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return max(1, count if quota is None else min(count, math.ceil(quota)))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs by the control group's quota, version 2 or 1; None without one."""
    try:
        limit, _, period = (root / "cpu.max").read_text().strip().partition(" ")
        if limit != "max":
            return int(limit) / int(period or 100_000)
    except (OSError, ValueError):
        pass
    try:
        limit_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return limit_us / period_us if limit_us > 0 and period_us > 0 else None


def memory_limit(root: Path = _ROOT) -> int | None:
    """Bytes by the control group; None without a limit below the machine's memory."""
    total = psutil.virtual_memory().total
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = int((root / name).read_text())
        except (OSError, ValueError):
            continue
        if limit < total:
            return limit
    return None


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that this process can still take."""
    free = int(psutil.virtual_memory().available)
    limit = memory_limit(root)
    if limit is None:
        return free
    return max(min(free, limit - psutil.Process().memory_info().rss), 0)
