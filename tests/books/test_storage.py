"""Schema, upgrades and durability, on both databases."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from books.kit import START, Clock, Kit, usage
from books.postgres import Postgres
from sqlalchemy import Connection, text

from meshnet.tracker.books import Books, BooksError, BooksUnavailable
from meshnet.tracker.books.migration import current_revision, migrate, newest_revision
from meshnet.tracker.books.schema import metadata
from meshnet.tracker.books.secret import digest
from meshnet.tracker.books.storage import Storage, database_url


@pytest.fixture(params=["sqlite", "postgresql"])
async def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without a schema."""
    if request.param == "sqlite":
        return str(tmp_path / "data")
    server: Postgres = request.getfixturevalue("postgres")
    return await server.new_database(empty=True)


async def test_the_migrations_make_the_tables_that_the_code_knows(empty: str) -> None:
    storage = await Storage.open(empty)
    try:

        def differences(connection: Connection) -> list[Any]:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            return list(compare_metadata(context, metadata))

        assert await storage.write(differences) == []
        assert await storage.read(current_revision) == newest_revision()
    finally:
        await storage.close()


FIRST_SCHEMA = [
    "INSERT INTO mesh VALUES ('0e4d', 'c2VjcmV0', 1)",
    "INSERT INTO accounts (id, name, unlimited, created_at) "
    "VALUES (1, 'home', {true}, 1), (2, 'small', {false}, 1)",
    "INSERT INTO keys (id, hash, name, account_id, scope, created_at, total_budget) "
    "VALUES (1, '{hash}', 'old key', 2, 'use', 1, 5000)",
    "INSERT INTO prices VALUES ('paid', 1, 1000000, 2000000)",
    "INSERT INTO settings VALUES ('mesh_share', '1000', 1)",
    "INSERT INTO trackers VALUES ('t1', 'http://old', '{{}}', 7, 1, NULL)",
    "INSERT INTO calls (id, account_id, key_id, tracker, model, price_input, price_output, mesh_share, "
    "reserved, status, prompt_tokens, output_tokens, charge, accepted_at, ended_at) VALUES "
    "('done', 2, 1, 't1', 'paid', 1000000, 2000000, 0, 200, 'settled', 100, 10, 120, 1, 2), "
    "('open', 2, 1, 't1', 'paid', 1000000, 2000000, 0, 200, 'open', 0, 0, 0, 1, NULL)",
    "INSERT INTO work VALUES ('done', 0, 'alpha', 30, 100, 10)",
    "INSERT INTO entries (at, call_id, kind, line, part, source, target, amount) VALUES "
    "(1, NULL, 'deposit', 0, '', 'outside', 'account:2', 1000), "
    "(1, 'done', 'reserve', 0, '', 'account:2', 'held:2', 200), "
    "(2, 'done', 'settle', 0, 'decode', 'held:2', 'node:alpha', 20), "
    "(2, 'done', 'settle', 1, 'prefill', 'held:2', 'node:alpha', 100), "
    "(2, 'done', 'release', 0, '', 'held:2', 'account:2', 80), "
    "(1, 'open', 'reserve', 0, '', 'account:2', 'held:2', 200)",
    "INSERT INTO balances VALUES ('outside', -1000), ('account:1', 0), ('account:2', 680), ('held:2', 200), "
    "('node:alpha', 120)",
    "INSERT INTO key_spending VALUES (1, 'all', 320), (1, '1970-01', 320)",
]
"""Books as the first schema had them: a settled call, and one in flight when the tracker was stopped."""


async def test_books_of_the_first_schema_are_upgraded_with_all_that_is_in_them(empty: str) -> None:
    storage = await Storage.open(empty, upgrade=False)

    def fill(connection: Connection) -> None:
        migrate(connection, "0001")
        words = {"true": "TRUE", "false": "FALSE", "hash": digest("mn-old")}
        for statement in FIRST_SCHEMA:
            connection.execute(text(statement.format(**words).replace(":", r"\:")))
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT setval('accounts_id_seq', 2), setval('keys_id_seq', 1)"))

    await storage.write(fill)
    assert await storage.read(current_revision) == "0001"
    await storage.close()

    clock = Clock()
    books = await Books.open(empty, clock=clock)
    try:
        assert await books.storage.read(current_revision) == newest_revision()
        assert books.mesh.id == "0e4d"
        assert await books.bootstrap() is None
        key = await books.authenticate("mn-old")
        assert key is not None
        assert (key.name, key.account, key.total_budget) == ("old key", "small", 5_000)
        assert (await books.reports.check()).problems == ()
        await books.start("http://new")
        await books.recover()
        clock.forward(s=60)
        async with asyncio.timeout(20):
            while (await books.accounts.get("small")).held:
                await books.recover()
        assert (await books.accounts.get("small")).balance == 880
        assert (await books.refund("done", "after the upgrade")).status == "refunded"
        await books.accounts.create("new")
        assert await books.settings.get("mesh_share") == 1_000
        assert (await books.reports.check()).problems == ()
    finally:
        await books.close()


async def test_a_database_of_a_newer_meshnet_is_refused(where: str) -> None:
    storage = await Storage.open(where)
    await storage.write(lambda c: c.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'"))
    await storage.close()
    with pytest.raises(BooksError, match="revision '9999'"):
        await Books.open(where)


async def test_several_trackers_that_start_at_once_on_an_empty_database(empty: str) -> None:
    books = await asyncio.gather(*(Books.open(empty) for _ in range(3)))
    try:
        assert len({one.mesh.id for one in books}) == 1
        secrets = await asyncio.gather(*(one.bootstrap() for one in books))
        assert sum(secret is not None for secret in secrets) == 1
    finally:
        for one in books:
            await one.close()


async def test_a_transaction_that_fails_leaves_nothing(where: str) -> None:
    storage = await Storage.open(where)
    try:

        def half(connection: Connection) -> None:
            connection.exec_driver_sql("INSERT INTO settings VALUES ('half', '1', 1)")
            raise RuntimeError("half way")

        with pytest.raises(RuntimeError, match="half way"):
            await storage.write(half)
        count = await storage.read(lambda c: c.exec_driver_sql("SELECT count(*) FROM settings").scalar_one())
        assert count == 0
    finally:
        await storage.close()


async def test_the_sqlite_file_is_for_its_owner_alone_and_survives_power_cuts(tmp_path: Path) -> None:
    storage = await Storage.open(tmp_path / "deep" / "data")
    try:
        file = tmp_path / "deep" / "data" / "meshnet.db"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        for durable, mode in ((True, 2), (False, 1), (True, 2)):
            found = await storage.write(
                lambda c: (
                    c.exec_driver_sql("PRAGMA synchronous").scalar_one(),
                    c.exec_driver_sql("PRAGMA journal_mode").scalar_one(),
                ),
                durable=durable,
            )
            assert found == (mode, "wal")
    finally:
        await storage.close()


@pytest.mark.parametrize(
    ("where", "url"),
    [
        ("/data/x", "sqlite+aiosqlite:////data/x/meshnet.db"),
        ("sqlite:////data/own.db", "sqlite+aiosqlite:////data/own.db"),
        ("postgres://u:p@h/db", "postgresql+asyncpg://u:p@h/db"),
        ("postgresql://u@h:1/db?host=x", "postgresql+asyncpg://u@h:1/db?host=x"),
    ],
)
def test_places_and_their_urls(where: str, url: str) -> None:
    assert database_url(where).render_as_string(hide_password=False) == url


@pytest.mark.parametrize("where", ["mysql://h/db", "sqlite://", "sqlite:///:memory:"])
def test_places_that_are_refused(where: str) -> None:
    with pytest.raises(BooksError):
        database_url(where)


async def test_a_database_that_is_not_there() -> None:
    with pytest.raises(BooksUnavailable, match="cannot be reached"):
        await Storage.open("postgresql://nobody:hidden@127.0.0.1:9/none")


async def test_an_unreachable_databases_password_is_not_told() -> None:
    with pytest.raises(BooksUnavailable) as caught:
        await Storage.open("postgresql://nobody:hidden@127.0.0.1:9/none")
    assert "hidden" not in str(caught.value)


# ---------------------------------------------------------------- the writer


async def test_a_free_calls_record_may_be_lost_but_never_money(kit: Kit) -> None:
    """The invariant: no call without a row in the database has money reserved or charged."""
    for number in range(20):
        model, key = ("paid", kit.small) if number % 4 == 0 else ("free", kit.key)
        await kit.books.reserve(f"c{number}", key, model, 10, 10)
        moved = await kit.books.storage.read(
            lambda c: c.exec_driver_sql(
                "SELECT count(*) FROM entries WHERE call_id IS NOT NULL "
                "AND NOT EXISTS (SELECT 1 FROM calls WHERE calls.id = entries.call_id)"
            ).scalar_one()
        )
        assert moved == 0
    rows = await kit.rows("SELECT id, reserved FROM calls ORDER BY id")
    assert rows == [(f"c{number}", 30) for number in sorted((0, 12, 16, 4, 8), key=str)]


async def test_while_the_database_is_away_nothing_is_lost_that_was_settled(kit: Kit) -> None:
    await kit.reserve("c1")
    write = kit.books.storage.write
    attempts = 0

    async def away(function: Any, *, durable: bool = True, prepared: bool = False) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts <= 3:
            raise BooksUnavailable("away")
        return await write(function, durable=durable)

    kit.books.storage.write = away  # type: ignore[method-assign]
    settlement = await kit.books.settle("c1", usage(100, 10))
    assert settlement.charge == 120
    assert attempts >= 4
    kit.books.storage.write = write  # type: ignore[method-assign]


async def test_a_settlement_that_could_not_be_written_is_written_later(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshnet.tracker.books.writer.GIVE_UP_S", 0.0)
    await kit.reserve("c1")
    write = kit.books.storage.write

    async def away(function: Any, *, durable: bool = True, prepared: bool = False) -> Any:
        raise BooksUnavailable("away")

    kit.books.storage.write = away  # type: ignore[method-assign]
    with pytest.raises(BooksUnavailable):
        await kit.books.settle("c1", usage(100, 10))
    kit.books.storage.write = write  # type: ignore[method-assign]
    async with asyncio.timeout(20):
        while (await kit.books.accounts.get("small")).held:
            kit.clock.forward(s=3)
            await asyncio.sleep(0.1)
    assert (await kit.books.accounts.get("small")).balance == 880


async def test_one_bad_command_spoils_no_other(kit: Kit) -> None:
    good = [kit.books.reserve(f"c{number}", kit.small, "paid", 10, 10) for number in range(5)]
    # An account that does not exist: the database refuses the whole batch.
    bad_key = await kit.books.keys.get(kit.small.id)
    from dataclasses import replace

    bad = kit.books.reserve("bad", replace(bad_key, account_id=77, id=999), "paid", 0, 0)
    results = await asyncio.gather(*good[:2], bad, *good[2:], return_exceptions=True)
    failed = [result for result in results if isinstance(result, Exception)]
    assert len(failed) == 1
    assert (await kit.books.accounts.get("small")).held == 150


async def test_the_queue_is_bounded(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    await kit.reserve("warm")
    monkeypatch.setattr("meshnet.tracker.books.writer.MAX_QUEUED", 2)
    answers = await asyncio.gather(
        *(kit.books.reserve(f"c{number}", kit.small, "paid", 1, 1) for number in range(20)),
        return_exceptions=True,
    )
    refused = [answer for answer in answers if isinstance(answer, BooksUnavailable)]
    assert refused
    assert "does not keep up" in str(refused[0])


async def test_a_flush_does_not_wait_for_what_comes_after_it(kit: Kit) -> None:
    going = True

    async def busy() -> None:
        number = 0
        while going:
            number += 1
            await kit.books.reserve(f"busy{number}", kit.key, "free", 1, 1)
            await kit.books.settle(f"busy{number}", usage(1, 1))
            await asyncio.sleep(0)

    task = asyncio.create_task(busy())
    async with asyncio.timeout(30):
        for _ in range(5):
            await asyncio.sleep(0.01)
            await kit.books.flush()
    going = False
    await task


async def test_times_are_unix_milliseconds(kit: Kit) -> None:
    kit.clock.forward(ms=1)
    await kit.reserve("c1")
    assert await kit.rows("SELECT accepted_at FROM calls") == [(START + 1,)]
    assert await kit.rows("SELECT at FROM entries WHERE call_id = 'c1'") == [(START + 1,)]
