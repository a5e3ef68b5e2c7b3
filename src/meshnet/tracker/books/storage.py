"""Where the books are kept: SQLite by default, PostgreSQL by URL, one interface over both.

Durability. SQLite runs in WAL mode. A transaction that charges, refunds or pays in is committed with
`synchronous=FULL`: one fsync, so neither a killed process nor a power cut loses it. Two kinds are committed
with NORMAL, which a killed process does not lose either, and a power cut only if it comes within moments:
records of free calls, and reservations. A power cut that loses a reservation ends its call as well, so
nothing is left to pay for, and the log is written in order, so no charge outlives the reservation that it was
taken from. On PostgreSQL, whose server may fall while the tracker and its calls live on, only records of free
calls are committed asynchronously.

Threads. Reads go through SQLAlchemy's async engine. Writes on SQLite run in one thread of their own on a
synchronous connection: through aiosqlite each statement is a trip between threads, and a batch of five
statements takes 2.8 ms and 2.3 ms of CPU, against 0.6 ms and 0.5 ms in one trip (measured on 2 cores). One
writer thread is also what SQLite wants: it allows one writer at a time.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from sqlalchemy import URL, Connection, Engine, Select, Table, create_engine, event, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from meshnet.tracker.books.migration import migrate
from meshnet.tracker.books.prepared import Prepared
from meshnet.tracker.books.records import BooksError, BooksUnavailable

T = TypeVar("T")

BUSY_TIMEOUT_MS: Final = 10_000
READ_CONNECTIONS: Final = 4
WRITE_CONNECTIONS: Final = 4
DATABASE_FILE: Final = "meshnet.db"

TRANSIENT_STATES: Final = frozenset({"40001", "40P01", "55P03"})
"""PostgreSQL's serialisation failure, deadlock, and lock not available: the transaction may be run again."""


def wall_clock() -> int:
    """The time as integer unix milliseconds, UTC."""
    return time.time_ns() // 1_000_000


def database_url(where: str | Path) -> URL:
    """Turns a data directory or a database URL into the URL of an async driver.

    Raises BooksError for a URL of a database other than SQLite and PostgreSQL.
    """
    if isinstance(where, Path) or "://" not in where:
        return URL.create("sqlite+aiosqlite", database=str(Path(where).expanduser() / DATABASE_FILE))
    text = where.replace("postgres://", "postgresql://", 1) if where.startswith("postgres://") else where
    url = make_url(text)
    match url.get_backend_name():
        case "sqlite":
            if not url.database or url.database == ":memory:":
                raise BooksError(
                    f"database URL {where!r} names no file; use a path, or --data DIR",
                    code="bad_database_url",
                )
            return url.set(drivername="sqlite+aiosqlite")
        case "postgresql":
            return url.set(drivername="postgresql+asyncpg")
        case other:
            raise BooksError(
                f"database URL has the kind {other!r}; SQLite and PostgreSQL are supported",
                code="bad_database_url",
            )


class Storage:
    """One database. `read` and `write` run a function of a SQLAlchemy Connection in one transaction."""

    def __init__(self, url: URL) -> None:
        self.url: Final = url
        self.kind: Final[Literal["sqlite", "postgresql"]] = (
            "sqlite" if url.get_backend_name() == "sqlite" else "postgresql"
        )
        self._thread: ThreadPoolExecutor | None = None
        self._writer: Engine | None = None
        self._connection: Connection | None = None
        self._engine: AsyncEngine | None = None

    @classmethod
    async def open(cls, where: str | Path, *, upgrade: bool = True) -> Storage:
        """Connects, and brings the schema to the newest revision in one transaction.

        Raises BooksError when the database was written by a newer meshnet, BooksUnavailable when it cannot be
        reached.
        """
        storage = cls(database_url(where))
        try:
            storage._connect()
            if upgrade:
                await storage.write(migrate)
        except BaseException:
            await storage.close()
            raise
        return storage

    def _connect(self) -> None:
        if self.kind == "sqlite":
            path = Path(str(self.url.database))
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                # The file holds the mesh's signing secret and the hashes of the keys.
                os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="books-writer")
            self._writer = create_engine(self.url.set(drivername="sqlite+pysqlite"), poolclass=NullPool)
            _prepare_sqlite(self._writer, "BEGIN IMMEDIATE")
            self._engine = create_async_engine(self.url, pool_size=READ_CONNECTIONS, max_overflow=0)
            _prepare_sqlite(self._engine.sync_engine, "BEGIN")
        else:
            try:
                self._engine = create_async_engine(
                    self.url,
                    pool_size=READ_CONNECTIONS + WRITE_CONNECTIONS,
                    max_overflow=0,
                    pool_pre_ping=False,
                    pool_recycle=1800,
                )
            except ModuleNotFoundError as error:
                raise BooksError(
                    "PostgreSQL needs the extra 'postgres': pip install 'meshnet[postgres]'",
                    code="missing_driver",
                ) from error

    async def write(
        self, function: Callable[[Connection], T], *, durable: bool = True, prepared: bool = False
    ) -> T:
        """Runs `function` in one write transaction and returns what it returns, once that is committed.

        `durable=False` skips the wait for the disk. `prepared` says that all its statements are of the class
        Prepared: on SQLite the transaction, too, is then the driver's alone. An error rolls back. A caller
        that is cancelled does not know whether the transaction was committed, only that it was as a whole or
        not at all.
        """
        if self.kind == "sqlite":
            assert self._thread is not None
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._write_sqlite, function, durable, prepared)
        return await self._write_postgresql(function, durable)

    def _write_sqlite(self, function: Callable[[Connection], T], durable: bool, prepared: bool) -> T:
        try:
            if self._connection is None:
                assert self._writer is not None
                self._connection = self._writer.connect()
            connection = self._connection
            _set_synchronous(connection, "FULL" if durable else "NORMAL")
            with _driven(connection) if prepared else connection.begin():
                return function(connection)
        except (DBAPIError, sqlite3.Error) as error:
            raise _translated(error) from error

    async def _write_postgresql(self, function: Callable[[Connection], T], durable: bool) -> T:
        assert self._engine is not None
        try:
            async with self._engine.begin() as connection:
                if not durable:
                    await connection.exec_driver_sql("SET LOCAL synchronous_commit = off")
                return await connection.run_sync(function)
        except DBAPIError as error:
            raise _translated(error) from error
        except OSError as error:
            raise BooksUnavailable(f"the database at {self.label} cannot be reached: {error}") from error

    async def read(self, function: Callable[[Connection], T]) -> T:
        """Runs `function` in one read transaction that sees one state of the database throughout."""
        assert self._engine is not None
        try:
            async with self._engine.connect() as connection:
                if self.kind == "postgresql":
                    await connection.execution_options(
                        isolation_level="REPEATABLE READ", postgresql_readonly=True
                    )
                async with connection.begin():
                    return await connection.run_sync(function)
        except DBAPIError as error:
            raise _translated(error) from error
        except OSError as error:
            raise BooksUnavailable(f"the database at {self.label} cannot be reached: {error}") from error

    @property
    def in_thread(self) -> bool:
        """Whether `write` is carried out by a thread of its own, which begins while the caller goes on."""
        return self.kind == "sqlite"

    @property
    def label(self) -> str:
        """The database's address without its password."""
        return self.url.render_as_string(hide_password=True)

    async def close(self) -> None:
        """Ends all connections; safe to call twice."""
        if self._thread is not None:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._close_writer)
            self._thread.shutdown(wait=True)
            self._thread = None
        if self._engine is not None:
            await self._engine.dispose()
            self._engine = None

    def _close_writer(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._writer is not None:
            self._writer.dispose()
            self._writer = None


def pairs(connection: Connection, query: Select[Any]) -> dict[Any, Any]:
    """The rows of a query of two columns, as a mapping from the first to the second."""
    return {row[0]: row[1] for row in connection.execute(query)}


def upsert(
    connection: Connection,
    table: Table,
    rows: list[dict[str, Any]],
    *,
    add: tuple[str, ...] = (),
    replace: tuple[str, ...] = (),
) -> None:
    """Inserts `rows`.

    Where the primary key exists, the columns `add` are added to it and `replace` replaced.
    """
    _upsert(connection.dialect.name, table, add, replace).many(connection, rows)


@cache
def _upsert(dialect: str, table: Table, add: tuple[str, ...], replace: tuple[str, ...]) -> Prepared:
    statement = (postgresql if dialect == "postgresql" else sqlite).insert(table)
    new = statement.excluded
    changes = {name: table.c[name] + new[name] for name in add} | {name: new[name] for name in replace}
    keys = list(table.primary_key.columns)
    return Prepared(statement.on_conflict_do_update(index_elements=keys, set_=changes), table.c.keys())


def _translated(error: DBAPIError | sqlite3.Error) -> Exception:
    """BooksUnavailable where running the same transaction again may succeed, else the error itself."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    gone = isinstance(error, DBAPIError) and error.connection_invalidated
    if isinstance(cause, sqlite3.Error):
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        gone = gone or code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    state = getattr(cause, "sqlstate", None)
    if gone or state in TRANSIENT_STATES:
        return BooksUnavailable(f"the database cannot take the transaction now: {cause}")
    return error


def _prepare_sqlite(engine: Engine, begin: str) -> None:
    """WAL, a busy timeout, foreign keys, and transactions that begin when we say so."""

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _: Any) -> None:
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            f"busy_timeout={BUSY_TIMEOUT_MS}",
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            "temp_store=MEMORY",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin_transaction(connection: Connection) -> None:
        connection.exec_driver_sql(begin)


@contextmanager
def _driven(connection: Connection) -> Iterator[None]:
    """A write transaction that SQLAlchemy does not see."""
    driver: Any = connection.connection.driver_connection
    driver.execute("BEGIN IMMEDIATE")
    try:
        yield
        driver.execute("COMMIT")
    except BaseException:
        if driver.in_transaction:
            driver.execute("ROLLBACK")
        raise


def _set_synchronous(connection: Connection, mode: Literal["FULL", "NORMAL"]) -> None:
    info = connection.info
    if info.get("synchronous") != mode:
        # On the driver's own connection: SQLAlchemy would begin a transaction, and within one the pragma is
        # void.
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.execute(f"PRAGMA synchronous={mode}")
        info["synchronous"] = mode
