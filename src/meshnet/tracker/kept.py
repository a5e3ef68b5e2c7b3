"""A setting of the books with a copy in memory; another tracker's change arrives within about two seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import structlog

from meshnet.protocol.errors import ApiError
from meshnet.tracker.books.facade import Books
from meshnet.tracker.books.records import BooksError

REFRESH_S = 1.0

T = TypeVar("T")
log = structlog.get_logger("meshnet.kept")


class KeptSetting(Generic[T]):
    """`what` names it for people. What is kept and cannot be read is left as it is: the copy stays, and
    changes are refused."""

    def __init__(
        self,
        books: Books,
        name: str,
        what: str,
        *,
        read: Callable[[Any], T],
        plain: Callable[[T], Any],
        take: Callable[[T], None],
    ) -> None:
        """`read(value)` of what the books have, `{}` where nothing was kept yet, raises ValueError for what
        is none of it; `plain` is its reverse. `take` is called at the start, with each change, and about once
        a second."""
        self._books = books
        self._name = name
        self._what = what
        self._read = read
        self._plain = plain
        self._take = take
        self._lock = asyncio.Lock()
        self._problem = ""
        self._refreshing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._look()
        self._refreshing = asyncio.create_task(self._refresh(), name=f"{self._name}-refresh")

    async def stop(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    async def change(self, change: Callable[[T], T]) -> None:
        """Keeps `change(kept)`, where `kept` has what other trackers have changed as well; `change` runs in
        another thread. Raises ApiError, and what `change` raises."""
        fresh: list[T] = []

        def within(value: Any) -> Any:
            try:
                kept = self._read({} if value is None else value)
            except ValueError as error:
                raise ApiError(
                    409,
                    f"{self._what}, as the books have them, cannot be read ({error}) and are left as they "
                    "are; upgrade this tracker to the version that wrote them, or restore a backup",
                    code="unreadable_setting",
                ) from error
            fresh[:] = [change(kept)]
            return self._plain(fresh[0])

        async with self._lock:
            try:
                await self._books.settings.change(self._name, within)
            except BooksError as error:
                raise ApiError(error.status, error.message, code=error.code) from error
            self._take(fresh[0])

    async def _look(self) -> None:
        """Raises BooksError."""
        async with self._lock:  # not a copy from before a change, after it
            value = await self._books.settings.get(self._name, {})
            try:
                kept = self._read(value)
            except ValueError as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    log.error(f"{self._what} cannot be read; they are not used", error=self._problem)
                return
            self._problem = ""
            self._take(kept)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self._look()
            except BooksError as error:
                log.warning(f"{self._what} could not be read", error=error.message)
