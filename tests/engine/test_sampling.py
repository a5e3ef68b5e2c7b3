"""Sampling: what is kept, what is drawn, and that neither hangs on how a session was built."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from meshnet.engine.base import EngineError, GrammarError, SamplingParams
from meshnet.engine.grammar import Grammar
from meshnet.engine.sampling import SlotSampler, draw, keep, log_sum_exp, uniform
from meshnet.engine.tokenizer import Tokenizer

N = 1000
EOG = frozenset({2})

JSON_GRAMMAR = r"""
root   ::= "{" pair ("," pair)* "}"
pair   ::= "\"" [a-z]+ "\":" value
value  ::= [0-9]+ | "\"" [a-z ]* "\"" | "true" | "false"
"""

DEAD_END = r'root ::= "yes" [^\x00-\U7FFFFFFF]'
"""After its word it wants a character that is none."""


def no_grammar(text: str) -> Grammar:
    raise AssertionError(text)


def sampler(**fields: object) -> SlotSampler:
    return SlotSampler(SamplingParams(**fields), N, EOG, no_grammar)  # type: ignore[arg-type]


def row(seed: int = 0, size: int = N, spread: float = 2.0) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


# draws


def test_uniform_is_a_function_of_its_arguments_with_no_pattern() -> None:
    numbers = np.array(
        [
            uniform(seed, choice, position)
            for seed in range(20)
            for choice in range(5)
            for position in range(100)
        ]
    )
    assert len(set(numbers.tolist())) == len(numbers)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 0.01
    histogram = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert histogram.min() > 400
    assert histogram.max() < 600
    lagged = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(lagged) < 0.03
    assert uniform(1, 2, 3) == 0.1300857085561754
    assert uniform(-1, 0, 0) != uniform(1, 0, 0)
    assert uniform(1, 0, 0, 1) != uniform(1, 0, 0, 0)


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05] + [1e-9] * 600, dtype=np.float32))
    params = SamplingParams(seed=9)
    counts = Counter(draw(logits, params, position) for position in range(4000))
    for token, share in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert abs(counts[token] / 4000 - share) < 0.03


def test_temperature_sharpens_and_flattens() -> None:
    logits = row()
    best = int(logits.argmax())
    shares = []
    for temperature in (0.1, 0.7, 1.5):
        params = SamplingParams(temperature=temperature, seed=4)
        shares.append(sum(draw(logits, params, position) == best for position in range(300)) / 300)
    assert shares[0] > shares[1] > shares[2]
    assert draw(logits, SamplingParams(temperature=0.0), 0) == best
    assert draw(logits, SamplingParams(temperature=1e-9), 0) == best


def reference_kept(weights: np.ndarray[tuple[int], np.dtype[np.float32]], params: SamplingParams) -> set[int]:
    """Top-k, top-p and min-p the slow way."""
    order = sorted(range(len(weights)), key=lambda i: (-float(weights[i]), i))
    if params.top_k:
        order = order[: params.top_k]
    # Added up as `keep` does, to the last bit: where a sum just reaches the goal, no tolerance is right.
    goal = params.top_p * float(weights[sorted(order)].sum(dtype=np.float64))
    if params.top_p < 1.0:
        total, kept = 0.0, []
        for i in order:
            kept.append(i)
            total += float(weights[i])
            if total >= goal:
                break
        order = kept
    return {i for i in order if float(weights[i]) >= params.min_p}


@example(values=[0, 0, -54], top_k=0, top_p=0.5, min_p=0.0)
@given(
    values=st.lists(st.integers(-60, 0), min_size=2, max_size=80),
    top_k=st.integers(0, 90),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 0.01, 0.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_keep_equals_the_slow_way(values: list[int], top_k: int, top_p: float, min_p: float) -> None:
    logits = np.array(values, dtype=np.float32) / 2
    weights = np.exp(logits - logits.max())
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=np.float32(min_p).item())
    index = keep(weights, params)
    kept = set(range(len(weights))) if index is None else set(index.tolist())
    assert kept == reference_kept(weights, params)
    if index is not None:
        assert list(index) == sorted(index)


@given(
    size=st.sampled_from([1, 2, 255, 256, 257, 511, 512, 513, 5000]),
    position=st.integers(0, 1 << 40),
    banned=st.integers(0, 4999),
)
def test_a_banned_token_is_never_drawn(size: int, position: int, banned: int) -> None:
    logits = np.zeros(size, dtype=np.float32)
    banned %= size
    logits[banned:] = -np.inf
    logits[0] = 0.0
    token = draw(logits, SamplingParams(seed=position & 7), position)
    assert 0 <= token < max(banned, 1)


# penalties, bias, logprobs


def test_penalties_count_generated_tokens_only() -> None:
    logits = np.zeros(N, dtype=np.float32)
    logits[7], logits[8] = 3.0, 2.5
    plain = {"temperature": 0.0, "prompt_tokens": 4}
    state = sampler(presence_penalty=1.0, **plain)
    state.observe(np.array([7, 7, 7, 7], dtype=np.int32), 0)  # the prompt
    assert state.sample(logits, 4).token == 7
    assert state.sample(logits, 5).token == 8  # 7 stands at 4 now
    assert state.sample(logits, 6).token == 7  # both are punished alike
    frequency = sampler(frequency_penalty=0.3, **plain)
    assert [frequency.sample(logits, 4 + i).token for i in range(6)] == [7, 7, 8, 7, 8, 7]
    repeat = sampler(repeat_penalty=2.0, **plain)
    assert [repeat.sample(logits, 4 + i).token for i in range(3)] == [7, 8, 7]
    negative = np.full(N, -5.0, dtype=np.float32)
    negative[9], negative[10] = -1.0, -1.5
    repeat = sampler(repeat_penalty=2.0, **plain)
    assert [repeat.sample(negative, 4 + i).token for i in range(2)] == [9, 10]


def test_logit_bias() -> None:
    logits = row()
    best, second = (int(i) for i in np.argsort(-logits)[:2])
    assert sampler(temperature=0.0, logit_bias=((best, -100.0),)).sample(logits, 0).token == second
    assert sampler(temperature=0.0, logit_bias=((5, 100.0),)).sample(logits, 0).token == 5
    banned = sampler(seed=1, logit_bias=((best, -math.inf),))
    assert all(banned.sample(logits, position).token != best for position in range(200))


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = row()
    exact = logits.astype(np.float64) - math.log(np.exp(logits.astype(np.float64)).sum())
    found = sampler(temperature=0.2, logprobs=5, logit_bias=((3, 50.0),), seed=1).sample(logits, 0)
    assert found.token == 3
    assert found.logprob == pytest.approx(exact[3], abs=1e-5)
    order = np.argsort(-logits, kind="stable")[:5]
    assert [token for token, _ in found.top] == order.tolist()
    assert [logprob for _, logprob in found.top] == pytest.approx(exact[order].tolist(), abs=1e-5)
    assert sampler(logprobs=0).sample(logits, 0).top == ()
    assert sampler().sample(logits, 0).logprob is None
    ties = np.zeros(N, dtype=np.float32)
    assert [token for token, _ in sampler(logprobs=3).sample(ties, 0).top] == [0, 1, 2]
    assert log_sum_exp(ties) == pytest.approx(math.log(N))


def test_the_end_token_ends() -> None:
    logits = np.zeros(N, dtype=np.float32)
    logits[2] = 9.0
    assert sampler(temperature=0.0).sample(logits, 0).end
    logits[3] = 10.0
    assert not sampler(temperature=0.0).sample(logits, 0).end


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_refused(bad: float) -> None:
    logits = row()
    logits[17] = bad
    for fields in ({"temperature": 0.0}, {"seed": 3}):
        with pytest.raises(EngineError, match="not finite"):
            sampler(**fields).sample(logits, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", -0.5),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("repeat_penalty", 0.0),
        ("logprobs", 21),
        ("prompt_tokens", -1),
        ("choice", -1),
        ("logit_bias", ((N, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, math.inf),)),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(EngineError, match=name):
        sampler(**{name: value})


# history

FULL = SamplingParams(
    temperature=0.8,
    top_p=0.95,
    top_k=200,
    min_p=0.001,
    seed=77,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    repeat_penalty=1.1,
    logit_bias=((4, 1.5),),
    prompt_tokens=10,
)


def run(state: SlotSampler, start: int, count: int) -> list[int]:
    return [state.sample(row(position), position).token for position in range(start, start + count)]


@pytest.mark.parametrize("cut", [0, 1, 13, 30])
def test_a_rebuilt_sampler_goes_on_the_same(cut: int) -> None:
    expected = run(SlotSampler(FULL, N, EOG, no_grammar), 10, 40)
    rebuilt = SlotSampler(FULL, N, EOG, no_grammar)
    tokens = np.array([1] * 10 + expected[:cut], dtype=np.int32)
    rebuilt.observe(tokens[:6], 0)
    rebuilt.observe(tokens[6:], 6)
    assert run(rebuilt, 10 + cut, 40 - cut) == expected[cut:]


def test_rolled_back_and_forked_samplers_go_on_the_same() -> None:
    state = SlotSampler(FULL, N, EOG, no_grammar)
    expected = run(state, 10, 40)
    state.truncate(24)  # the token at 24 stands
    assert run(state, 25, 25) == expected[15:]
    state.truncate(24)
    copy = state.fork(no_grammar)
    state.sample(np.zeros(N, dtype=np.float32), 25)
    assert run(copy, 25, 25) == expected[15:]


def test_the_choice_and_the_seed_change_the_draws_and_nothing_else_does() -> None:
    expected = run(SlotSampler(FULL, N, EOG, no_grammar), 10, 40)
    for change in ({"choice": 1}, {"seed": 78}):
        other = SlotSampler(dataclasses.replace(FULL, **change), N, EOG, no_grammar)  # type: ignore[arg-type]
        assert run(other, 10, 40) != expected
    again = SlotSampler(dataclasses.replace(FULL, logprobs=3), N, EOG, no_grammar)
    assert run(again, 10, 40) == expected


def test_unknown_earlier_tokens_are_refused_where_they_matter() -> None:
    with pytest.raises(EngineError, match=r"positions 10\.\.14; replay them first"):
        SlotSampler(FULL, N, EOG, no_grammar).sample(row(), 15)
    assert sampler(seed=1).sample(row(), 15).position == 15
    with pytest.raises(EngineError, match="up to position 10, not up to 12"):
        SlotSampler(FULL, N, EOG, no_grammar).observe(np.array([1], dtype=np.int32), 12)
    with pytest.raises(EngineError, match="outside the vocabulary"):
        SlotSampler(FULL, N, EOG, no_grammar).observe(np.array([N], dtype=np.int32), 10)


# grammar


def grammar_sampler(tokenizer: Tokenizer, **fields: object) -> SlotSampler:
    params = SamplingParams(grammar=JSON_GRAMMAR, **fields)  # type: ignore[arg-type]
    return SlotSampler(params, tokenizer.n_vocab, tokenizer.eog, tokenizer.grammar)


def flat_row(tokenizer: Tokenizer, position: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    logits = row(1000 + position, tokenizer.n_vocab, 1.0)
    logits[list(tokenizer.eog)] = 9.0  # so that it ends where it may, and gets there
    for text in ('"', "}", '":', '"}'):
        logits[tokenizer.encode(text)[-1]] = 6.0
    return logits


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"seed": 5}, {"seed": 6, "top_k": 40}])
def test_what_is_sampled_obeys_the_grammar_to_its_end(tokenizer: Tokenizer, fields: dict[str, float]) -> None:
    state = grammar_sampler(tokenizer, **fields)
    tokens: list[int] = []
    for position in range(200):
        found = state.sample(flat_row(tokenizer, position), position)
        if found.end:
            break
        tokens.append(found.token)
    else:
        pytest.fail("the grammar never ended")
    text = tokenizer.decode(tokens)
    assert text.startswith("{")
    assert text.endswith("}")
    checker = tokenizer.grammar(JSON_GRAMMAR)
    for token in tokens:
        assert checker.allows(token)
        checker.accept(token)
    assert checker.allows(tokenizer.eos)
    assert state.sample(flat_row(tokenizer, 999), len(tokens) + 1).end  # beyond the end: still the end
    checker.close()
    state.close()


def test_a_rebuilt_grammar_goes_on_the_same(tokenizer: Tokenizer) -> None:
    state = grammar_sampler(tokenizer, seed=8)
    expected = [state.sample(flat_row(tokenizer, i), i).token for i in range(12)]
    rebuilt = grammar_sampler(tokenizer, seed=8)
    rebuilt.observe(expected[:7], 0)
    state.truncate(6)
    for each in (
        rebuilt,
        state,
        state.fork(tokenizer.grammar),
    ):
        assert [each.sample(flat_row(tokenizer, i), i).token for i in range(7, 12)] == expected[7:]
        each.close()


def test_a_grammar_that_allows_no_token_is_an_error_and_no_end(tokenizer: Tokenizer) -> None:
    params = SamplingParams(grammar=DEAD_END, temperature=0.0)
    state = SlotSampler(params, tokenizer.n_vocab, tokenizer.eog, tokenizer.grammar)
    said: list[bytes] = []

    def go_on() -> None:
        for position in range(4):
            sampled = state.sample(row(position, tokenizer.n_vocab), position)
            assert not sampled.end
            said.append(tokenizer.piece(sampled.token))

    with pytest.raises(GrammarError, match="none of the vocabulary's tokens"):
        go_on()
    assert b"".join(said) == b"yes"


def test_tokens_that_a_grammar_does_not_allow_are_refused(tokenizer: Tokenizer) -> None:
    state = grammar_sampler(tokenizer)
    with pytest.raises(EngineError, match="not one that the grammar allows"):
        state.observe(tokenizer.encode("hello"), 0)
    state.close()


@pytest.mark.parametrize(
    "text", ['roof ::= "a"', "root ::= foo", 'root ::= root "a"', "root ::= [", "\0", "a" * (1 << 19)]
)
def test_grammars_that_cannot_be_used_are_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(EngineError, match="grammar"):
        tokenizer.grammar(text)


# weighing


def test_weighing_an_own_answer_finds_nothing_and_draws_the_same() -> None:
    """Whatever was sampled, with penalties, is what the same rows draw again: kept, and the greatest."""
    for params in (FULL, dataclasses.replace(FULL, temperature=0.0)):
        drawing = SlotSampler(params, N, EOG, no_grammar)
        answer = [drawing.sample(row(position), position).token for position in range(10, 40)]
        checked = dataclasses.replace(params, prompt_tokens=10, check=tuple(answer))
        state = SlotSampler(checked, N, EOG, no_grammar)
        for position, token in enumerate(answer, 10):
            found = state.sample(row(position), position)
            assert found.token == token
            assert found.weight is not None
            assert found.weight.kept
            if params.greedy:
                assert found.weight.logit == found.weight.max_logit


def test_a_foreign_token_weighs_less_and_stands_all_the_same() -> None:
    logits = row()
    worst, best = int(logits.argmin()), int(logits.argmax())
    state = sampler(temperature=0.0, presence_penalty=5.0, check=(worst, best))
    first = state.sample(logits, 0)
    assert first.weight is not None
    assert first.token == best
    assert first.weight.max_logit - first.weight.logit > 5.0
    # The token that stands is penalised from then on, not the one that was drawn.
    second = state.sample(logits, 1)
    assert second.token == best
    assert second.weight is not None
    assert second.weight.logit == second.weight.max_logit == float(logits[best])
    kept = sampler(temperature=1.0, top_k=3, check=(worst, best))
    assert [kept.sample(logits, p).weight.kept for p in (0, 1)] == [False, True]  # type: ignore[union-attr]
    barred = sampler(temperature=0.0, check=(best,), logit_bias=((best, -math.inf),)).sample(logits, 0).weight
    assert barred is not None
    assert barred.logit == -1e30
    with pytest.raises(EngineError, match="check names token 1000"):
        sampler(check=(N,))


def test_a_grammar_counts_when_tokens_are_weighed(tokenizer: Tokenizer) -> None:
    state = grammar_sampler(tokenizer, temperature=0.0)
    tokens: list[int] = []
    while True:
        found = state.sample(flat_row(tokenizer, len(tokens)), len(tokens))
        tokens.append(found.token)
        if found.end:
            break
    honest = grammar_sampler(tokenizer, temperature=0.0, check=tuple(tokens))
    for position, token in enumerate(tokens):
        found = honest.sample(flat_row(tokenizer, position), position)
        assert found.token == token
        assert found.weight is not None
        assert found.weight.logit == found.weight.max_logit
    (wrong,) = tokenizer.encode("!")[-1:].tolist()
    lawless = grammar_sampler(tokenizer, temperature=0.0, check=(wrong, tokens[1]))
    first = lawless.sample(flat_row(tokenizer, 0), 0)
    assert first.weight is not None
    assert not first.weight.kept
    assert first.weight.logit == -1e30
    assert lawless.sample(flat_row(tokenizer, 1), 1).weight is not None
