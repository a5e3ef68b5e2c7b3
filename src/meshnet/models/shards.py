"""The cache of slices on disk: made once, shared by a machine's processes, bounded, longest unused out first.

Each slice has a lock file beside it. Who makes or removes a slice holds the lock alone; who uses it holds it
together with others until it is released, so that no slice goes while something has it mapped.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from meshnet.models.errors import StoreFull
from meshnet.models.files import allocated_bytes
from meshnet.models.locks import FileLock
from meshnet.models.slice import Progress, SlicePlan, write_slice

DEFAULT_LIMIT_BYTES = 64 << 30
SPARE_DISK_BYTES = 256 << 20
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class CachedShard:
    """One slice in the cache: `n_bytes` on the disk, `used_ns` when it was last asked for."""

    path: Path
    n_bytes: int
    used_ns: int


class ShardCache:
    """Slices in `folder`, at most `limit_bytes` of them on the disk (holes not counted)."""

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._held: dict[Path, list[FileLock]] = {}
        self._guard = threading.Lock()

    def path_of(self, fingerprint: str, first: int, last: int) -> Path:
        """Where this slice of the model with this fingerprint lies, or would."""
        return self.folder / f"{fingerprint[:24]}-{first}-{last}.gguf"

    def find(self, fingerprint: str, first: int, last: int) -> Path | None:
        """The slice, held from now on, if it is there."""
        return self._hold(self.path_of(fingerprint, first, last))

    def make(self, plan: SlicePlan, fingerprint: str, progress: Progress | None = None) -> Path:
        """The slice of this plan, held from now on: found, waited for, or written from the local model.

        Raises StoreFull where no room can be made, and what `write_slice` raises.
        """
        path = self.path_of(fingerprint, plan.first, plan.last)
        while (held := self._hold(path)) is None:
            # never waits for the lock: who made the slice meanwhile holds it as long as it uses the slice
            lock = FileLock.attempt(_lock_of(path))
            if lock is None:
                time.sleep(_POLL_S)
                continue
            with lock:
                if not path.exists():
                    _remove_debris(path)
                    self.make_room(plan.copy_bytes + len(plan.header), path)
                    write_slice(plan, path, progress)
        return held

    async def make_by(
        self, plan: SlicePlan, fingerprint: str, fetch: Callable[[Path], Awaitable[None]]
    ) -> Path:
        """The slice, held from now on; where it is not there, `fetch` is awaited to put it at that path."""
        path = self.path_of(fingerprint, plan.first, plan.last)
        while (held := self._hold(path)) is None:
            lock = FileLock.attempt(_lock_of(path))
            if lock is None:
                await asyncio.sleep(_POLL_S)
                continue
            with lock:
                if not path.exists():
                    await asyncio.to_thread(self.make_room, plan.copy_bytes + len(plan.header), path)
                    await fetch(path)
        return held

    def release(self, path: Path) -> None:
        """Take back one hold; when all holds are taken back, the slice may go when room is needed."""
        with self._guard:
            locks = self._held.get(path, [])
            if locks:
                locks.pop().release()
            if not locks:
                self._held.pop(path, None)

    def close(self) -> None:
        """Take back all holds."""
        with self._guard:
            for locks in self._held.values():
                for lock in locks:
                    lock.release()
            self._held.clear()

    def shards(self) -> list[CachedShard]:
        """What is there, least recently used first."""
        found = []
        for path in self.folder.glob("*.gguf"):
            lock = _lock_of(path)
            used = lock.stat().st_mtime_ns if lock.exists() else 0
            found.append(CachedShard(path, allocated_bytes(path), used))
        return sorted(found, key=lambda shard: (shard.used_ns, shard.path.name))

    def make_room(self, n_bytes: int, wanted: Path) -> None:
        """Remove unused slices and unfinished fetches, the longest unused first, until `wanted` fits.

        `n_bytes` is what it will take; limit and free disk both have to allow it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if n_bytes > self.limit_bytes:
            raise StoreFull(
                f"{self.folder}: a slice of {n_bytes} bytes is larger than the limit of {self.limit_bytes} "
                "bytes; raise MESHNET_SHARD_BYTES or take fewer layers"
            )
        with FileLock.take(self.folder / ".room.lock"):
            removable = sorted([*self.shards(), *self._unfinished(wanted)], key=lambda each: each.used_ns)
            total = sum(each.n_bytes for each in removable)
            for each in removable:
                if total + n_bytes <= self.limit_bytes and self._disk_has(n_bytes):
                    return
                if self._remove(each.path):
                    total -= each.n_bytes
            if total + n_bytes > self.limit_bytes:
                raise StoreFull(
                    f"{self.folder}: {n_bytes} bytes are needed, {total} of {self.limit_bytes} are in use by "
                    "running nodes; stop one, or raise MESHNET_SHARD_BYTES"
                )
            if not self._disk_has(n_bytes):
                free = shutil.disk_usage(self.folder).free
                raise StoreFull(
                    f"{self.folder}: {n_bytes} bytes are needed, {free} are free on the disk and "
                    f"{SPARE_DISK_BYTES} stay so; free some, or set MESHNET_CACHE to another disk"
                )

    def _unfinished(self, wanted: Path) -> list[CachedShard]:
        """Slices whose fetch broke off, by the path that they would get; that of `wanted` is left alone."""
        found = []
        for part in self.folder.glob(".*.gguf.part"):
            path = self.folder / part.name[1:].removesuffix(".part")
            if path != wanted and not path.exists():
                found.append(CachedShard(path, allocated_bytes(part), part.stat().st_mtime_ns))
        return found

    def _disk_has(self, n_bytes: int) -> bool:
        return shutil.disk_usage(self.folder).free >= n_bytes + SPARE_DISK_BYTES

    def _remove(self, path: Path) -> bool:
        lock = FileLock.attempt(_lock_of(path))
        if lock is None:
            return False
        with lock:
            try:
                path.unlink(missing_ok=True)
                _remove_debris(path)
                for suffix in ("part", "part.json"):
                    path.with_name(f".{path.name}.{suffix}").unlink(missing_ok=True)
            except PermissionError:  # Windows: somebody has it mapped
                return False
            lock.path.unlink(missing_ok=True)
        return True

    def _hold(self, path: Path) -> Path | None:
        if not path.exists():
            return None
        lock = FileLock.take(_lock_of(path), shared=True)
        if not path.exists():
            lock.release()
            return None
        now = time.time_ns()  # finer than the clock that the system stamps files with
        os.utime(lock.path, ns=(now, now))
        with self._guard:
            self._held.setdefault(path, []).append(lock)
        return path


def _remove_debris(path: Path) -> None:
    """What a process left that was killed while it wrote this slice; call with its lock held."""
    for left in path.parent.glob(f".{path.name}.*.part"):
        left.unlink(missing_ok=True)


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")
