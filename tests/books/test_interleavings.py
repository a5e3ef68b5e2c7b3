"""Properties over interleavings: whatever comes, how often and in which batches, money stays right.

The commands are carried out by the real code on a real SQLite database, batch by batch, as the writers of
several trackers would: transactions are serial there, so every interleaving of trackers is some sequence of
batches.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, StaticPool, create_engine, text

from meshnet.tracker.books import Refusal, Settlement, Usage, Work
from meshnet.tracker.books.accounts import insert_account
from meshnet.tracker.books.audit import check
from meshnet.tracker.books.batch import carry_out, write_entries
from meshnet.tracker.books.keys import insert_key
from meshnet.tracker.books.ledger import (
    OUTSIDE,
    Call,
    Command,
    Confirm,
    Hold,
    NewEntry,
    Refund,
    Release,
    Reserve,
    Settle,
    account_book,
)
from meshnet.tracker.books.migration import migrate

FUNDS = 1_000
CALLS = ["c1", "c2", "c3", "c4"]
RESERVED = {"c1": 600, "c2": 500, "c3": 300, "c4": 0}
BUDGET = 700


@cache
def template() -> bytes:
    """A migrated database with one account of FUNDS and two keys, the second with a budget."""
    engine = create_engine("sqlite://", poolclass=StaticPool)
    with engine.begin() as connection:
        migrate(connection)
        insert_account(connection, "small", False, 0)
        insert_key(connection, "small", "mn-a", 0, name="a", scope="use")
        insert_key(connection, "small", "mn-b", 0, name="b", scope="use", total_budget=BUDGET)
        write_entries(connection, [NewEntry(None, "deposit", 0, "", OUTSIDE, account_book(1), FUNDS)], 0)
    raw = engine.raw_connection()
    try:
        driver = raw.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        return driver.serialize()
    finally:
        raw.close()
        engine.dispose()


def call(call_id: str, key_id: int) -> Call:
    price = 1_000_000 if RESERVED[call_id] else 0
    return Call(call_id, 1, key_id, "t", "m", price, 2 * price, 1_000, RESERVED[call_id], 1_000)


usages = st.builds(
    lambda prompt, output, split: Usage(
        prompt, output, (Work("alpha", 15, prompt, output), Work("beta", split, prompt, output))
    ),
    st.integers(0, 400),
    st.integers(0, 400),
    st.integers(1, 30),
)
ids = st.sampled_from(CALLS)
outcomes = st.sampled_from(["complete", "complete", "cancelled", "failed"])


@st.composite
def commands(draw: st.DrawFn) -> Command:
    call_id = draw(ids)
    given = call(call_id, 1) if call_id == "c4" else None
    match draw(st.integers(0, 8)):
        case 0 | 1 | 2:
            key = draw(st.sampled_from([1, 2]))
            return Reserve(call(call_id, key), None, BUDGET if key == 2 else None)
        case 3 | 4:
            return Settle(call_id, draw(usages), draw(outcomes), given)  # type: ignore[arg-type]
        case 5:
            return Hold(call_id, draw(usages), "complete", given)
        case 6:
            return Confirm(call_id)
        case 7:
            return Release(call_id, "why", given)
        case _:
            return Refund(call_id, "why")


def run(connection: Connection, batches: Sequence[Sequence[Command]]) -> list[list[object]]:
    return [list(carry_out(connection, batch, 2_000)) for batch in batches if batch]


@given(st.lists(st.lists(commands(), max_size=6), max_size=12))
def test_money_stays_right_whatever_comes(batches: list[list[Command]]) -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    raw = engine.raw_connection()
    driver = raw.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    driver.deserialize(template())
    raw.close()
    with engine.begin() as connection:
        answers = run(connection, batches)
        report = check(connection)
        assert report.problems == ()
        balance = connection.execute(
            text("SELECT amount FROM balances WHERE book = 'account:1'")
        ).scalar_one()
        assert balance >= 0
        spent = connection.execute(
            text("SELECT amount FROM key_spending WHERE key_id = 2 AND period = 'all'")
        )
        assert (spent.scalar() or 0) <= BUDGET
        charged: dict[str, set[int]] = {}
        for batch, answered in zip([b for b in batches if b], answers, strict=True):
            for command, answer in zip(batch, answered, strict=True):
                if isinstance(answer, Settlement) and answer.status == "settled" and not answer.repeated:
                    assert answer.call_id not in charged, "charged twice"
                    charged.setdefault(answer.call_id, set()).add(answer.charge)
                if isinstance(answer, Settlement) and answer.status == "settled":
                    assert answer.charge == answer.mesh + sum(answer.earned.values())
                    assert answer.charge in charged[answer.call_id]
                assert not isinstance(answer, Refusal) or isinstance(command, Reserve)
    engine.dispose()


@settings(max_examples=60)
@given(st.permutations(CALLS[:3]), st.lists(st.booleans(), min_size=2, max_size=2), st.integers(1, 3))
def test_racing_reservations_never_exceed_the_balance(
    order: list[str], cuts: list[bool], repeats: int
) -> None:
    """All orders and batchings of three calls whose reservations do not fit the balance together."""
    engine = create_engine("sqlite://", poolclass=StaticPool)
    raw = engine.raw_connection()
    driver = raw.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    driver.deserialize(template())
    raw.close()
    batches: list[list[Command]] = [[]]
    for number, call_id in enumerate(order):
        batches[-1].extend(Reserve(call(call_id, 1), None, None) for _ in range(repeats))
        if number < 2 and cuts[number]:
            batches.append([])
    with engine.begin() as connection:
        answers = run(connection, batches)
        accepted = {
            command.call.id
            for batch, answered in zip(batches, answers, strict=True)
            for command, answer in zip(batch, answered, strict=True)
            if isinstance(command, Reserve) and answer is None
        }
        assert sum(RESERVED[call_id] for call_id in accepted) <= FUNDS
        assert order[0] in accepted
        assert check(connection).problems == ()
    engine.dispose()
