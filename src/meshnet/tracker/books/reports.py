"""What can be read out of the books: entries, spending by day, what nodes did and earned, a call's ledger."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, case, func, or_, select

from meshnet.tracker.books import schema
from meshnet.tracker.books.accounts import find_account
from meshnet.tracker.books.audit import check
from meshnet.tracker.books.batch import read_work
from meshnet.tracker.books.ledger import ALL_TIME, account_book, held_book, month
from meshnet.tracker.books.records import BooksError, CheckReport, Entry, KeyInfo, Work
from meshnet.tracker.books.storage import Storage, pairs

PAGE: Final = 1_000
DAY_MS: Final = 86_400_000
MAX_DAYS: Final = 3_660

calls, entries, work = schema.calls.c, schema.entries.c, schema.work.c
ENTRY_FIELDS: Final = tuple(field.name for field in fields(Entry))
ENTRIES: Final = select(*(schema.entries.c[name] for name in ENTRY_FIELDS)).order_by(entries.id)


@dataclass(frozen=True, slots=True)
class DaySpending:
    """What an account's key spent on one day (UTC, by the end of the calls): `day` is `2026-11-30`."""

    day: str
    account: str
    key_id: int
    key: str
    calls: int
    prompt_tokens: int
    output_tokens: int
    charge: int


@dataclass(frozen=True, slots=True)
class NodeEarnings:
    """What a node did and earned: `prefill_units` and `decode_units` are layers x tokens."""

    node_id: str
    calls: int
    prefill_units: int
    decode_units: int
    earned: int


@dataclass(frozen=True, slots=True)
class CallLedger:
    """All that the books say about one call."""

    id: str
    account: str
    key_id: int
    key: str
    model: str
    status: str
    outcome: str | None
    reason: str | None
    price_input: int
    price_output: int
    mesh_share: int
    reserved: int
    charge: int
    prompt_tokens: int
    output_tokens: int
    accepted_at: int
    ended_at: int | None
    work: tuple[Work, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class KeyStanding:
    """A key's view of itself: what its account has, and what counts against its budgets."""

    key: KeyInfo
    unlimited: bool
    balance: int
    held: int
    spent_this_month: int
    spent_in_all: int


class Reports:
    """Reads the books; changes nothing."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def check(self) -> CheckReport:
        """Proves the ledger: see `audit.check`."""
        return await self._storage.read(check)

    async def entries(
        self,
        *,
        after: int = 0,
        limit: int = PAGE,
        account_id: int | None = None,
        call_id: str | None = None,
    ) -> list[Entry]:
        """A page of entries with ids above `after`, oldest first; those of one account or call if asked."""
        query = ENTRIES.where(entries.id > after).limit(min(limit, PAGE))
        if call_id is not None:
            query = query.where(entries.call_id == call_id)
        if account_id is not None:
            books = [account_book(account_id), held_book(account_id)]
            query = query.where(or_(entries.source.in_(books), entries.target.in_(books)))
        rows = await self._storage.read(lambda connection: connection.execute(query).all())
        return [Entry(*row) for row in rows]

    async def export_csv(self) -> AsyncIterator[str]:
        """The whole ledger as CSV with a header, in pieces of up to PAGE entries."""
        yield _csv([ENTRY_FIELDS])
        last = 0
        while page := await self.entries(after=last):
            yield _csv([tuple(asdict(entry).values()) for entry in page])
            last = page[-1].id

    async def call(self, call_id: str) -> CallLedger:
        """One call with its work and entries. Raises BooksError when the books have no such call."""

        def read(connection: Connection) -> CallLedger:
            row = connection.execute(
                select(schema.calls, schema.accounts.c.name.label("account"), schema.keys.c.name.label("key"))
                .join(schema.accounts, schema.accounts.c.id == calls.account_id)
                .join(schema.keys, schema.keys.c.id == calls.key_id)
                .where(calls.id == call_id)
            ).one_or_none()
            if row is None:
                raise BooksError(
                    f"the books know no call {call_id!r}", code="unknown_call", status=404, param="call_id"
                )
            names = [field.name for field in fields(CallLedger) if field.name not in ("work", "entries")]
            lines = connection.execute(ENTRIES.where(entries.call_id == call_id)).all()
            return CallLedger(
                **{name: getattr(row, name) for name in names},
                work=read_work(connection, [call_id]).get(call_id, ()),
                entries=tuple(Entry(*line) for line in lines),
            )

        return await self._storage.read(read)

    async def spending(
        self, *, since: int, until: int, account: str | None = None, key_id: int | None = None
    ) -> list[DaySpending]:
        """What was charged per day, account and key for calls that ended in `since <= time < until`.

        Held calls count once they are charged, refunded ones not at all.
        """
        if not 0 <= until - since <= MAX_DAYS * DAY_MS:
            raise BooksError(
                f"since {since} and until {until} must be in order and at most {MAX_DAYS} days apart",
                code="bad_period",
                param="since",
            )
        day = calls.ended_at // DAY_MS
        charge = case((calls.status == "settled", calls.charge), else_=0)
        query = (
            select(
                day.label("day"),
                schema.accounts.c.name,
                calls.key_id,
                schema.keys.c.name,
                func.count(),
                func.sum(calls.prompt_tokens),
                func.sum(calls.output_tokens),
                func.sum(charge),
            )
            .select_from(schema.calls)
            .join(schema.accounts, schema.accounts.c.id == calls.account_id)
            .join(schema.keys, schema.keys.c.id == calls.key_id)
            .where(calls.ended_at >= since, calls.ended_at < until)
            .group_by(day, schema.accounts.c.name, calls.key_id, schema.keys.c.name)
            .order_by(day, schema.accounts.c.name, calls.key_id)
        )
        if account is not None:
            query = query.where(schema.accounts.c.name == account)
        if key_id is not None:
            query = query.where(calls.key_id == key_id)
        rows = await self._storage.read(lambda connection: connection.execute(query).all())
        return [
            DaySpending(_date(row[0]), row[1], row[2], row[3], *(int(value) for value in row[4:]))
            for row in rows
        ]

    async def standing(self, key: KeyInfo, now: int) -> KeyStanding:
        """What a key may know of its own account and budgets."""
        spending = schema.key_spending

        def read(connection: Connection) -> KeyStanding:
            account = find_account(connection, key.account_id)
            spent = pairs(
                connection,
                select(spending.c.period, spending.c.amount).where(spending.c.key_id == key.id),
            )
            return KeyStanding(
                key,
                account.unlimited,
                account.balance,
                account.held,
                spent.get(month(now), 0),
                spent.get(ALL_TIME, 0),
            )

        return await self._storage.read(read)

    async def earnings(self) -> list[NodeEarnings]:
        """What each node did in all settled calls and earned by it, refunds taken off."""

        def units(tokens: ColumnElement[int]) -> ColumnElement[int]:
            return func.sum(work.layers * tokens)

        done = (
            select(
                work.node_id,
                func.count(work.call_id.distinct()),
                units(work.prefill_tokens),
                units(work.decode_tokens),
            )
            .select_from(schema.work)
            .join(schema.calls, calls.id == work.call_id)
            .where(calls.status == "settled")
            .group_by(work.node_id)
        )
        books = select(schema.balances).where(schema.balances.c.book.like("node:%"))

        def read(connection: Connection) -> tuple[Sequence[Any], dict[str, int]]:
            return connection.execute(done).all(), pairs(connection, books)

        rows, earned = await self._storage.read(read)
        nodes = {row[0]: (int(row[1]), int(row[2]), int(row[3])) for row in rows}
        names = sorted(nodes.keys() | {book.removeprefix("node:") for book in earned})
        return [
            NodeEarnings(name, *nodes.get(name, (0, 0, 0)), earned.get(f"node:{name}", 0)) for name in names
        ]


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _date(day: int) -> str:
    return datetime.fromtimestamp(day * 86_400, UTC).strftime("%Y-%m-%d")
