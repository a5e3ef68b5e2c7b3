"""Brings a database's schema to the newest revision, at start and in one transaction."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from meshnet.tracker.books.records import BooksError

SCRIPTS: Final = Path(__file__).parent / "migrations"
LOCK: Final = 0x6D6573686E6574
"""PostgreSQL's advisory lock: of several trackers that start at once, one migrates and the others wait."""


@cache
def newest_revision() -> str:
    """The revision that this version of meshnet writes."""
    head = ScriptDirectory(str(SCRIPTS)).get_current_head()
    assert head is not None
    return head


def current_revision(connection: Connection) -> str | None:
    """The revision of a database; None when it has no schema yet."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()


def lock_schema(connection: Connection) -> None:
    """Lets one transaction at a time set up the database; SQLite has one writer anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": LOCK})


def migrate(connection: Connection, revision: str = "head") -> None:
    """Upgrades to `revision`. Raises BooksError for a schema that this version does not know."""
    lock_schema(connection)
    current = current_revision(connection)
    if current == (newest_revision() if revision == "head" else revision):
        return
    known = {script.revision for script in ScriptDirectory(str(SCRIPTS)).walk_revisions()}
    if current is not None and current not in known:
        raise BooksError(
            f"the database has the schema revision {current!r}, which this version of meshnet does not know "
            f"(newest: {newest_revision()!r}); install the version that wrote it, or restore a backup",
            code="unknown_schema",
        )
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
