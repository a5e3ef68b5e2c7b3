"""Other architectures, with tiny random weights: cut against whole, by tokens and by logits.

Each is cut where its pattern of layers does not fit as well (22 of 40 with full attention every 4th layer, 5
and 7 with a full window every 6th). A cut is exact, so logits are compared bit for bit, and negative controls
show that the comparison would notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.pipeline import Pipeline, Tokens, with_prompt
from support.random_gguf import UNCUTTABLE, random_model

from meshnet.engine.base import EngineError, SamplingParams
from meshnet.engine.llama import LlamaEngine
from meshnet.models.gguf import ModelFile
from meshnet.models.store import Store

GREEDY = SamplingParams(temperature=0.0)
WATCHED = SamplingParams(temperature=0.0, logprobs=20)
COUNT = 48

CASES: dict[str, tuple[tuple[int, ...], ...]] = {
    "llama": ((22,), (1,), (13, 26)),
    "qwen2": ((3,), (7,)),
    "qwen2moe": ((4,),),
    "qwen3": ((3,), (2, 5)),
    "qwen3moe": ((5,), (1, 7)),
    "gemma3": ((5,), (7,), (6, 12), (13,)),
    "phi3": ((3,), (6,)),
    "qwen3next": ((3,), (6,)),
    "qwen35": ((5,),),
    "qwen35moe": ((22,), (20,), (1,), (39,), (10, 21, 31)),
}
QUANTS = ("q4_k", "q8_0", "q4_0", "q5_1")
PARAMS = [(arch, "f32", cut) for arch, cuts in CASES.items() for cut in cuts]
PARAMS += [("llama", quant, (22,)) for quant in QUANTS]


@dataclass(frozen=True)
class Trace:
    """What a run gave: the tokens, and the twenty best logprobs at each."""

    tokens: tuple[int, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


def load(model: ModelFile, store: Store, first: int, last: int, **options: int) -> LlamaEngine:
    settings = {"n_slots": 3, "n_ctx": 768, "threads": 1, **options}
    return LlamaEngine.load(model, first, last, store=store, **settings)  # type: ignore[arg-type]


def prompt_of(model: ModelFile, length: int, seed: int = 1) -> Tokens:
    return np.random.default_rng(seed).integers(0, 250, length, dtype=np.int32)


def trace(pipeline: Pipeline, prompt: Tokens, count: int = COUNT) -> Trace:
    pipeline.open(0, with_prompt(WATCHED, prompt))
    sampled = [pipeline.prefill(0, prompt)]
    for _ in range(count - 1):
        sampled.append(pipeline.run({0: [sampled[-1].token]})[0][0])
    pipeline.close(0)
    return Trace(tuple(each.token for each in sampled), tuple(each.top for each in sampled))


class Models:
    """Models and what the whole of each gives, made once."""

    def __init__(self, folder: Path, store: Store) -> None:
        self._folder, self._store = folder, store
        self._whole: dict[tuple[str, str], tuple[ModelFile, Trace, Trace]] = {}

    def get(self, arch: str, quant: str) -> tuple[ModelFile, Trace, Trace]:
        """The model, and traces of a short prompt and of one with more than 512 tokens."""
        if (arch, quant) not in self._whole:
            options = {} if quant == "f32" else {"quant": quant}
            path = random_model(self._folder, arch, **options)
            model = self._store.identified(ModelFile.open(path))
            engine = load(model, self._store, 0, model.n_layers - 1)
            whole = Pipeline.of(engine)
            short, long = trace(whole, prompt_of(model, 30)), trace(whole, prompt_of(model, 600), 24)
            engine.unload()
            self._whole[arch, quant] = model, short, long
        return self._whole[arch, quant]


@pytest.fixture(scope="module")
def models(random_models: Path, store: Store) -> Models:
    return Models(random_models, store)


def cut_engines(model: ModelFile, store: Store, borders: tuple[int, ...]) -> list[LlamaEngine]:
    starts = [0, *borders]
    ends = [border - 1 for border in borders] + [model.n_layers - 1]
    return [load(model, store, start, end) for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize(("arch", "quant", "borders"), PARAMS)
def test_cut_equals_whole(
    models: Models, store: Store, arch: str, quant: str, borders: tuple[int, ...]
) -> None:
    model, short, long = models.get(arch, quant)
    assert len(set(short.tokens)) >= 20, "the model hardly wanders: the comparison would prove little"
    engines = cut_engines(model, store, borders)
    cut = Pipeline.of(*engines)
    assert trace(cut, prompt_of(model, 30)) == short
    assert trace(cut, prompt_of(model, 600), 24) == long
    for engine in engines:
        engine.unload()


@pytest.mark.parametrize("arch", CASES)
def test_a_wrong_start_layer_is_noticed(models: Models, store: Store, arch: str) -> None:
    model, short, _ = models.get(arch, "f32")
    middle = model.n_layers // 2 + 1
    head = load(model, store, 0, middle - 1)
    for start in (middle - 1, middle + 1):  # a layer run twice, a layer left out
        tail = load(model, store, start, model.n_layers - 1)
        wrong = trace(Pipeline.of(head, tail), prompt_of(model, 30), 8)
        assert wrong.tokens != short.tokens[:8]
        assert wrong.top[0] != short.top[0]
        tail.unload()
    head.unload()


@pytest.mark.parametrize("arch", ["gemma3", "phi3", "qwen3moe", "qwen35moe"])
def test_segments_of_one_engine_and_sessions_in_company(models: Models, store: Store, arch: str) -> None:
    """Adjoining segments in one engine, three sessions at once: each as the whole model gives it alone."""
    model, short, _ = models.get(arch, "f32")
    last = model.n_layers - 1
    engine = LlamaEngine.load(
        model, 0, last, cuts=(2, model.n_layers // 2), n_slots=3, n_ctx=768, threads=1, store=store
    )
    prompts = {slot: prompt_of(model, 30 - 7 * slot, seed=1 + slot) for slot in range(3)}
    pipeline = Pipeline.of(engine)
    alone = {}
    for slot, prompt in prompts.items():
        alone[slot] = pipeline.generate({slot: prompt}, 24, GREEDY)[slot]
        pipeline.close(slot)
    assert alone[0] == list(short.tokens[:24])
    assert pipeline.generate(prompts, 24, GREEDY) == alone
    engine.unload()


@pytest.mark.parametrize("arch", ["qwen35moe", "qwen3next"])
def test_recurrent_state_goes_back_to_checkpoints(models: Models, store: Store, arch: str) -> None:
    """Verifying steps with wrong drafts: what is computed again from a checkpoint ends in the same tokens."""
    model, short, _ = models.get(arch, "f32")
    prompt, expected = prompt_of(model, 30), list(short.tokens)
    engines = cut_engines(model, store, (model.n_layers // 2,))
    assert all(engine.info.recurrent for engine in engines)
    cut = Pipeline.of(*engines)
    cut.open(0, with_prompt(GREEDY, prompt))
    found = [cut.prefill(0, prompt).token]
    while len(found) < 24:
        drafts = [*expected[len(found) : len(found) + 2], 3, 4]
        sampled = cut.run({0: [found[-1], *drafts]}, sample=5)[0]
        found += [each.token for each in sampled[:3]]
        wanted = len(prompt) + len(found) - 1
        reached = {engine.rollback(0, wanted) for engine in engines}
        assert len(reached) == 1
        position = reached.pop()
        assert position < wanted
        if position == 0:
            cut.run({0: prompt}, sample=0)
            position = len(prompt)
        again = found[position - len(prompt) : -1]
        cut.run({0: again}, sample=0)
    assert found[:24] == expected[:24]
    for engine in engines:
        assert engine.rollback(0, 5) == 0
        engine.unload()


@pytest.mark.parametrize("arch", ["qwen35moe", "gemma3", "phi3"])
def test_a_fork_goes_its_own_way(models: Models, store: Store, arch: str) -> None:
    model, short, _ = models.get(arch, "f32")
    prompt = prompt_of(model, 30)
    engines = cut_engines(model, store, (model.n_layers // 2 + 1,))
    cut = Pipeline.of(*engines)
    found = cut.generate({0: prompt}, 12, GREEDY)
    for engine in engines:
        engine.fork(0, 2)
    cut.go_on({0: [17]}, 6)
    copy = {2: found[0]}
    cut.go_on(copy, 24)
    assert copy[2] == list(short.tokens[:36])
    for engine in engines:  # back to the middle of the prompt, and on again
        reached = engine.rollback(2, 17)
        assert reached == (0 if engine.info.recurrent else 17)
    cut.run({2: prompt[reached:]}, sample=0)
    assert cut.run({2: found[0][:1]})[2][0].token == short.tokens[1]
    for engine in engines:
        engine.unload()


def test_an_uncuttable_architecture_is_refused_with_its_name_and_the_reason(
    random_models: Path, store: Store
) -> None:
    model = ModelFile.open(random_model(random_models, UNCUTTABLE))
    with pytest.raises(EngineError, match=rf"'{UNCUTTABLE}' cannot be cut: .+ absolute number"):
        LlamaEngine.load(model, 0, 2, n_slots=1, n_ctx=256, threads=1, store=store)
    whole = load(model, store, 0, model.n_layers - 1)
    assert len(set(trace(Pipeline.of(whole), prompt_of(model, 30), 24).tokens)) > 5
    whole.unload()
