"""`ledger check`: proves that every balance is the sum of its entries, and each call is booked exactly once.

All queries run in one read transaction, so a check of a busy mesh sees one moment of it.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import ColumnElement, Connection, and_, case, func, not_, or_, select

from meshnet.tracker.books import schema
from meshnet.tracker.books.ledger import ALL_TIME
from meshnet.tracker.books.prices import BASIS
from meshnet.tracker.books.records import MICRO, CheckReport
from meshnet.tracker.books.storage import pairs

MAX_PROBLEMS: Final = 100
KINDS: Final = ("reserve", "settle", "release", "refund")

balances, calls, entries = schema.balances.c, schema.calls.c, schema.entries.c


class _Problems:
    """The first MAX_PROBLEMS problems; the rest are counted."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._more = 0

    def add(self, problem: str) -> None:
        if len(self._found) < MAX_PROBLEMS:
            self._found.append(problem)
        else:
            self._more += 1

    def all(self) -> tuple[str, ...]:
        return (*self._found, f"and {self._more} more") if self._more else tuple(self._found)


def check(connection: Connection) -> CheckReport:
    """Checks all of the ledger. Problems are sentences that name the book or call and both figures."""
    problems = _Problems()
    _check_balances(connection, problems)
    _check_calls(connection, problems)
    _check_spending(connection, problems)
    counts = connection.execute(
        select(
            select(func.count()).select_from(schema.calls).scalar_subquery(),
            select(func.count()).select_from(schema.entries).scalar_subquery(),
        )
    ).one()
    return CheckReport(counts[0], counts[1], problems.all())


def _check_balances(connection: Connection, problems: _Problems) -> None:
    moves = (
        select(entries.source.label("book"), (-entries.amount).label("amount"))
        .union_all(select(entries.target, entries.amount))
        .subquery()
    )
    sums = connection.execute(select(moves.c.book, func.sum(moves.c.amount)).group_by(moves.c.book))
    proven = {book: int(amount) for book, amount in sums}
    stored = pairs(connection, select(balances.book, balances.amount))
    for book in sorted(proven.keys() | stored.keys()):
        if proven.get(book, 0) != stored.get(book, 0):
            problems.add(
                f"book {book}: the balance is {stored.get(book, 0)}, its entries sum to {proven.get(book, 0)}"
            )
    if total := sum(stored.values()):
        problems.add(f"all balances sum to {total}, not to 0")
    reserved = connection.execute(
        select(calls.account_id, func.sum(calls.reserved))
        .where(calls.status.in_(["open", "held"]))
        .group_by(calls.account_id)
    )
    expected = {f"held:{account_id}": int(amount) for account_id, amount in reserved}
    held = {book: amount for book, amount in stored.items() if book.startswith("held:")}
    for book in sorted(expected.keys() | held.keys()):
        if expected.get(book, 0) != held.get(book, 0):
            problems.add(
                f"book {book}: the balance is {held.get(book, 0)}, "
                f"the unfinished calls have reserved {expected.get(book, 0)}"
            )


def _check_calls(connection: Connection, problems: _Problems) -> None:
    """Each call has its reservation, and the entries that its status asks for, exactly once."""

    def total(kind: str, *where: ColumnElement[bool]) -> ColumnElement[int]:
        return func.coalesce(func.sum(case((and_(entries.kind == kind, *where), entries.amount), else_=0)), 0)

    def count(kind: str) -> ColumnElement[int]:
        return func.coalesce(func.sum(case((entries.kind == kind, 1), else_=0)), 0)

    rest = calls.reserved - calls.charge
    price = (
        calls.price_input * calls.prompt_tokens + calls.price_output * calls.output_tokens + MICRO // 2
    ) // MICRO
    to_mesh = (2 * calls.charge * calls.mesh_share + BASIS) // (2 * BASIS)
    for_mesh = total("settle", entries.part == "mesh")
    unfinished = and_(calls.charge == 0, count("settle") + count("release") + count("refund") == 0)
    released = and_(
        calls.charge == 0,
        count("settle") + count("refund") == 0,
        count("release") == 1,
        total("release") == calls.reserved,
    )
    charged = and_(
        calls.charge == case((price < calls.reserved, price), else_=calls.reserved),
        count("settle") > 0,
        total("settle") == calls.charge,
        # All of it where no work was reported.
        or_(for_mesh == to_mesh, for_mesh == calls.charge),
        total("release") == rest,
        count("release") == case((rest > 0, 1), else_=0),
    )
    refunded = and_(count("refund") > 0, total("refund") == calls.charge)
    right = and_(
        count("reserve") == case((calls.reserved > 0, 1), else_=0),
        total("reserve") == calls.reserved,
        or_(
            and_(calls.status.in_(["open", "held"]), unfinished),
            and_(calls.status == "released", released),
            and_(calls.status == "settled", charged, count("refund") == 0),
            and_(calls.status == "refunded", charged, refunded),
        ),
    )
    wrong = (
        select(
            calls.id,
            calls.status,
            calls.reserved,
            calls.charge,
            *(total(kind).label(f"{kind}_entries") for kind in KINDS),
        )
        .select_from(schema.calls)
        .outerjoin(schema.entries, entries.call_id == calls.id)
        .group_by(calls.id)
        .having(not_(right))
        .order_by(calls.id)
    )
    for row in connection.execute(wrong):
        sums = ", ".join(f"{kind} {getattr(row, f'{kind}_entries')}" for kind in KINDS)
        problems.add(
            f"call {row.id}: {row.status}, reserved {row.reserved}, charged {row.charge}; its entries: {sums}"
        )


def _check_spending(connection: Connection, problems: _Problems) -> None:
    """What counts against a key's budgets is what its calls have reserved or been charged."""
    spent = case(
        (calls.status.in_(["open", "held"]), calls.reserved),
        (calls.status == "settled", calls.charge),
        else_=0,
    )
    proven = pairs(connection, select(calls.key_id, func.sum(spent)).group_by(calls.key_id))
    spending = schema.key_spending.c
    by_month = func.sum(case((spending.period == ALL_TIME, 0), else_=spending.amount))
    in_all = func.sum(case((spending.period == ALL_TIME, spending.amount), else_=0))
    stored = {
        key_id: (int(months), int(total))
        for key_id, months, total in connection.execute(
            select(spending.key_id, by_month, in_all).group_by(spending.key_id)
        )
    }
    for key_id in sorted(proven.keys() | stored.keys()):
        expected = int(proven.get(key_id, 0))
        months, total = stored.get(key_id, (0, 0))
        if (months, total) != (expected, expected):
            problems.add(
                f"key {key_id}: {total} counts against its total budget and {months} against its months, "
                f"its calls come to {expected}"
            )
