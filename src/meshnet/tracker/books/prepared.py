"""Statements of the hot path, compiled once.

SQLAlchemy's execution costs several times what SQLite itself does for such small statements. In the writer of
SQLite a prepared statement therefore goes straight to the driver, on the same connection and in the same
transaction; on PostgreSQL, where the network trip outweighs it, it is executed as usual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.sql.dml import Insert, Update
from sqlalchemy.sql.selectable import Select

DIALECT: Final = SQLiteDialect_pysqlite(paramstyle="qmark")


class Prepared:
    """One statement. A list for `IN` is padded to a power of two, so that few texts serve all lengths.

    On SQLite values are passed and returned as the driver has them: only for columns of text and integers.
    """

    def __init__(self, statement: Select[Any] | Insert | Update, columns: Sequence[str] = ()) -> None:
        self._statement = statement
        self._columns = list(columns) or None
        self._texts: dict[tuple[int, ...], tuple[str, list[str]]] = {}

    def all(self, connection: Connection, values: Mapping[str, Sequence[Any]]) -> Sequence[Sequence[Any]]:
        """Reads all rows; each value is the list of an `IN`."""
        if connection.dialect.driver != "pysqlite":
            return connection.execute(self._statement, dict(values)).all()
        padded = {name: _padded(items) for name, items in values.items()}
        text, order = self._text(padded)
        flat = {f"{name}_{i}": item for name, items in padded.items() for i, item in enumerate(items, 1)}
        rows: Sequence[Sequence[Any]] = _driver(connection).execute(text, [flat[n] for n in order]).fetchall()
        return rows

    def many(self, connection: Connection, rows: list[dict[str, Any]]) -> None:
        """Writes one row for each of `rows`, which all have the statement's columns."""
        if connection.dialect.driver != "pysqlite":
            connection.execute(self._statement, rows)
            return
        text, order = self._text({})
        _driver(connection).executemany(text, [[row[name] for name in order] for row in rows])

    def _text(self, lists: Mapping[str, Sequence[Any]]) -> tuple[str, list[str]]:
        sizes = tuple(len(items) for items in lists.values())
        found = self._texts.get(sizes)
        if found is None:
            statement = self._statement.params(**lists) if lists else self._statement
            compiled = statement.compile(
                dialect=DIALECT,
                column_keys=self._columns,
                compile_kwargs={"render_postcompile": True} if lists else {},
            )
            found = self._texts[sizes] = str(compiled), list(compiled.positiontup or ())
        return found


def _padded(items: Sequence[Any]) -> list[Any]:
    size = 1 << (len(items) - 1).bit_length()
    return [*items, *([items[-1]] * (size - len(items)))]


def _driver(connection: Connection) -> Any:
    return connection.connection.driver_connection
