"""A setting of the books with a copy in memory; another tracker's change arrives within about two seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog

from meshnet.protocol.errors import ApiError
from meshnet.tracker.books.facade import Books
from meshnet.tracker.books.records import BooksError

REFRESH_S = 1.0

log = structlog.get_logger("meshnet.kept")


class KeptSetting:
    """`take(value)` is called with what is kept, at the start and about once a second; `what` names it."""

    def __init__(self, books: Books, name: str, what: str, take: Callable[[Any], None]) -> None:
        self._books = books
        self._name = name
        self._what = what
        self._take = take
        self._refreshing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._take(await self.read())
        self._refreshing = asyncio.create_task(self._refresh(), name=f"{self._name}-refresh")

    async def stop(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    async def read(self) -> Any:
        """What the books have; `{}` where nothing was kept yet. Raises BooksError."""
        return await self._books.settings.get(self._name, {})

    async def put(self, value: Any) -> None:
        """Keeps a value. Raises ApiError."""
        try:
            await self._books.settings.put(self._name, value)
        except BooksError as error:
            raise ApiError(error.status, error.message, code=error.code) from error

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                self._take(await self.read())
            except BooksError as error:
                log.warning(f"{self._what} could not be read", error=error.message)
