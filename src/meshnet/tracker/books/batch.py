"""Carries out a batch of ledger commands in one transaction: reads what they need, decides, writes the changes.

The order of locks is the same in every transaction (calls by id, then accounts by id, then books by name), so
that two trackers on one PostgreSQL wait for each other and do not deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Final

from sqlalchemy import Connection, bindparam, insert, select, update

from meshnet.tracker.books import schema
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
from meshnet.tracker.books.records import Refusal, Settlement, Work
from meshnet.tracker.books.storage import upsert

Answer = Settlement | Refusal | None

FIELDS: Final = tuple(field.name for field in fields(Call))
CHANGING: Final = ("status", "outcome", "reason", "prompt_tokens", "output_tokens", "charge", "ended_at")

CALLS: Final = select(*(schema.calls.c[name] for name in FIELDS))
CHANGE_CALL: Final = (
    update(schema.calls)
    .where(schema.calls.c.id == bindparam("call_id"))
    .values({name: bindparam(f"new_{name}") for name in CHANGING})
)


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
    rows = connection.execute(
        CALLS.where(schema.calls.c.id.in_(ids)).order_by(schema.calls.c.id).with_for_update()
    ).all()
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
    accounts, balances = schema.accounts, schema.balances
    books = {account_book(command.call.account_id): command.call.account_id for command in reserves}
    amounts = connection.execute(
        select(balances.c.book, balances.c.amount)
        .where(balances.c.book.in_(sorted(books)))
        .order_by(balances.c.book)
        .with_for_update()
    ).all()
    state.balances.update({books[book]: amount for book, amount in amounts})
    unlimited = connection.execute(
        select(accounts.c.id, accounts.c.unlimited).where(accounts.c.id.in_(sorted(books.values())))
    ).all()
    state.unlimited.update({row[0]: bool(row[1]) for row in unlimited})
    # The account's balance is locked, and a key belongs to one account: its spending cannot change meanwhile.
    keys = sorted(
        {
            command.call.key_id
            for command in reserves
            if command.monthly_budget is not None or command.total_budget is not None
        }
    )
    if keys:
        spending = schema.key_spending
        periods = sorted({ALL_TIME, *(month(command.call.accepted_at) for command in reserves)})
        for key_id, period, amount in connection.execute(
            select(spending).where(spending.c.key_id.in_(keys), spending.c.period.in_(periods))
        ):
            state.spending[key_id, period] = amount


def _lost(connection: Connection, commands: Iterable[Command]) -> frozenset[str]:
    named = sorted(
        {c.lost_tracker for c in commands if isinstance(c, Release) and c.lost_tracker is not None}
    )
    if not named:
        return frozenset()
    trackers = schema.trackers
    known = connection.execute(
        select(trackers.c.id, trackers.c.ended_at)
        .where(trackers.c.id.in_(named))
        .order_by(trackers.c.id)
        .with_for_update()
    ).all()
    alive = {row[0] for row in known if row[1] is None}
    return frozenset(named) - alive


def read_work(connection: Connection, call_ids: Sequence[str]) -> dict[str, tuple[Work, ...]]:
    """What the nodes did in these calls."""
    found: dict[str, list[Work]] = {}
    work = schema.work
    for call_id, *values in connection.execute(
        select(work.c.call_id, work.c.node_id, work.c.layers, work.c.prefill_tokens, work.c.decode_tokens)
        .where(work.c.call_id.in_(call_ids))
        .order_by(work.c.call_id, work.c.line)
    ):
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
    new = [_row(call) for call in changed.values() if call.id not in stored]
    if new:
        connection.execute(insert(schema.calls), new)
    old = [_change(call) for call in changed.values() if call.id in stored]
    if old:
        connection.execute(CHANGE_CALL, old)
    done = [
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
    ]
    if done:
        connection.execute(insert(schema.work), done)
    write_entries(connection, entries, now)
    if spending:
        rows = [
            {"key_id": key_id, "period": period, "amount": amount}
            for (key_id, period), amount in sorted(spending.items())
            if amount
        ]
        if rows:
            upsert(connection, schema.key_spending, rows, add=("amount",))


def write_entries(
    connection: Connection, entries: Sequence[NewEntry], now: int, reference: str | None = None
) -> None:
    """Appends entries and moves the balances of their books with them."""
    if not entries:
        return
    connection.execute(
        insert(schema.entries),
        [
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
    )
    moved = [{"book": book, "amount": amount} for book, amount in sorted(deltas(entries).items()) if amount]
    if moved:
        upsert(connection, schema.balances, moved, add=("amount",))


def _row(call: Call) -> dict[str, Any]:
    return {name: getattr(call, name) for name in FIELDS}


def _change(call: Call) -> dict[str, Any]:
    return {"call_id": call.id} | {f"new_{name}": getattr(call, name) for name in CHANGING}
