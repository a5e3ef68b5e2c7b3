"""Locks between processes, on files that the store keeps beside what they guard.

`flock` on POSIX: a lock goes with its process, however that ends. On Windows only exclusive locks exist, so a
shared one is not taken there, and a file in use is protected by the system's refusal to delete it (this path
was never run).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int, *, shared: bool, wait: bool) -> bool:
        if shared:
            return True
        try:
            msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _lock(handle: int, *, shared: bool, wait: bool) -> bool:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class FileLock:
    """A held lock on `path`, from `take` or `attempt` until `release`; a context manager that releases."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self._handle = handle

    @classmethod
    def take(cls, path: Path, *, shared: bool = False) -> FileLock:
        """Wait for the lock."""
        while True:
            lock = cls._open(path, shared=shared, wait=True)
            if lock is not None:
                return lock

    @classmethod
    def attempt(cls, path: Path, *, shared: bool = False) -> FileLock | None:
        """The lock, or None if another process has it now."""
        return cls._open(path, shared=shared, wait=False)

    @classmethod
    def _open(cls, path: Path, *, shared: bool, wait: bool) -> FileLock | None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _lock(handle, shared=shared, wait=wait):
            os.close(handle)
            return None
        # whoever held it before may have removed the file: then this lock guards nothing
        try:
            current = path.stat().st_ino == os.fstat(handle).st_ino
        except FileNotFoundError:
            current = False
        if not current:
            os.close(handle)
            return None
        return cls(path, handle)

    def release(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
