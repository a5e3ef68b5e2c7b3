"""Rate limits as state machines."""

from __future__ import annotations

from books.kit import Kit
from hypothesis import given
from hypothesis import strategies as st

from meshnet.tracker.books import Reservation
from meshnet.tracker.books.limits import MINUTE_MS, TRACKED_KEYS, Limited, Limits

START = 1_000_000


def test_a_minutes_worth_at_once_then_one_by_one() -> None:
    limits = Limits()
    assert [limits.admit(1, 3, None, 10, START) for _ in range(3)] == [None, None, None]
    refused = limits.admit(1, 3, None, 10, START)
    assert refused == Limited("requests_per_minute", 3, 20)
    assert isinstance(limits.admit(1, 3, None, 10, START + 19_999), Limited)
    assert limits.admit(1, 3, None, 10, START + 20_000) is None


def test_retry_after_is_when_the_next_request_passes() -> None:
    limits = Limits()
    for _ in range(7):
        limits.admit(1, 7, None, 1, START)
    refused = limits.admit(1, 7, None, 1, START)
    assert isinstance(refused, Limited)
    assert limits.admit(1, 7, None, 1, START + 1000 * refused.retry_after) is None


def test_a_request_larger_than_the_limit_passes_and_is_paid_off() -> None:
    limits = Limits()
    assert limits.admit(1, None, 60, 180, START) is None
    refused = limits.admit(1, None, 60, 1, START)
    assert refused == Limited("tokens_per_minute", 60, 121)
    assert limits.admit(1, None, 60, 1, START + 121_000) is None


def test_unused_tokens_come_back() -> None:
    limits = Limits()
    limits.admit(1, None, 100, 1_000, START)
    limits.give_back(1, 990)
    assert limits.admit(1, None, 100, 80, START) is None
    assert limits.admit(1, None, 100, 1, START) is None
    limits.give_back(1, 10**9)
    assert limits.admit(1, None, 100, 100, START) is None
    assert limits.admit(1, None, 100, 1, START) is not None


def test_keys_do_not_share_and_a_changed_limit_holds_at_once() -> None:
    limits = Limits()
    assert limits.admit(1, 1, None, 1, START) is None
    assert limits.admit(2, 1, None, 1, START) is None
    assert limits.admit(1, 1, None, 1, START) is not None
    assert limits.admit(1, 0, None, 1, START + 10 * MINUTE_MS) is not None


def test_a_clock_that_goes_back_fills_nothing() -> None:
    limits = Limits()
    assert limits.admit(1, 1, None, 1, START) is None
    assert limits.admit(1, 1, None, 1, START - 10 * MINUTE_MS) is not None
    assert limits.admit(1, 1, None, 1, START + MINUTE_MS) is None


def test_the_number_of_keys_is_bounded() -> None:
    limits = Limits()
    for key in range(TRACKED_KEYS + 10):
        limits.admit(key, 1, None, 1, START)
    assert len(limits._buckets) == TRACKED_KEYS


@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 5)), min_size=1, max_size=40),
)
def test_never_more_than_the_limit_and_what_filled_since(limit: int, arrivals: list[tuple[int, int]]) -> None:
    limits, now, passed = Limits(), START, 0
    for pause, burst in arrivals:
        now += pause
        for _ in range(burst):
            passed += limits.admit(1, limit, None, 1, now) is None
        assert passed <= limit + limit * (now - START) / MINUTE_MS


async def test_a_key_over_its_limit_is_told_when_to_come_back(kit: Kit) -> None:
    key, _ = await kit.books.keys.create("home", "slow", requests_per_minute=1, tokens_per_minute=10_000)
    assert isinstance(await kit.books.reserve("c1", key, "free", 10, 10), Reservation)
    refusal = await kit.refused("c2", key, "free", 10, 10)
    assert (refusal.code, refusal.status, refusal.retry_after) == ("rate_limit_exceeded", 429, 60)
    assert refusal.type == "rate_limit_error"
    kit.clock.forward(s=60)
    assert isinstance(await kit.books.reserve("c3", key, "free", 10, 10), Reservation)


async def test_a_call_that_asks_again_for_less_is_one_request(kit: Kit) -> None:
    key, _ = await kit.books.keys.create("small", "one", requests_per_minute=2, tokens_per_minute=10_000)
    for call_id in ("c1", "c2"):
        assert (await kit.refused(call_id, key, "paid", 2_000, 10)).code == "insufficient_quota"
        answer = await kit.books.reserve(call_id, key, "paid", 100, 10, counted=True)
        assert isinstance(answer, Reservation)
    assert (await kit.refused("c3", key, "paid", 1, 1)).code == "rate_limit_exceeded"


async def test_settled_calls_give_back_the_tokens_they_did_not_use(kit: Kit) -> None:
    from books.kit import usage

    key, _ = await kit.books.keys.create("home", "few", tokens_per_minute=100)
    await kit.books.reserve("c1", key, "free", 10, 1_000)
    assert (await kit.refused("c2", key, "free", 10, 10)).code == "rate_limit_exceeded"
    await kit.books.settle("c1", usage(10, 20))
    assert isinstance(await kit.books.reserve("c3", key, "free", 10, 10), Reservation)
