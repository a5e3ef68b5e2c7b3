"""What the tests of the books share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, text

from meshnet.tracker.books import Books, Bootstrap, KeyInfo, Refusal, Reservation, Usage, Work

START = 1_800_000_000_000
"""2027-01-15T08:00:00Z."""


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self, now: int = START) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now

    def forward(self, *, ms: int = 0, s: int = 0) -> None:
        self.now += ms + 1000 * s


@dataclass
class Kit:
    """Books with a clock. Model `free` costs nothing, `paid` 1 micro-unit per token in, 2 per token out.

    Account `home` is without limit and has the keys of the bootstrap; account `small` has 1,000 micro-units.
    """

    books: Books
    clock: Clock
    where: str
    secrets: Bootstrap
    admin: KeyInfo
    key: KeyInfo
    small: KeyInfo
    others: list[Books] = field(default_factory=list)

    @classmethod
    async def make(cls, where: str) -> Kit:
        clock = Clock()
        books = await Books.open(where, clock=clock)
        secrets = await books.bootstrap()
        assert secrets is not None
        await books.start("http://one:8080")
        await books.prices.set("paid", 1_000_000, 2_000_000)
        await books.accounts.create("small")
        await books.accounts.deposit("small", 1_000)
        _, secret = await books.keys.create("small", "small key")
        admin = await books.authenticate(secrets.admin_key)
        key = await books.authenticate(secrets.use_key)
        small = await books.authenticate(secret)
        assert admin is not None
        assert key is not None
        assert small is not None
        return cls(books, clock, where, secrets, admin, key, small)

    async def another(self, url: str = "http://two:8080") -> Books:
        """A second tracker on the same books."""
        books = await Books.open(self.where, clock=self.clock)
        await books.start(url)
        self.others.append(books)
        return books

    async def close(self) -> None:
        for books in [*self.others, self.books]:
            await books.close()

    async def reserve(self, call_id: str, key: KeyInfo | None = None, tokens: int = 100) -> Reservation:
        """Reserves a call of the paid model with `tokens` of prompt and half as many of output."""
        answer = await self.books.reserve(call_id, key or self.small, "paid", tokens, tokens // 2)
        assert isinstance(answer, Reservation), answer
        return answer

    async def refused(self, call_id: str, key: KeyInfo, model: str, prompt: int, output: int) -> Refusal:
        answer = await self.books.reserve(call_id, key, model, prompt, output)
        assert isinstance(answer, Refusal), answer
        return answer

    async def rows(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        """What a query gives, once all records are written."""
        await self.books.flush()

        def read(connection: Connection) -> list[tuple[Any, ...]]:
            return [tuple(row) for row in connection.execute(text(query), values)]

        return await self.books.storage.read(read)

    async def book(self, name: str) -> int:
        """The balance of one book."""
        rows = await self.rows("SELECT amount FROM balances WHERE book = :name", name=name)
        return int(rows[0][0]) if rows else 0


def two_nodes(prefill: int, decode: int) -> tuple[Work, ...]:
    """A pipeline of two nodes with 15 layers each."""
    return (Work("alpha", 15, prefill, decode), Work("beta", 15, prefill, decode))


def usage(prompt: int, output: int) -> Usage:
    """That usage, on a pipeline of two nodes."""
    return Usage(prompt, output, two_nodes(prompt, output))
