"""`ledger check` finds what is wrong, and nothing where nothing is; reports add up."""

from __future__ import annotations

import csv
import io

import pytest
from books.kit import START, Kit, usage

from meshnet.tracker.books import BooksError, Entry


async def busy(kit: Kit) -> None:
    """Calls of every status."""
    await kit.books.settings.put("mesh_share", 1_500)
    for number in range(5):
        await kit.reserve(f"c{number}", tokens=60)
    await kit.books.settle("c0", usage(60, 10))
    await kit.books.settle("c1", usage(60, 20))
    await kit.books.refund("c1", "bad")
    await kit.books.release("c2", "no route")
    await kit.books.hold("c3", usage(60, 2))
    await kit.books.reserve("f1", kit.key, "free", 10, 10)
    await kit.books.settle("f1", usage(10, 10))
    await kit.books.flush()


async def test_books_in_order(kit: Kit) -> None:
    report = await kit.books.reports.check()
    assert (report.ok, report.calls, report.problems) == (True, 0, ())
    await busy(kit)
    report = await kit.books.reports.check()
    assert (report.ok, report.calls, report.problems) == (True, 6, ())
    entries = await kit.rows("SELECT count(*) FROM entries")
    assert report.entries == entries[0][0]


FORGED = (
    "INSERT INTO entries (at, call_id, kind, line, part, source, target, amount) "
    "VALUES (1, {call}, '{kind}', {line}, '', '{source}', '{target}', {amount})"
)


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE balances SET amount = amount + 1 WHERE book = 'node:alpha'", "book node:alpha"),
        (
            "UPDATE balances SET amount = amount - 5 WHERE book LIKE 'held:%'",
            "unfinished calls have reserved",
        ),
        ("DELETE FROM balances WHERE book = 'mesh'", "all balances sum to"),
        (
            FORGED.format(call="'c0'", kind="settle", line=9, source="mesh", target="node:x", amount=3),
            "call c0: settled",
        ),
        (
            FORGED.format(call="'c2'", kind="settle", line=0, source="mesh", target="node:x", amount=0),
            "call c2: released",
        ),
        (
            FORGED.format(call="'c3'", kind="refund", line=0, source="mesh", target="node:x", amount=0),
            "call c3: held",
        ),
        (
            FORGED.format(call="NULL", kind="deposit", line=0, source="outside", target="node:x", amount=9),
            "book node:x",
        ),
        ("UPDATE calls SET charge = charge + 1 WHERE id = 'c0'", "call c0: settled"),
        ("UPDATE calls SET output_tokens = output_tokens - 1 WHERE id = 'c0'", "call c0: settled"),
        ("UPDATE calls SET mesh_share = 9000 WHERE id = 'c0'", "call c0: settled"),
        ("UPDATE calls SET status = 'settled' WHERE id = 'c1'", "call c1: settled"),
        ("UPDATE calls SET status = 'open' WHERE id = 'c2'", "call c2: open"),
        ("UPDATE key_spending SET amount = 0 WHERE period = 'all'", "total budget"),
    ],
)
async def test_books_out_of_order(kit: Kit, statement: str, problem: str) -> None:
    await busy(kit)
    await kit.books.storage.write(lambda connection: connection.exec_driver_sql(statement))
    report = await kit.books.reports.check()
    assert not report.ok
    assert any(problem in found for found in report.problems), report.problems


async def test_problems_are_bounded(kit: Kit) -> None:
    def spoil(connection: object) -> None:
        for number in range(150):
            connection.exec_driver_sql(f"INSERT INTO balances VALUES ('node:{number}', {number + 1})")  # type: ignore[attr-defined]

    await kit.books.storage.write(spoil)
    problems = (await kit.books.reports.check()).problems
    assert len(problems) == 101
    assert problems[-1] == "and 51 more"


async def test_a_calls_ledger(kit: Kit) -> None:
    await busy(kit)
    call = await kit.books.reports.call("c0")
    assert (call.account, call.key, call.status, call.charge) == ("small", "small key", "settled", 80)
    assert [(entry.kind, entry.amount) for entry in call.entries if entry.kind != "settle"] == [
        ("reserve", 120),
        ("release", 40),
    ]
    assert sum(entry.amount for entry in call.entries if entry.kind == "settle") == 80
    assert [item.node_id for item in call.work] == ["alpha", "beta"]
    with pytest.raises(BooksError, match="know no call 'none'"):
        await kit.books.reports.call("none")


async def test_spending_by_day_and_earnings_by_node(kit: Kit) -> None:
    await busy(kit)
    kit.clock.forward(s=86_400)
    await kit.books.settle("c4", usage(60, 30))
    days = await kit.books.reports.spending(since=START - 1, until=kit.clock() + 1)
    assert [(day.day, day.account, day.calls, day.charge) for day in days] == [
        ("2027-01-15", "home", 1, 0),
        ("2027-01-15", "small", 3, 80),
        ("2027-01-16", "small", 1, 120),
    ]
    only = await kit.books.reports.spending(since=START, until=START + 1, account="home")
    assert [(day.key, day.prompt_tokens, day.output_tokens) for day in only] == [("first key", 10, 10)]
    assert await kit.books.reports.spending(since=START, until=START + 1, key_id=999) == []
    earned = {node.node_id: node for node in await kit.books.reports.earnings()}
    mesh = await kit.book("mesh")
    assert sum(node.earned for node in earned.values()) + mesh == 200
    assert earned["alpha"].calls == 3
    assert earned["alpha"].prefill_units == 15 * (60 + 10 + 60)
    assert earned["alpha"].decode_units == 15 * (10 + 10 + 30)
    with pytest.raises(BooksError, match="days apart"):
        await kit.books.reports.spending(since=0, until=kit.clock())


async def test_the_export_is_the_whole_ledger(kit: Kit) -> None:
    await busy(kit)
    text = "".join([piece async for piece in kit.books.reports.export_csv()])
    rows = list(csv.DictReader(io.StringIO(text)))
    assert len(rows) == (await kit.books.reports.check()).entries
    balance = sum(int(row["amount"]) for row in rows if row["target"] == "node:alpha") - sum(
        int(row["amount"]) for row in rows if row["source"] == "node:alpha"
    )
    assert balance == await kit.book("node:alpha")


async def test_entries_come_page_by_page(kit: Kit) -> None:
    await busy(kit)
    everything = await kit.books.reports.entries()
    paged: list[Entry] = []
    while page := await kit.books.reports.entries(after=paged[-1].id if paged else 0, limit=4):
        paged.extend(page)
    assert paged == everything
    small = await kit.books.reports.entries(account_id=kit.small.account_id)
    assert {entry.call_id for entry in small} == {None, "c0", "c1", "c2", "c3", "c4"}
    assert {entry.call_id for entry in await kit.books.reports.entries(call_id="c2")} == {"c2"}
