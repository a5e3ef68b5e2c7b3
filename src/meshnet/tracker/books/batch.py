"""Carries out a batch of ledger commands in one transaction: reads, decides, writes the changes.

The order of locks is the same in every transaction (calls by id, then accounts by id, then books by name), so
that two trackers on one PostgreSQL wait for each other and do not deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Final

from sqlalchemy import Connection, bindparam, insert, literal_column, select, update

from meshnet.tracker.books import bulk, schema
from meshnet.tracker.books.bulk import CHANGING
from meshnet.tracker.books.ledger import (
    ALL_TIME,
    Call,
    Command,
    NewEntry,
    Release,
    Reserve,
    State,
    account_book,
    decide,
    deltas,
    month,
)
from meshnet.tracker.books.prepared import Prepared
from meshnet.tracker.books.records import Refusal, Settlement, Work
from meshnet.tracker.books.storage import upsert

Answer = Settlement | Refusal | None
Rows = dict[str, list[dict[str, Any]]]

FIELDS: Final = tuple(field.name for field in fields(Call))

COLUMNS: Final = [schema.calls.c[name] for name in FIELDS]

READ_CALLS: Final = Prepared(
    select(*COLUMNS)
    .where(schema.calls.c.id.in_(bindparam("ids", expanding=True)))
    .order_by(schema.calls.c.id)
    .with_for_update()
)
READ_ACCOUNTS: Final = Prepared(
    select(schema.accounts.c.id, schema.accounts.c.unlimited, schema.balances.c.amount)
    .select_from(schema.accounts)
    .join(schema.balances, schema.balances.c.book == literal_column("'account:' || accounts.id"))
    .where(schema.accounts.c.id.in_(bindparam("ids", expanding=True)))
    .order_by(schema.accounts.c.id)
    .with_for_update(of=schema.balances)
)
READ_SPENDING: Final = Prepared(
    select(schema.key_spending).where(
        schema.key_spending.c.key_id.in_(bindparam("keys", expanding=True)),
        schema.key_spending.c.period.in_(bindparam("periods", expanding=True)),
    )
)
READ_TRACKERS: Final = Prepared(
    select(schema.trackers.c.id, schema.trackers.c.ended_at)
    .where(schema.trackers.c.id.in_(bindparam("ids", expanding=True)))
    .order_by(schema.trackers.c.id)
    .with_for_update()
)
READ_WORK: Final = Prepared(
    select(*schema.work.c)
    .where(schema.work.c.call_id.in_(bindparam("ids", expanding=True)))
    .order_by(schema.work.c.call_id, schema.work.c.line)
)
NEW_CALL: Final = Prepared(insert(schema.calls), FIELDS)
CHANGE_CALL: Final = Prepared(
    update(schema.calls)
    .where(schema.calls.c.id == bindparam("new_id"))
    .values({name: bindparam(f"new_{name}") for name in CHANGING})
)
NEW_WORK: Final = Prepared(insert(schema.work), schema.work.c.keys())
ENTRY_FIELDS: Final = tuple(column.name for column in schema.entries.c if column.name != "id")
NEW_ENTRY: Final = Prepared(insert(schema.entries), ENTRY_FIELDS)


def carry_out(connection: Connection, commands: Sequence[Command], now: int) -> list[Answer]:
    """Decides the commands in order and writes what they change. Answers stand in the commands' order."""
    state = _read(connection, commands)
    stored = set(state.calls)
    changed: dict[str, Call] = {}
    entries: list[NewEntry] = []
    work: list[tuple[str, tuple[Work, ...]]] = []
    spending: dict[tuple[int, str], int] = {}
    answers: list[Answer] = []
    for command in commands:
        decision = decide(state, command, now)
        answers.append(decision.answer)
        call = decision.call
        if call is None:
            continue
        before = state.calls.get(call.id)
        state.calls[call.id] = changed[call.id] = call
        if decision.work:
            work.append((call.id, decision.work))
            state.work[call.id] = decision.work
        if decision.entries:
            entries.extend(decision.entries)
            book = account_book(call.account_id)
            if call.account_id in state.balances:
                state.balances[call.account_id] += deltas(decision.entries).get(book, 0)
        if difference := call.spent - (before.spent if before else 0):
            for period in (ALL_TIME, month(call.accepted_at)):
                slot = call.key_id, period
                spending[slot] = spending.get(slot, 0) + difference
                state.spending[slot] = state.spending.get(slot, 0) + difference
    _write(connection, stored, changed, entries, work, spending, now)
    return answers


def _read(connection: Connection, commands: Sequence[Command]) -> State:
    ids = sorted({c.call.id if isinstance(c, Reserve) else c.call_id for c in commands})
    rows = READ_CALLS.all(connection, {"ids": ids})
    calls = {row[0]: Call(*row) for row in rows}
    state = State(calls=calls, lost=_lost(connection, commands))
    ended = [call.id for call in calls.values() if call.status != "open"]
    if ended:
        state.work.update(read_work(connection, ended))
    paid = [command for command in commands if isinstance(command, Reserve) and command.call.reserved]
    if paid:
        _read_accounts(connection, state, paid)
    return state


def _read_accounts(connection: Connection, state: State, reserves: Sequence[Reserve]) -> None:
    ids = sorted({command.call.account_id for command in reserves})
    for account_id, unlimited, amount in READ_ACCOUNTS.all(connection, {"ids": ids}):
        state.unlimited[account_id] = bool(unlimited)
        state.balances[account_id] = amount
    # The account's balance is locked, and a key belongs to one account: its spending cannot change meanwhile.
    keys = sorted(
        {
            command.call.key_id
            for command in reserves
            if command.monthly_budget is not None or command.total_budget is not None
        }
    )
    if keys:
        periods = sorted({ALL_TIME, *(month(command.call.accepted_at) for command in reserves)})
        for key_id, period, amount in READ_SPENDING.all(connection, {"keys": keys, "periods": periods}):
            state.spending[key_id, period] = amount


def _lost(connection: Connection, commands: Iterable[Command]) -> frozenset[str]:
    named = sorted(
        {c.lost_tracker for c in commands if isinstance(c, Release) and c.lost_tracker is not None}
    )
    if not named:
        return frozenset()
    known = READ_TRACKERS.all(connection, {"ids": named})
    alive = {row[0] for row in known if row[1] is None}
    return frozenset(named) - alive


def read_work(connection: Connection, call_ids: Sequence[str]) -> dict[str, tuple[Work, ...]]:
    """What the nodes did in these calls."""
    found: dict[str, list[Work]] = {}
    for call_id, _, *values in READ_WORK.all(connection, {"ids": call_ids}):
        found.setdefault(call_id, []).append(Work(*values))
    return {call_id: tuple(items) for call_id, items in found.items()}


def _write(
    connection: Connection,
    stored: set[str],
    changed: dict[str, Call],
    entries: list[NewEntry],
    work: list[tuple[str, tuple[Work, ...]]],
    spending: dict[tuple[int, str], int],
    now: int,
) -> None:
    rows = {
        "new": [_row(call, FIELDS) for call in changed.values() if call.id not in stored],
        "changed": [_row(call, ("id", *CHANGING)) for call in changed.values() if call.id in stored],
        "work": [
            {
                "call_id": call_id,
                "line": line,
                "node_id": item.node_id,
                "layers": item.layers,
                "prefill_tokens": item.prefill_tokens,
                "decode_tokens": item.decode_tokens,
            }
            for call_id, items in work
            for line, item in enumerate(items)
        ],
        "spending": [
            {"key_id": key_id, "period": period, "amount": amount}
            for (key_id, period), amount in sorted(spending.items())
            if amount
        ],
        **_entry_rows(entries, now, None),
    }
    if connection.dialect.name == "postgresql":
        bulk.write(connection, rows)
        return
    if rows["new"]:
        NEW_CALL.many(connection, rows["new"])
    if rows["changed"]:
        CHANGE_CALL.many(connection, [{f"new_{name}": row[name] for name in row} for row in rows["changed"]])
    if rows["work"]:
        NEW_WORK.many(connection, rows["work"])
    _write_entries(connection, rows)
    if rows["spending"]:
        upsert(connection, schema.key_spending, rows["spending"], add=("amount",))


def write_entries(
    connection: Connection, entries: Sequence[NewEntry], now: int, reference: str | None = None
) -> None:
    """Appends entries and moves the balances of their books with them."""
    _write_entries(connection, _entry_rows(entries, now, reference))


def _write_entries(connection: Connection, rows: Rows) -> None:
    if rows["entries"]:
        NEW_ENTRY.many(connection, rows["entries"])
    if rows["balances"]:
        upsert(connection, schema.balances, rows["balances"], add=("amount",))


def _entry_rows(entries: Sequence[NewEntry], now: int, reference: str | None) -> Rows:
    return {
        "entries": [
            {
                "at": now,
                "call_id": entry.call_id,
                "kind": entry.kind,
                "line": entry.line,
                "part": entry.part,
                "source": entry.source,
                "target": entry.target,
                "amount": entry.amount,
                "why": entry.why,
                "reference": reference,
            }
            for entry in entries
        ],
        "balances": [
            {"book": book, "amount": amount} for book, amount in sorted(deltas(entries).items()) if amount
        ],
    }


def _row(call: Call, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(call, name) for name in names}
