"""Backups: the whole of the books in one SQLite file, from either database and back into either.

A backup is one state of the database, read in one transaction while the tracker runs. It holds the mesh's
signing secret, so its mode is 0600. A backup of SQLite that is restored into PostgreSQL, or the other way
round, moves the mesh from one to the other.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Table, func, insert, select, text, update

from meshnet.tracker.books import schema
from meshnet.tracker.books.audit import check
from meshnet.tracker.books.migration import current_revision, newest_revision
from meshnet.tracker.books.records import BooksError, CheckReport
from meshnet.tracker.books.storage import Storage, database_url, pairs
from meshnet.tracker.books.trackers import BEAT_MS

PAGE: Final = 5_000
TABLES: Final[Sequence[Table]] = schema.metadata.sorted_tables

Rows = Mapping[str, Sequence[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Copied:
    """What was copied: the schema's revision, and the proof of the ledger in the copy.

    A backup whose schema is older than this version has no proof yet (None): it is checked when it is
    restored.
    """

    revision: str
    report: CheckReport | None


async def backup(where: str | Path, target: Path) -> Copied:
    """Writes all of the books at `where` (a data directory or URL) into the new file `target`.

    Raises BooksError when there is nothing to back up, the target exists, or the copy does not check out.
    """
    path = _sqlite_path(where)
    if path is not None and not path.exists():
        raise BooksError(
            f"there are no books at {path}; give the tracker's --data or --database", code="no_books"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    _create(target)
    try:
        if path is not None:
            await asyncio.to_thread(_copy_file, path, target)
        else:
            await _copy_rows(where, f"sqlite:///{target}")
        copied = await _proven(target)
        await asyncio.to_thread(_one_file, target)
        return copied
    except BaseException:
        await asyncio.to_thread(target.unlink, missing_ok=True)
        raise


async def restore(source: Path, where: str | Path, *, replace: bool = False) -> Copied:
    """Fills the books at `where` from a backup, upgrading its schema where that is older.

    Raises BooksError when the file is no backup, or when there are books already: `replace` sets those of
    SQLite aside under another name, unless a tracker is running on them; a PostgreSQL database must be empty.
    """
    await asyncio.to_thread(_must_be_backup, source)
    with tempfile.TemporaryDirectory(dir=source.parent, prefix=".restore-") as folder:
        upgraded = Path(folder) / source.name
        _create(upgraded)
        await asyncio.to_thread(_copy_file, source, upgraded)
        await _end_trackers(upgraded)
        copied = await _proven(upgraded)
        await asyncio.to_thread(_one_file, upgraded)
        path = _sqlite_path(where)
        if path is None:
            await _copy_rows(f"sqlite:///{upgraded}", where)
        else:
            if path.exists():
                await _set_aside(path, replace)
            path.parent.mkdir(parents=True, exist_ok=True)
            _create(path)
            await asyncio.to_thread(_copy_file, upgraded, path)
        return copied


def _sqlite_path(where: str | Path) -> Path | None:
    url = database_url(where)
    return Path(str(url.database)) if url.get_backend_name() == "sqlite" else None


def _create(path: Path) -> None:
    """Makes an empty file that only its owner can read. Raises BooksError when it is there already."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError as error:
        raise BooksError(f"{path} exists already; name a file that does not", code="file_exists") from error


def _must_be_backup(path: Path) -> None:
    if not path.is_file():
        raise BooksError(f"there is no file {path}", code="no_backup")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            connection.execute("SELECT id FROM mesh").fetchone()
    except sqlite3.Error as error:
        raise BooksError(f"{path} is not a backup of meshnet: {error}", code="no_backup") from error
    if verdict != "ok":
        raise BooksError(f"{path} is damaged: {verdict}", code="no_backup")


def _copy_file(source: Path, target: Path) -> None:
    """SQLite's own online backup: one state of the source, whoever writes to it meanwhile."""
    with closing(sqlite3.connect(source)) as origin, closing(sqlite3.connect(target)) as copy:
        origin.backup(copy)


def _one_file(path: Path) -> None:
    """Leaves the WAL, so that the file needs no others beside it."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")


async def _copy_rows(source: str | Path, target: str | Path) -> None:
    """Copies between databases of two kinds, all in one transaction on either side."""
    origin = await Storage.open(source, upgrade=False)
    try:
        rows = await origin.read(_read)
    finally:
        await origin.close()
    copy = await Storage.open(target)
    try:
        await copy.write(lambda connection: _insert(connection, rows))
    finally:
        await copy.close()


def _read(connection: Connection) -> Rows:
    revision = current_revision(connection)
    if revision != newest_revision():
        raise BooksError(
            f"the database has the schema revision {revision!r}, this version copies {newest_revision()!r}; "
            "start the tracker once, which upgrades it",
            code="old_schema",
        )
    return {
        table.name: [dict(row) for row in connection.execute(select(table)).mappings()] for table in TABLES
    }


def _insert(connection: Connection, rows: Rows) -> None:
    for table in (schema.mesh, schema.accounts):
        if connection.execute(select(func.count()).select_from(table)).scalar_one():
            raise BooksError("the database has books already; restore into an empty one", code="books_exist")
    for table in TABLES:
        found = rows[table.name]
        for start in range(0, len(found), PAGE):
            connection.execute(insert(table), found[start : start + PAGE])
        if connection.dialect.name == "postgresql" and found and table.autoincrement_column is not None:
            # The rows came with their numbers; the next one must come after them.
            connection.execute(
                text(
                    f"SELECT setval(pg_get_serial_sequence('{table.name}', 'id'), max(id)) FROM {table.name}"  # noqa: S608
                )
            )


async def _set_aside(path: Path, replace: bool) -> None:
    if not replace:
        raise BooksError(
            f"there are books at {path}; with --replace they are set aside under another name",
            code="books_exist",
        )
    if await tracker_runs(path.parent if path.name == "meshnet.db" else f"sqlite:///{path}"):
        raise BooksError(f"a tracker is running on {path}; stop it first", code="tracker_runs", status=409)
    await asyncio.to_thread(_rename, path)


def _rename(path: Path) -> None:
    _one_file(path)
    number = 1
    while (aside := path.with_name(f"{path.name}.before-restore-{number}")).exists():
        number += 1
    path.rename(aside)


async def tracker_runs(where: str | Path) -> bool:
    """True when a tracker's counter on these books moves within two beats.

    Takes that long if one might run.
    """

    def beats(connection: Connection) -> dict[str, int]:
        if current_revision(connection) is None:
            return {}
        trackers = schema.trackers.c
        alive = select(trackers.id, trackers.beats).where(trackers.ended_at.is_(None))
        return pairs(connection, alive)

    storage = await Storage.open(where, upgrade=False)
    try:
        before = await storage.read(beats)
        if not before:
            return False
        await asyncio.sleep(2.5 * BEAT_MS / 1000)
        return await storage.read(beats) != before
    finally:
        await storage.close()


async def _end_trackers(path: Path) -> None:
    """The trackers of the backup's time are gone.

    The next one to start releases what their calls reserved.
    """
    storage = await Storage.open(f"sqlite:///{path}")
    trackers = schema.trackers
    ended = update(trackers).where(trackers.c.ended_at.is_(None)).values(ended_at=trackers.c.started_at)
    try:
        await storage.write(lambda connection: connection.execute(ended))
    finally:
        await storage.close()


async def _proven(path: Path) -> Copied:
    storage = await Storage.open(f"sqlite:///{path}", upgrade=False)
    try:
        revision = await storage.read(current_revision)
        if revision != newest_revision():
            return Copied(str(revision), None)
        report = await storage.read(check)
    finally:
        await storage.close()
    if not report.ok:
        raise BooksError(
            f"the ledger has {len(report.problems)} problems, the first: {report.problems[0]}",
            code="bad_ledger",
        )
    return Copied(str(revision), report)
