"""Accounts: who pays. An account is without limit, or spends what was put in."""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Row, Text, cast, func, insert, literal, select, update

from meshnet.tracker.books import schema
from meshnet.tracker.books.batch import write_entries
from meshnet.tracker.books.ledger import OUTSIDE, NewEntry, account_book
from meshnet.tracker.books.records import Account, BooksError, Clock
from meshnet.tracker.books.storage import Storage, upsert

MAX_AMOUNT: Final = 10**17

_FREE = schema.balances.alias("free")
_KEPT = schema.balances.alias("kept")
_NUMBER = cast(schema.accounts.c.id, Text)
_ACCOUNTS: Final = (
    select(
        schema.accounts,
        func.coalesce(_FREE.c.amount, 0).label("balance"),
        func.coalesce(_KEPT.c.amount, 0).label("held"),
    )
    .outerjoin(_FREE, _FREE.c.book == literal("account:").concat(_NUMBER))
    .outerjoin(_KEPT, _KEPT.c.book == literal("held:").concat(_NUMBER))
    .order_by(schema.accounts.c.id)
)


class Accounts:
    """The accounts as stored. Money comes in and goes out here; what calls cost moves in the ledger."""

    def __init__(self, storage: Storage, clock: Clock) -> None:
        self._storage = storage
        self._clock = clock

    async def create(self, name: str, *, unlimited: bool = False) -> Account:
        """Opens an account with nothing in it. Raises BooksError when the name is taken or empty."""
        if not 1 <= len(name.strip()) <= 100 or "/" in name or not name.isprintable():
            raise BooksError(
                f"name {name!r} must have 1 to 100 printable characters and no slash",
                code="bad_account",
                param="name",
            )
        return await self._storage.write(
            lambda connection: insert_account(connection, name, unlimited, self._clock())
        )

    async def list(self) -> list[Account]:
        """All accounts with their balances."""
        rows = await self._storage.read(lambda connection: connection.execute(_ACCOUNTS).all())
        return [_account(row) for row in rows]

    async def get(self, name: str | int) -> Account:
        """One account, by name or id. Raises BooksError when there is none."""
        return await self._storage.read(lambda connection: find_account(connection, name))

    async def set_unlimited(self, name: str | int, unlimited: bool) -> Account:
        """Lifts an account's limit, or sets it: then it can spend only what is in it."""

        def write(connection: Connection) -> Account:
            account = find_account(connection, name)
            connection.execute(
                update(schema.accounts).where(schema.accounts.c.id == account.id).values(unlimited=unlimited)
            )
            return find_account(connection, name)

        return await self._storage.write(write)

    async def deposit(
        self, name: str | int, amount: int, *, why: str | None = None, reference: str | None = None
    ) -> Account:
        """Puts micro-units in, or, negative, takes them out; never more than is free in a limited account.

        `reference` makes it happen once: a second deposit with the same reference changes nothing.
        Raises BooksError for an unknown account, an amount of 0 or one too large.
        """
        if amount == 0 or abs(amount) > MAX_AMOUNT:
            raise BooksError(
                f"amount is {amount}; it must not be 0, and at most {MAX_AMOUNT} micro-units either way",
                code="bad_amount",
                param="amount",
            )

        def write(connection: Connection) -> Account:
            account = find_account(connection, name)
            book = account_book(account.id)
            free = connection.execute(
                select(schema.balances.c.amount).where(schema.balances.c.book == book).with_for_update()
            ).scalar_one()
            if reference is not None and _seen(connection, reference, book, amount):
                return account
            if amount < 0 and not account.unlimited and free + amount < 0:
                raise BooksError(
                    f"account {account.name!r} has {free} micro-units free; {-amount} cannot be taken out",
                    code="insufficient_balance",
                    status=409,
                    param="amount",
                )
            entry = (
                NewEntry(None, "deposit", 0, "", OUTSIDE, book, amount, why)
                if amount > 0
                else NewEntry(None, "withdrawal", 0, "", book, OUTSIDE, -amount, why)
            )
            write_entries(connection, [entry], self._clock(), reference)
            return find_account(connection, name)

        return await self._storage.write(write)


def _seen(connection: Connection, reference: str, book: str, amount: int) -> bool:
    entries = schema.entries
    row = connection.execute(
        select(entries.c.source, entries.c.target, entries.c.amount).where(entries.c.reference == reference)
    ).one_or_none()
    if row is None:
        return False
    if (
        book in (row.source, row.target)
        and row.amount == abs(amount)
        and (row.target == book) == (amount > 0)
    ):
        return True
    raise BooksError(
        f"reference {reference!r} stands on another deposit already; use a new one",
        code="duplicate_reference",
        status=409,
        param="reference",
    )


def insert_account(connection: Connection, name: str, unlimited: bool, now: int) -> Account:
    """Stores a new account and its balance of 0, within the caller's transaction."""
    taken = connection.execute(
        select(schema.accounts.c.id).where(schema.accounts.c.name == name)
    ).scalar_one_or_none()
    if taken is not None:
        raise BooksError(
            f"an account named {name!r} exists already", code="account_exists", status=409, param="name"
        )
    account_id = connection.execute(
        insert(schema.accounts)
        .values(name=name, unlimited=unlimited, created_at=now)
        .returning(schema.accounts.c.id)
    ).scalar_one()
    upsert(connection, schema.balances, [{"book": account_book(account_id), "amount": 0}], add=("amount",))
    return find_account(connection, account_id)


def find_account(connection: Connection, name: str | int) -> Account:
    """The account with that name or id. Raises BooksError when there is none."""
    accounts = schema.accounts.c
    where = accounts.id == name if isinstance(name, int) else accounts.name == name
    row = connection.execute(_ACCOUNTS.where(where)).one_or_none()
    if row is None:
        label = f"with the id {name}" if isinstance(name, int) else f"named {name!r}"
        raise BooksError(f"there is no account {label}", code="unknown_account", status=404, param="account")
    return _account(row)


def _account(row: Row[Any]) -> Account:
    return Account(
        id=row.id,
        name=row.name,
        unlimited=bool(row.unlimited),
        balance=row.balance,
        held=row.held,
        created_at=row.created_at,
    )
