"""What any engine must do, whatever computes its layers.

A subclass gives a `harness` fixture; everything here goes through the Engine protocol alone. Greedy tokens of
a cut model must equal the whole model's, and hidden states must be equal bit for bit wherever the design says
that they are: alone or in company, built in one go or rebuilt in chunks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import pytest
from support.pipeline import Pipeline, Tokens, with_prompt

from meshnet.engine.base import Engine, EngineError, Hidden, SamplingParams, Step

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=20, presence_penalty=0.3)
COUNT = 64


class Harness(Protocol):
    """How to get engines of the kind under test."""

    n_layers: int
    prompts: list[Tokens]
    """Three or more, some tens of tokens each."""
    long_prompt: Tokens
    """More than 512 tokens."""
    whole: Engine
    """All layers, 8 slots of at least 1,024 positions; shared, so leave its slots closed."""
    every: Engine
    """All layers, and every layer is an entry layer; shared, 4 slots."""
    reference: dict[int, list[int]]
    """`reference_tokens(whole, prompts)`."""

    def load(self, first: int, last: int) -> Engine:
        """An engine with 8 slots."""


def reference_tokens(whole: Engine, prompts: list[Tokens]) -> dict[int, list[int]]:
    """The whole model's greedy tokens, each prompt alone."""
    pipeline = Pipeline.of(whole)
    found = {}
    for slot, prompt in enumerate(prompts):
        found[slot] = pipeline.generate({0: prompt}, COUNT, GREEDY)[0]
    pipeline.close(0)
    assert len({tuple(tokens) for tokens in found.values()}) == len(found)
    return found


@contextmanager
def loaded(harness: Harness, *borders: int) -> Iterator[Pipeline]:
    """The model cut before each of the border layers, an engine per piece."""
    starts = [0, *borders]
    ends = [border - 1 for border in borders] + [harness.n_layers - 1]
    engines = [harness.load(start, end) for start, end in zip(starts, ends, strict=True)]
    try:
        yield Pipeline.of(*engines)
    finally:
        for engine in engines:
            engine.unload()


@contextmanager
def closing(pipeline: Pipeline, *slots: int) -> Iterator[Pipeline]:
    try:
        yield pipeline
    finally:
        pipeline.close(*slots)


def hidden_of(engine: Engine, slot: int, tokens: Tokens, end: int, rows: int = 256) -> Hidden:
    """All rows that leave layer `end` for tokens fed in chunks of `rows`; the slot stays open."""
    engine.open(slot, 0, end)
    found = []
    for start in range(0, len(tokens), rows):
        part = engine.run([Step(slot, start, tokens=tokens[start : start + rows])])[0].hidden
        assert part is not None
        found.append(part)
    return np.concatenate(found)


class EngineConformance:
    """Subclass it as `TestSomething` and give it a `harness` fixture."""

    # cut against whole

    def test_two_stages_give_the_whole_models_tokens(self, harness: Harness, border: int) -> None:
        with loaded(harness, border) as cut:
            assert cut.generate(dict(enumerate(harness.prompts)), COUNT, GREEDY) == harness.reference

    @pytest.mark.parametrize("fractions", [(0.1, 0.5), (0.34, 0.67), (0.25, 0.5, 0.75), (0.03, 0.5, 0.97)])
    def test_three_and_four_stages_give_the_whole_models_tokens(
        self, harness: Harness, fractions: tuple[float, ...]
    ) -> None:
        with loaded(harness, *(max(1, round(harness.n_layers * part)) for part in fractions)) as cut:
            assert cut.generate(dict(enumerate(harness.prompts)), COUNT, GREEDY) == harness.reference

    def test_a_long_prompt_in_chunks(self, harness: Harness) -> None:
        assert len(harness.long_prompt) > 512
        whole = Pipeline.of(harness.whole)
        expected = whole.generate({0: harness.long_prompt}, 20, GREEDY)
        whole.close(0)
        with loaded(harness, harness.n_layers // 2) as cut:
            assert cut.generate({0: harness.long_prompt}, 20, GREEDY) == expected

    def test_a_wrong_start_layer_changes_the_tokens(self, harness: Harness) -> None:
        middle = harness.n_layers // 2
        for start in (middle - 1, middle + 1):  # layers run twice, layers left out
            wrong = Pipeline((harness.every, 0, middle - 1), (harness.every, start, harness.n_layers - 1))
            head, tail = wrong.stages
            head.engine.open(0, head.start, head.end)
            tail.engine.open(1, tail.start, tail.end, with_prompt(GREEDY, harness.prompts[0]))
            tokens, found = harness.prompts[0], []
            for _ in range(24):
                hidden = head.engine.run([Step(0, head.engine.position(0), tokens=tokens)])[0].hidden
                step = Step(1, tail.engine.position(1), hidden=hidden, sample=1)
                found.append(tail.engine.run([step])[0].sampled[0].token)
                tokens = np.array(found[-1:], dtype=np.int32)
            harness.every.close(0)
            harness.every.close(1)
            assert found != harness.reference[0][:24]

    def test_starts_and_stops_at_any_layer(self, harness: Harness) -> None:
        tokens = harness.prompts[0]
        last = harness.n_layers - 1
        outputs = {end: hidden_of(harness.whole, 0, tokens, end) for end in range(last)}
        harness.whole.close(0)
        for start in range(1, last + 1):
            end = min(start + start % 5, last - 1)
            if end < start:
                continue
            harness.every.open(0, start, end)
            result = harness.every.run([Step(0, 0, hidden=outputs[start - 1])])[0].hidden
            assert result is not None
            assert np.array_equal(result, outputs[end]), f"layers {start}-{end}"
        harness.every.close(0)

    def test_one_engine_runs_two_stages_of_one_session_in_two_slots(self, harness: Harness) -> None:
        every, border = harness.every, harness.n_layers // 3
        every.open(2, 0, border - 1)
        every.open(3, border, harness.n_layers - 1, with_prompt(GREEDY, harness.prompts[1]))
        tokens, found = harness.prompts[1], []
        for _ in range(COUNT):
            hidden = every.run([Step(2, every.position(2), tokens=tokens)])[0].hidden
            sampled = every.run([Step(3, every.position(3), hidden=hidden, sample=1)])[0].sampled
            found.append(sampled[0].token)
            tokens = np.array(found[-1:], dtype=np.int32)
        every.close(2)
        every.close(3)
        assert found == harness.reference[1]

    # company

    def test_eight_sessions_in_one_batch_equal_each_alone(self, harness: Harness) -> None:
        prompts = {slot: harness.long_prompt[17 * slot :][: 12 + 3 * slot] for slot in range(8)}
        with loaded(harness, harness.n_layers // 2) as cut:
            alone = {}
            for slot, prompt in prompts.items():
                alone[slot] = cut.generate({slot: prompt}, 24, GREEDY)[slot]
                cut.close(slot)
            assert len({tuple(tokens) for tokens in alone.values()}) == 8
            assert cut.generate(prompts, 24, GREEDY) == alone

    @pytest.mark.parametrize(
        "shape",
        [
            {7: 1, 0: 1, 3: 1, 1: 1},
            {0: 2, 1: 1, 2: 2, 5: 3},
            {6: 5, 5: 5, 4: 5},
            {0: 40, 1: 40, 2: 40},
            {2: 1, 3: 70},
        ],
    )
    def test_rows_come_back_where_they_belong(self, harness: Harness, shape: dict[int, int]) -> None:
        """Any mix of slots and row counts, in any order: bit for bit what each session gives alone."""
        end = harness.n_layers // 2
        engine = harness.whole
        rng = np.random.default_rng(3)
        tokens = {slot: rng.integers(100, 20000, 10 + rows, dtype=np.int32) for slot, rows in shape.items()}
        alone: dict[int, Hidden] = {}
        for slot in shape:
            hidden_of(engine, slot, tokens[slot][:10], end)
            by_itself = engine.run([Step(slot, 10, tokens=tokens[slot][10:])])[0].hidden
            assert by_itself is not None
            alone[slot] = by_itself
            assert engine.rollback(slot, 10) == 10
        results = engine.run([Step(slot, 10, tokens=tokens[slot][10:]) for slot in shape])
        assert [result.slot for result in results] == list(shape)
        for result in results:
            assert result.hidden is not None
            assert result.hidden.shape == (shape[result.slot], engine.info.n_embd)
            assert np.array_equal(result.hidden, alone[result.slot]), f"slot {result.slot}"
            assert engine.position(result.slot) == 10 + shape[result.slot]
            engine.close(result.slot)

    def test_sampled_tokens_go_to_their_own_session(self, harness: Harness) -> None:
        pipeline = Pipeline.of(harness.whole)
        prompts = {slot: harness.prompts[i % 3][: 9 + 2 * slot] for i, slot in enumerate((5, 0, 2, 1))}
        with closing(pipeline, *prompts):
            alone = {}
            for slot, prompt in prompts.items():
                alone[slot] = pipeline.generate({slot: prompt}, 8, GREEDY)[slot]
                pipeline.close(slot)
            assert pipeline.generate(prompts, 8, GREEDY) == alone

    # state

    def test_rollback_and_going_on_gives_the_same_bits(self, harness: Harness) -> None:
        engine, end = harness.whole, harness.n_layers // 2
        tokens = harness.prompts[0]
        hidden_of(engine, 0, tokens, end)
        first = [engine.run([Step(0, len(tokens) + i, tokens=tokens[i : i + 1])])[0].hidden for i in range(6)]
        reached = engine.rollback(0, len(tokens) + 2)
        assert reached <= len(tokens) + 2
        assert engine.position(0) == reached
        replayed = np.concatenate([tokens, tokens[:6]])
        for position in range(reached, len(replayed)):
            again = engine.run([Step(0, position, tokens=replayed[position : position + 1])])[0].hidden
            if position >= len(tokens) + 2:
                expected = first[position - len(tokens)]
                assert again is not None
                assert expected is not None
                assert np.array_equal(again, expected)
        engine.close(0)

    def test_rollback_of_rejected_drafts(self, harness: Harness) -> None:
        """Verifying steps with right and wrong drafts give the tokens of plain decoding."""
        prompt, expected = harness.prompts[0], harness.reference[0]
        pipeline = Pipeline.of(harness.whole)
        with closing(pipeline, 0):
            pipeline.open(0, with_prompt(GREEDY, prompt))
            found = [pipeline.prefill(0, prompt).token]
            while len(found) < 40:
                right = expected[len(found) : len(found) + 3]
                drafts = [*right[: len(found) % 4], 7, 8, 9][:4]
                sampled = pipeline.run({0: [found[-1], *drafts]}, sample=1 + len(drafts))[0]
                kept = 0
                while kept < len(drafts) and drafts[kept] == sampled[kept].token:
                    kept += 1
                assert kept >= len(found) % 4
                found += [each.token for each in sampled[: kept + 1]]
                wanted = len(prompt) + len(found) - 1
                assert harness.whole.rollback(0, wanted) == wanted
            assert found[:40] == expected[:40]

    def test_fork_is_a_copy_that_goes_its_own_way(self, harness: Harness) -> None:
        prompt, expected = harness.prompts[2], harness.reference[2]
        with loaded(harness, harness.n_layers // 2) as cut:
            found = cut.generate({0: prompt}, 20, GREEDY)
            assert found[0] == expected[:20]
            for stage in cut.stages:
                stage.engine.fork(0, 4)
                assert stage.engine.position(4) == stage.engine.position(0)
            other = {0: [*found[0][:-1], 11]}  # the original leaves the path
            cut.go_on(other, 10)
            copy = {4: found[0]}
            cut.go_on(copy, COUNT - 20)
            assert copy[4] == expected
            cut.close(0)
            assert cut.position(4) == len(prompt) + COUNT - 1

    def test_rebuilt_in_chunks_it_goes_on_with_the_same_bits(self, harness: Harness) -> None:
        """Only where the engine says that it does (`replay_rows`); one row at a time holds everywhere."""
        engine, end = harness.whole, harness.n_layers - 2
        prompt = harness.prompts[1]
        rng = np.random.default_rng(5)
        generated = rng.integers(100, 20000, 130, dtype=np.int32)
        hidden_of(engine, 0, prompt, end)
        first = [
            engine.run([Step(0, len(prompt) + i, tokens=generated[i : i + 1])])[0].hidden
            for i in range(len(generated))
        ]
        engine.close(0)
        hidden_of(engine, 1, prompt, end)
        at = 0
        for rows in (1, engine.info.replay_rows, max(1, engine.info.replay_rows - 1), 1, 1):
            part = generated[at : at + rows]
            again = engine.run([Step(1, len(prompt) + at, tokens=part)])[0].hidden
            assert again is not None
            for row in range(len(part)):
                expected = first[at + row]
                assert expected is not None
                assert np.array_equal(again[row], expected[0])
            at += len(part)
        engine.close(1)

    def test_seeded_sampling_goes_on_where_it_is_rebuilt(self, harness: Harness) -> None:
        prompt = harness.prompts[0]
        whole = Pipeline.of(harness.whole)
        expected = whole.generate({0: prompt}, COUNT, SAMPLED)[0]
        again = whole.generate({0: prompt}, COUNT, SAMPLED)[0]
        other = whole.generate({0: prompt}, COUNT, dataclasses.replace(SAMPLED, seed=21))[0]
        whole.close(0)
        assert again == expected
        assert other != expected
        with loaded(harness, harness.n_layers // 2) as cut:
            found = {3: expected[:25]}
            cut.rebuild(3, prompt, found[3], SAMPLED, harness.whole.info.replay_rows)
            cut.go_on(found, COUNT - 25)
            assert found[3] == expected

    def test_choices_of_one_call_draw_differently(self, harness: Harness) -> None:
        prompt = harness.prompts[0]
        whole = Pipeline.of(harness.whole)
        slots = range(4)
        with closing(whole, *slots):
            for choice in slots:
                whole.open(choice, with_prompt(dataclasses.replace(SAMPLED, choice=choice), prompt))
            found = {slot: [whole.prefill(slot, prompt).token] for slot in slots}
            whole.go_on(found, 20)
        assert len({tuple(tokens) for tokens in found.values()}) == 4

    def test_choices_by_fork_equal_choices_from_scratch(self, harness: Harness) -> None:
        prompt = harness.prompts[0]
        engine = harness.whole
        whole = Pipeline.of(engine)
        params = [with_prompt(dataclasses.replace(SAMPLED, choice=choice), prompt) for choice in range(3)]
        expected = []
        for each in params:
            whole.open(0, each)
            found = {0: [whole.prefill(0, prompt).token]}
            whole.go_on(found, 12)
            expected.append(found[0])
        whole.open(0, params[0])
        whole.run({0: prompt[:-1]}, sample=0)
        for choice in (1, 2):
            engine.fork(0, choice, params[choice])
        first = whole.run(dict.fromkeys(range(3), prompt[-1:]))
        forked = {slot: [first[slot][0].token] for slot in range(3)}
        whole.go_on(forked, 12)
        whole.close(0, 1, 2)
        assert [forked[choice] for choice in range(3)] == expected

    # refusals

    def test_wrong_steps_are_refused_and_the_session_lives_on(self, harness: Harness) -> None:
        engine, prompt = harness.whole, harness.prompts[0]
        info = engine.info
        whole = Pipeline.of(engine)
        found = whole.generate({0: prompt}, 10, GREEDY)
        at = engine.position(0)
        one = np.array([5], dtype=np.int32)
        row = np.zeros((1, info.n_embd), dtype=np.float32)
        engine.open(1, 0, 3)
        wrong = {
            "position": [Step(0, at + 1, tokens=one, sample=1)],
            "expected": [Step(0, at - 1, tokens=one, sample=1)],
            "not open": [Step(4, 0, tokens=one)],
            "slot 99": [Step(99, 0, tokens=one)],
            "tokens": [Step(0, at, hidden=row, sample=1)],
            "nothing else": [Step(0, at, tokens=one, hidden=row)],
            "takes tokens": [Step(0, at)],
            "int32": [Step(0, at, tokens=np.array([5], dtype=np.int64))],
            "n > 0": [Step(0, at, tokens=np.zeros(0, dtype=np.int32))],
            "vocabulary": [Step(0, at, tokens=np.array([info.n_vocab], dtype=np.int32))],
            "outside": [Step(0, at, tokens=np.array([-1], dtype=np.int32))],
            "sample 2": [Step(0, at, tokens=one, sample=2)],
            "sample 1": [Step(1, 0, tokens=one, sample=1)],
            "twice": [Step(0, at, tokens=one), Step(0, at + 1, tokens=one)],
            "others": [Step(0, at, tokens=one, sample=1), Step(1, 0, tokens=one)],
            "the most": [Step(1, 0, tokens=np.zeros(info.max_rows + 1, dtype=np.int32))],
        }
        for words, steps in wrong.items():
            with pytest.raises(EngineError, match=words):
                engine.run(steps)
            assert engine.position(0) == at
        engine.close(1)
        whole.go_on(found, COUNT - 10)
        engine.close(0)
        assert found[0] == harness.reference[0]

    def test_damaged_hidden_states_are_refused_and_the_session_lives_on(self, harness: Harness) -> None:
        engine, width = harness.every, harness.every.info.n_embd
        tokens = harness.prompts[0][:8]
        good = hidden_of(engine, 0, tokens, 4)
        engine.open(1, 5, 8)
        expected = engine.run([Step(1, 0, hidden=good)])[0].hidden
        assert expected is not None
        for value in (np.nan, np.inf, -np.inf):
            bad = good.copy()
            bad[3, width // 2] = value
            with pytest.raises(EngineError, match="NaN or infinity"):
                engine.run([Step(1, 8, hidden=bad)])
        for shape in ((1, width - 1), (1, width + 1), (0, width), (1, 2, width)):
            with pytest.raises(EngineError, match="float32"):
                engine.run([Step(1, 8, hidden=np.zeros(shape, dtype=np.float32))])
        with pytest.raises(EngineError, match="float32"):
            engine.run([Step(1, 8, hidden=np.zeros((1, width)))])  # type: ignore[arg-type]
        assert engine.rollback(1, 0) == 0
        again = engine.run([Step(1, 0, hidden=good)])[0].hidden
        assert again is not None
        assert np.array_equal(again, expected)
        engine.close(0)
        engine.close(1)

    def test_sessions_that_cannot_be_are_refused(self, harness: Harness) -> None:
        engine, last = harness.whole, harness.n_layers - 1
        for words, slot, start, end, sampling in (
            ("slot -1", -1, 0, last, GREEDY),
            ("slot 8", 8, 0, last, GREEDY),
            ("no entry layer", 0, 3, last, GREEDY),
            ("exit layer", 0, 0, last + 1, GREEDY),
            ("sampling parameters", 0, 0, last, None),
            ("temperature", 0, 0, last, SamplingParams(temperature=-1.0)),
            ("top_p", 0, 0, last, SamplingParams(top_p=1.5)),
            ("logit_bias", 0, 0, last, SamplingParams(logit_bias=((1 << 24, 1.0),))),
        ):
            with pytest.raises(EngineError, match=words):
                engine.open(slot, start, end, sampling)
        with pytest.raises(EngineError, match="not open"):
            engine.position(0)
        engine.close(0)

    def test_a_full_context_is_refused(self, harness: Harness) -> None:
        engine = harness.whole
        engine.open(0, 0, 0)
        rows = np.zeros(256, dtype=np.int32)
        while engine.position(0) + 256 <= engine.info.n_ctx:
            engine.run([Step(0, engine.position(0), tokens=rows)])
        with pytest.raises(EngineError, match="context"):
            engine.run([Step(0, engine.position(0), tokens=rows)])
        engine.close(0)
