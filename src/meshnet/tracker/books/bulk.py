"""All writes of a batch as one statement, for PostgreSQL: there a trip to the server is what costs.

Each part takes its rows as one JSON document, and the parts run as one WITH. Their order is fixed, and rows
that others may lock as well come sorted, so transactions take locks in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, Integer, Table, TextClause, text

from meshnet.tracker.books import schema

CHANGING: Final = ("status", "outcome", "reason", "prompt_tokens", "output_tokens", "charge", "ended_at")
"""What of a call changes after it was accepted."""

Rows = Mapping[str, Sequence[Mapping[str, Any]]]


def write(connection: Connection, rows: Rows) -> None:
    """Writes the rows of each part (the names in `PARTS`) in one statement.

    Parts without rows are left out.
    """
    parts = tuple(name for name in PARTS if rows.get(name))
    if parts:
        values = {name: msgspec.json.encode(rows[name]).decode() for name in parts}
        connection.execute(_statement(parts), values)


@cache
def _statement(parts: tuple[str, ...]) -> TextClause:
    steps = ", ".join(f"{name}_done AS ({PARTS[name]} RETURNING 1)" for name in parts)
    return text(f"WITH {steps} SELECT 1")


def _given(part: str, table: Table, columns: Sequence[str]) -> str:
    """The part's rows as a table `given`."""
    kinds = ("text" if table.c[name].type.python_type is str else _number(table, name) for name in columns)
    typed = ", ".join(f"{name} {kind}" for name, kind in zip(columns, kinds, strict=True))
    return f"jsonb_to_recordset(CAST(:{part} AS jsonb)) AS given({typed})"


def _number(table: Table, name: str) -> str:
    return "integer" if type(table.c[name].type) is Integer else "bigint"


def _insert(part: str, table: Table, columns: Sequence[str]) -> str:
    names = ", ".join(columns)
    return f"INSERT INTO {table.name} ({names}) SELECT {names} FROM {_given(part, table, columns)}"  # noqa: S608


def _add(part: str, table: Table) -> str:
    keys = ", ".join(column.name for column in table.primary_key.columns)
    return (
        f"{_insert(part, table, table.c.keys())} ORDER BY {keys} "
        f"ON CONFLICT ({keys}) DO UPDATE SET amount = {table.name}.amount + excluded.amount"
    )


def _columns(table: Table, *without: str) -> list[str]:
    return [column.name for column in table.c if column.name not in without]


def _change_calls() -> str:
    given = _given("changed", schema.calls, ["id", *CHANGING])
    changes = ", ".join(f"{name} = given.{name}" for name in CHANGING)
    return f"UPDATE calls SET {changes} FROM {given} WHERE calls.id = given.id"  # noqa: S608


PARTS: Final[Mapping[str, str]] = {
    "new": _insert("new", schema.calls, _columns(schema.calls)),
    "changed": _change_calls(),
    "work": _insert("work", schema.work, _columns(schema.work)),
    "entries": _insert("entries", schema.entries, _columns(schema.entries, "id")),
    "balances": _add("balances", schema.balances),
    "spending": _add("spending", schema.key_spending),
}
"""New calls, changed calls, work, entries, and what is added to balances and to what keys have spent."""
