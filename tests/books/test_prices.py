"""Charges and shares as integer arithmetic, over all inputs."""

from __future__ import annotations

from fractions import Fraction

import pytest
from books.kit import Kit
from hypothesis import given
from hypothesis import strategies as st

from meshnet.tracker.books import BooksError, Price, Usage, Work
from meshnet.tracker.books.prices import MAX_PRICE, MAX_TOKENS, PriceList, charge, half_up, shares

prices = st.builds(Price, st.just("m"), st.integers(0, 10**9), st.integers(0, 10**9), st.just(0))
works = st.lists(
    st.builds(
        Work,
        st.sampled_from(["a", "b", "c", "d"]),
        st.integers(1, 80),
        st.integers(0, 5_000),
        st.integers(0, 5_000),
    ),
    max_size=8,
)
tokens = st.integers(0, 100_000)


@pytest.mark.parametrize(
    ("numerator", "denominator", "rounded"),
    [(0, 7, 0), (1, 2, 1), (3, 2, 2), (5, 2, 3), (499, 1000, 0), (500, 1000, 1)],
)
def test_half_up(numerator: int, denominator: int, rounded: int) -> None:
    assert half_up(numerator, denominator) == rounded


@given(prices, tokens, tokens)
def test_a_charge_is_the_exact_price_rounded_half_up_once(price: Price, prompt: int, output: int) -> None:
    exact = Fraction(price.input * prompt + price.output * output, 1_000_000)
    assert charge(price, prompt, output) == (exact + Fraction(1, 2)).__floor__()


@given(prices, tokens, tokens, tokens, tokens)
def test_more_tokens_never_cost_less(price: Price, prompt: int, output: int, more: int, longer: int) -> None:
    assert charge(price, prompt, output) <= charge(price, prompt + more, output + longer)


def test_the_largest_charge_fits_64_bits() -> None:
    assert MAX_PRICE * MAX_TOKENS * 2 + 500_000 < 2**63


@given(prices, tokens, tokens, works, st.integers(0, 10_000))
def test_nodes_and_mesh_share_a_charge_to_the_micro_unit(
    price: Price, prompt: int, output: int, work: list[Work], mesh_share: int
) -> None:
    amount = charge(price, prompt, output)
    usage = Usage(prompt, output, tuple(work))
    split = shares(price, usage, amount, mesh_share)
    assert sum(share.amount for share in split) == amount
    assert all(share.amount >= 0 for share in split)
    nodes = sum(share.amount for share in split if share.node_id is not None)
    if any(share.node_id is not None for share in split):
        assert nodes == amount - half_up(amount * mesh_share, 10_000)
    assert len({(share.node_id, share.part) for share in split}) == len(split)


@given(prices, st.integers(1, 100_000), st.integers(1, 100_000), works)
def test_each_share_is_within_one_micro_unit_of_the_exact_one(
    price: Price, prompt: int, output: int, work: list[Work]
) -> None:
    amount = charge(price, prompt, output)
    prefill = sum(item.layers * item.prefill_tokens for item in work)
    decode = sum(item.layers * item.decode_tokens for item in work)
    cost = price.input * prompt + price.output * output
    if not prefill or not decode or not cost:
        return
    got = {
        (s.node_id, s.part): s.amount for s in shares(price, Usage(prompt, output, tuple(work)), amount, 0)
    }
    for node in {item.node_id for item in work}:
        for part, side, total, units in (
            (
                "prefill",
                price.input * prompt,
                prefill,
                [i.layers * i.prefill_tokens for i in work if i.node_id == node],
            ),
            (
                "decode",
                price.output * output,
                decode,
                [i.layers * i.decode_tokens for i in work if i.node_id == node],
            ),
        ):
            exact = Fraction(amount * side * sum(units), cost * total)
            assert abs(got.get((node, part), 0) - exact) < 1  # type: ignore[arg-type]


@given(prices, tokens, tokens, works)
def test_the_order_of_work_does_not_matter(price: Price, prompt: int, output: int, work: list[Work]) -> None:
    amount = charge(price, prompt, output)
    forth = shares(price, Usage(prompt, output, tuple(work)), amount, 700)
    back = shares(price, Usage(prompt, output, tuple(reversed(work))), amount, 700)
    assert forth == back


def test_a_prompt_that_nobody_computed_is_earned_by_the_decoders() -> None:
    price = Price("m", 1_000_000, 1_000_000, 0)
    split = shares(price, Usage(100, 10, (Work("a", 10, 0, 10),)), 110, 0)
    assert [(share.node_id, share.part, share.amount) for share in split] == [("a", "decode", 110)]


def test_without_any_work_the_mesh_takes_all() -> None:
    price = Price("m", 1_000_000, 1_000_000, 0)
    split = shares(price, Usage(100, 10), 110, 0)
    assert [(share.node_id, share.amount) for share in split] == [(None, 110)]


def test_prices_hold_from_their_time_on_and_ids_match_in_any_case() -> None:
    book = PriceList([Price("Llama", 1, 1, 100), Price("llama", 2, 2, 200), Price("*", 9, 9, 150)])
    assert book.at("LLAMA", 99).free
    assert book.at("llama", 100).input == 1
    assert book.at("llama", 250).input == 2
    assert book.at("other", 149).free
    assert book.at("other", 150).input == 9


async def test_prices_that_are_refused(kit: Kit) -> None:
    with pytest.raises(BooksError, match="input is -1"):
        await kit.books.prices.set("m", -1, 0)
    with pytest.raises(BooksError, match="has passed"):
        await kit.books.prices.set("m", 1, 1, kit.clock() - 1)


async def test_another_trackers_price_counts_here_soon(kit: Kit) -> None:
    other = await kit.another()
    await other.prices.set("paid", 5_000_000, 0)
    kit.clock.forward(ms=1_500)
    assert (await kit.reserve("c1")).amount == 500
