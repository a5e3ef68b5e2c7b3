"""A call's money on its way through the books, on both databases."""

from __future__ import annotations

import asyncio

import pytest
from books.kit import START, Kit, two_nodes, usage

from meshnet.tracker.books import BooksError, Refusal, Reservation, Usage, Work


async def test_a_call_reserves_the_most_it_can_cost_and_pays_what_it_used(kit: Kit) -> None:
    reservation = await kit.reserve("c1", tokens=100)
    assert reservation.amount == 100 * 1 + 50 * 2
    account = await kit.books.accounts.get("small")
    assert (account.balance, account.held) == (800, 200)

    settlement = await kit.books.settle("c1", usage(100, 10))

    assert (settlement.status, settlement.charge, settlement.mesh) == ("settled", 120, 0)
    assert settlement.earned == {"alpha": 60, "beta": 60}
    account = await kit.books.accounts.get("small")
    assert (account.balance, account.held) == (880, 0)
    assert await kit.book("node:alpha") == 60
    entries = await kit.rows(
        "SELECT kind, line, part, source, target, amount FROM entries WHERE call_id = 'c1' ORDER BY id"
    )
    small = account.id
    assert entries == [
        ("reserve", 0, "", f"account:{small}", f"held:{small}", 200),
        ("settle", 0, "decode", f"held:{small}", "node:alpha", 10),
        ("settle", 1, "prefill", f"held:{small}", "node:alpha", 50),
        ("settle", 2, "decode", f"held:{small}", "node:beta", 10),
        ("settle", 3, "prefill", f"held:{small}", "node:beta", 50),
        ("release", 0, "", f"held:{small}", f"account:{small}", 80),
    ]


async def test_every_delivery_after_the_first_changes_nothing(kit: Kit) -> None:
    first = await kit.reserve("c1")
    again = await kit.reserve("c1")
    assert again.repeated
    assert again.amount == first.amount
    settled = await kit.books.settle("c1", usage(100, 10))
    before = await kit.rows("SELECT * FROM entries ORDER BY id")

    for repeat in (
        await kit.books.settle("c1", usage(100, 50)),
        await kit.books.settle("c1", usage(100, 10), "failed"),
        await kit.books.release("c1", "late"),
        await kit.books.hold("c1", usage(1, 1)),
        await kit.books.confirm("c1"),
    ):
        assert repeat.repeated
        assert (repeat.status, repeat.charge, repeat.earned) == ("settled", 120, settled.earned)
    assert isinstance(await kit.books.reserve("c1", kit.small, "paid", 100, 50), Refusal)
    assert await kit.rows("SELECT * FROM entries ORDER BY id") == before


@pytest.mark.parametrize(
    ("outcome", "output", "charge"),
    [
        ("cancelled", 7, 114),
        ("cancelled", 0, 0),
        ("failed", 30, 0),
        ("complete", 0, 0),
        ("complete", 50, 200),
    ],
)
async def test_who_pays_for_what_was_produced(kit: Kit, outcome: str, output: int, charge: int) -> None:
    await kit.reserve("c1")
    settlement = await kit.books.settle("c1", usage(100, output), outcome)  # type: ignore[arg-type]
    assert settlement.charge == charge
    assert settlement.status == ("settled" if charge else "released")
    account = await kit.books.accounts.get("small")
    assert (account.balance, account.held) == (1_000 - charge, 0)


async def test_a_charge_never_exceeds_what_was_reserved(kit: Kit) -> None:
    await kit.reserve("c1", tokens=100)
    settlement = await kit.books.settle("c1", usage(5_000, 5_000))
    assert settlement.charge == 200
    assert sum(settlement.earned.values()) == 200


async def test_two_calls_that_race_for_the_last_of_a_balance(kit: Kit) -> None:
    answers = await asyncio.gather(
        *(kit.books.reserve(f"c{i}", kit.small, "paid", 300, 150) for i in range(10))
    )
    assert sum(isinstance(answer, Reservation) for answer in answers) == 1
    refusals = [answer for answer in answers if isinstance(answer, Refusal)]
    assert {(refusal.code, refusal.status) for refusal in refusals} == {("insufficient_quota", 429)}
    account = await kit.books.accounts.get("small")
    assert (account.balance, account.held) == (400, 600)


async def test_two_trackers_that_race_for_the_last_of_a_balance(kit: Kit) -> None:
    other = await kit.another()
    answers = await asyncio.gather(
        *(
            books.reserve(f"{i}{n}", kit.small, "paid", 300, 150)
            for i in range(8)
            for n, books in enumerate((kit.books, other))
        )
    )
    assert sum(isinstance(answer, Reservation) for answer in answers) == 1
    assert await kit.book(f"account:{kit.small.account_id}") == 400


async def test_the_price_at_acceptance_counts(kit: Kit) -> None:
    await kit.reserve("c1")
    kit.clock.forward(s=1)
    await kit.books.prices.set("paid", 50_000_000, 50_000_000)
    settlement = await kit.books.settle("c1", usage(100, 10))
    assert settlement.charge == 120
    refused = await kit.refused("c2", kit.small, "paid", 100, 50)
    assert "7500 micro-units" in refused.message


async def test_a_price_holds_from_its_time_on(kit: Kit) -> None:
    await kit.books.prices.set("paid", 3_000_000, 0, START + 60_000)
    assert (await kit.reserve("c1")).amount == 200
    kit.clock.forward(s=60)
    assert (await kit.reserve("c2")).amount == 300


async def test_an_account_without_limit_goes_below_zero(kit: Kit) -> None:
    await kit.reserve("c1", kit.key, tokens=10_000)
    await kit.books.settle("c1", usage(10_000, 5_000))
    assert (await kit.books.accounts.get("home")).balance == -20_000


async def test_a_free_call_touches_no_money_and_is_recorded_once(kit: Kit) -> None:
    reservation = await kit.books.reserve("c1", kit.key, "free", 20, 100)
    assert isinstance(reservation, Reservation)
    assert reservation.amount == 0
    assert await kit.rows("SELECT * FROM calls") == []
    settlement = await kit.books.settle("c1", usage(20, 30))
    assert (settlement.status, settlement.charge) == ("settled", 0)
    assert (await kit.books.settle("c1", usage(20, 30))).repeated
    assert await kit.rows("SELECT status, prompt_tokens, output_tokens, charge FROM calls") == [
        ("settled", 20, 30, 0)
    ]
    assert await kit.rows("SELECT kind, amount FROM entries WHERE call_id = 'c1'") == [("settle", 0)]
    assert await kit.rows(
        "SELECT node_id, layers, prefill_tokens, decode_tokens FROM work ORDER BY line"
    ) == [
        ("alpha", 15, 20, 30),
        ("beta", 15, 20, 30),
    ]


async def test_a_free_call_that_is_released_is_recorded_too(kit: Kit) -> None:
    await kit.books.reserve("c1", kit.key, "free", 20, 100)
    assert (await kit.books.release("c1", "no route")).status == "released"
    assert await kit.rows("SELECT status, reason FROM calls") == [("released", "no route")]
    assert await kit.rows("SELECT kind, amount, why FROM entries WHERE call_id = 'c1'") == [
        ("release", 0, "no route")
    ]


async def test_a_limited_account_with_nothing_in_it_may_use_free_models(kit: Kit) -> None:
    await kit.books.accounts.create("empty")
    key, _ = await kit.books.keys.create("empty", "k")
    assert isinstance(await kit.books.reserve("c1", key, "free", 20, 100), Reservation)
    assert (await kit.refused("c2", key, "paid", 20, 100)).code == "insufficient_quota"


async def test_the_mesh_takes_its_share(kit: Kit) -> None:
    await kit.books.settings.put("mesh_share", 1_500)
    await kit.reserve("c1")
    await kit.books.settings.put("mesh_share", 0)
    settlement = await kit.books.settle("c1", usage(100, 11))
    assert settlement.charge == 122
    assert settlement.mesh == 18
    assert settlement.earned == {"alpha": 52, "beta": 52}
    assert await kit.book("mesh") == 18


async def test_a_held_call_is_charged_when_confirmed(kit: Kit) -> None:
    await kit.reserve("c1")
    assert (await kit.books.hold("c1", usage(100, 2))).status == "held"
    account = await kit.books.accounts.get("small")
    assert (account.balance, account.held) == (800, 200)
    confirmed = await kit.books.confirm("c1")
    assert (confirmed.status, confirmed.charge, confirmed.repeated) == ("settled", 104, False)
    assert (await kit.books.confirm("c1")).repeated
    assert (await kit.books.accounts.get("small")).balance == 896


async def test_a_held_call_that_is_released_costs_nothing(kit: Kit) -> None:
    await kit.reserve("c1")
    await kit.books.hold("c1", usage(100, 2))
    assert (await kit.books.release("c1", "not confirmed")).status == "released"
    assert (await kit.books.confirm("c1")).status == "released"
    account = await kit.books.accounts.get("small")
    assert (account.balance, account.held) == (1_000, 0)


async def test_a_refund_takes_back_from_those_who_earned(kit: Kit) -> None:
    await kit.books.settings.put("mesh_share", 1_000)
    await kit.reserve("c1")
    await kit.books.settle("c1", usage(100, 11))
    refunded = await kit.books.refund("c1", "garbled answer")
    assert (refunded.status, refunded.charge) == ("refunded", 0)
    assert (await kit.books.refund("c1", "again")).repeated
    assert (await kit.books.accounts.get("small")).balance == 1_000
    for book in ("node:alpha", "node:beta", "mesh"):
        assert await kit.book(book) == 0
    whys = await kit.rows("SELECT DISTINCT why FROM entries WHERE kind = 'refund'")
    assert whys == [("garbled answer",)]


async def test_a_failover_pays_each_node_for_what_it_did(kit: Kit) -> None:
    work = (
        Work("alpha", 15, 100, 4),
        Work("beta", 15, 100, 4),
        Work("gamma", 15, 104, 16),
        Work("alpha", 15, 0, 16),
    )
    await kit.reserve("c1")
    settlement = await kit.books.settle("c1", Usage(100, 20, work))
    assert settlement.charge == 140
    # 100 for the prompt by 100:100:104, 40 for the output by 20:4:16, both times 15 layers.
    assert settlement.earned == {"alpha": 53, "beta": 37, "gamma": 50}


async def test_a_call_that_is_not_known(kit: Kit) -> None:
    for attempt in (
        kit.books.settle("no", usage(1, 1)),
        kit.books.release("no", ""),
        kit.books.refund("no", ""),
    ):
        with pytest.raises(BooksError, match="know no call 'no'") as caught:
            await attempt
        assert caught.value.status == 404


async def test_entries_cannot_be_changed_or_deleted(kit: Kit) -> None:
    await kit.reserve("c1")
    for statement in ("UPDATE entries SET amount = 0", "DELETE FROM entries"):
        with pytest.raises(Exception, match="append-only"):
            await kit.books.storage.write(lambda c, s=statement: c.exec_driver_sql(s))  # type: ignore[misc]


async def test_a_cancelled_reservation_is_given_back(kit: Kit) -> None:
    waiting = asyncio.create_task(kit.books.reserve("c1", kit.small, "paid", 100, 50))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    kit.clock.forward(s=3)
    async with asyncio.timeout(20):
        while (await kit.books.accounts.get("small")).balance != 1_000:
            await asyncio.sleep(0.05)
    assert await kit.book(f"held:{kit.small.account_id}") == 0


async def test_deposits(kit: Kit) -> None:
    account = await kit.books.accounts.deposit("small", 500, why="cash", reference="r1")
    assert account.balance == 1_500
    assert (await kit.books.accounts.deposit("small", 500, why="cash", reference="r1")).balance == 1_500
    with pytest.raises(BooksError, match="reference 'r1'"):
        await kit.books.accounts.deposit("small", 600, reference="r1")
    with pytest.raises(BooksError, match="1500 micro-units free"):
        await kit.books.accounts.deposit("small", -1_501)
    assert (await kit.books.accounts.deposit("small", -1_500)).balance == 0
    assert await kit.book("outside") == 0


async def test_two_nodes_share_by_largest_remainder(kit: Kit) -> None:
    await kit.reserve("c1")
    settlement = await kit.books.settle("c1", Usage(1, 1, two_nodes(1, 1)))
    assert settlement.charge == 3
    assert settlement.earned == {"alpha": 2, "beta": 1}
