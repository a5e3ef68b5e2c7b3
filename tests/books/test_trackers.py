"""Several trackers on the same books: who is alive, whose calls are recovered."""

from __future__ import annotations

import asyncio

import pytest
from books.kit import START, Kit, usage

from meshnet.tracker.books import Books
from meshnet.tracker.books.trackers import LEASE_MS, Sighting, observe


def test_a_tracker_is_lost_when_its_counter_stands_still_for_a_lease() -> None:
    seen, lost = observe({}, {"a": 5}, START)
    assert (seen, lost) == ({"a": Sighting(5, START)}, [])
    seen, lost = observe(seen, {"a": 5}, START + LEASE_MS - 1)
    assert lost == []
    moved, lost = observe(seen, {"a": 6}, START + LEASE_MS)
    assert (moved, lost) == ({"a": Sighting(6, START + LEASE_MS)}, [])
    _, lost = observe(seen, {"a": 5}, START + LEASE_MS)
    assert lost == ["a"]


def test_a_clock_that_goes_back_kills_nobody() -> None:
    seen, _ = observe({}, {"a": 5}, START)
    seen, lost = observe(seen, {"a": 5}, START - 10 * LEASE_MS)
    assert (seen, lost) == ({"a": Sighting(5, START - 10 * LEASE_MS)}, [])


async def test_peers_know_each_other(kit: Kit) -> None:
    other = await kit.another("http://two:8080")
    ((peer),) = await kit.books.trackers.peers()
    assert (peer.id, peer.url) == (other.trackers.id, "http://two:8080")
    await other.trackers.beat({"calls": 3})
    assert (await kit.books.trackers.peers())[0].info == {"calls": 3}
    kit.others.remove(other)
    await other.close()
    assert await kit.books.trackers.peers() == []


async def lose(kit: Kit) -> Books:
    """A second tracker that dies without a word, with calls in flight: its connections just end."""
    other = await kit.another()
    kit.others.remove(other)
    assert other._housekeeping is not None
    other._housekeeping.cancel()
    await asyncio.sleep(0)
    for call_id in ("open", "held", "done"):
        await other.reserve(call_id, kit.small, "paid", 100, 50)
    await other.hold("held", usage(100, 2))
    await other.settle("done", usage(100, 10))
    await other.storage.close()
    await other._writer.close()
    return other


async def test_what_a_lost_trackers_calls_reserved_is_given_back(kit: Kit) -> None:
    await lose(kit)
    await kit.reserve("mine")
    account = await kit.books.accounts.get("small")
    assert (account.balance, account.held) == (280, 600)
    await kit.books.recover()
    kit.clock.forward(ms=LEASE_MS - 1)
    assert await kit.books.recover() == 0
    kit.clock.forward(ms=1)
    released = await kit.books.recover()
    async with asyncio.timeout(20):
        # Housekeeping may have been first.
        while (await kit.books.accounts.get("small")).held != 200:
            released += await kit.books.recover()
    assert released in (0, 2)
    assert (await kit.books.accounts.get("small")).balance == 680
    assert await kit.rows("SELECT id, status, reason FROM calls ORDER BY id") == [
        ("done", "settled", None),
        ("held", "released", "its tracker was lost"),
        ("mine", "open", None),
        ("open", "released", "its tracker was lost"),
    ]
    assert (await kit.books.reports.check()).ok
    assert await kit.books.trackers.peers() == []


async def test_a_tracker_never_releases_the_calls_of_one_that_lives(kit: Kit) -> None:
    other = await kit.another()
    await other.reserve("theirs", kit.small, "paid", 100, 50)
    await kit.books.recover()
    for _ in range(5):
        kit.clock.forward(ms=LEASE_MS)
        await other.trackers.beat()
        await kit.books.recover()
    assert await kit.rows("SELECT status FROM calls") == [("open",)]
    assert (await other.settle("theirs", usage(100, 10))).charge == 120


async def test_a_tracker_that_was_asleep_is_alive_again_and_charges_nothing_it_lost(kit: Kit) -> None:
    other = await kit.another()
    assert other._housekeeping is not None
    other._housekeeping.cancel()
    await other.reserve("slept", kit.small, "paid", 100, 50)
    await kit.books.recover()
    kit.clock.forward(ms=LEASE_MS)
    await kit.books.recover()
    assert (await other.settle("slept", usage(100, 10))).status == "released"
    await other.trackers.beat()
    assert len(await kit.books.trackers.peers()) == 1
    await other.reserve("awake", kit.small, "paid", 100, 50)
    await kit.books.recover()
    assert (await other.settle("awake", usage(100, 10))).charge == 120
    with pytest.raises(asyncio.CancelledError):
        await other._housekeeping
    other._housekeeping = None


async def test_a_tracker_that_closes_with_calls_open_leaves_them_to_the_next(kit: Kit) -> None:
    other = await kit.another()
    await other.reserve("open", kit.small, "paid", 100, 50)
    kit.others.remove(other)
    await other.close()
    assert await kit.books.recover() in (0, 1)
    assert (await kit.books.accounts.get("small")).held == 0


async def test_the_same_call_at_two_trackers_reserves_once(kit: Kit) -> None:
    other = await kit.another()
    answers = await asyncio.gather(
        *(books.reserve("same", kit.small, "paid", 100, 50) for books in (kit.books, other))
    )
    assert len(answers) == 2
    assert (await kit.books.accounts.get("small")).held == 200
    settled = await asyncio.gather(*(books.settle("same", usage(100, 10)) for books in (kit.books, other)))
    assert sorted(settlement.repeated for settlement in settled) == [False, True]
    assert (await kit.books.accounts.get("small")).balance == 880


async def test_many_trackers_and_calls_leave_a_ledger_that_checks_out(kit: Kit) -> None:
    others = [kit.books, await kit.another("http://b"), await kit.another("http://c")]

    async def one(number: int) -> None:
        books = others[number % 3]
        key, model = (kit.key, "paid") if number % 2 else (kit.small, "free")
        call_id = f"c{number}"
        await books.reserve(call_id, key, model, 10, 10)
        if number % 7 == 0:
            await books.release(call_id, "no route")
        else:
            await books.settle(call_id, usage(10, number % 11))

    await asyncio.gather(*(one(number) for number in range(150)))
    for books in others:
        await books.flush()
    report = await kit.books.reports.check()
    assert report.problems == ()
    assert report.calls == 150
