"""Loading a shard: what it needs, what is refused before a byte is read, and what is told of it."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from support.random_gguf import random_model

from meshnet.engine.base import EngineError, SamplingParams, Step
from meshnet.engine.hardware import accelerators, choose_devices, cpu_name
from meshnet.engine.library import load_library
from meshnet.engine.llama import LlamaEngine
from meshnet.engine.memory import check_memory, memory_need
from meshnet.engine.numerics import cpu_features, numerics_class
from meshnet.engine.shards import default_threads
from meshnet.models.gguf import ModelFile
from meshnet.models.store import Store


def test_what_is_told_of_a_shard(smollm2: ModelFile, store: Store) -> None:
    seen: list[tuple[str, float]] = []
    engine = LlamaEngine.load(
        smollm2,
        3,
        9,
        cuts=[5, 8],
        n_slots=2,
        n_ctx=300,
        threads=1,
        store=store,
        progress=lambda what, done: seen.append((what, done)),
    )
    info = engine.info
    assert (info.first, info.last, info.model_layers, info.n_embd, info.n_vocab) == (3, 9, 30, 576, 49152)
    assert info.entry_layers == (3, 5, 8)
    assert not info.is_head
    assert not info.is_tail
    assert info.fingerprint == smollm2.fingerprint
    assert info.hardware == cpu_name()
    assert info.n_ctx == 300
    assert not info.recurrent
    described = engine.describe()
    assert [(s["first"], s["last"]) for s in described["segments"]] == [(3, 4), (5, 7), (8, 9)]
    assert described["threads"] == 1
    assert described["open_slots"] == 0
    assert seen[0][0] == "loading layers 3-4"
    assert seen[-1] == ("loading layers 8-9", 1.0)
    assert [done for _, done in seen] == sorted(done for _, done in seen)
    with pytest.raises(EngineError, match="no vocabulary"):
        _ = engine.vocabulary
    engine.unload()
    with pytest.raises(EngineError, match="unloaded"):
        engine.open(0, 3, 9)


def test_without_a_store_shards_are_made_and_go_with_the_engine(random_models: Path) -> None:
    model = ModelFile.open(random_model(random_models, "qwen3"))
    engine = LlamaEngine.load(model, 2, 4, n_slots=1, n_ctx=256, threads=1)
    hidden = np.ones((3, model.n_embd), dtype=np.float32)
    engine.open(0, 2, 3)
    result = engine.run([Step(0, 0, hidden=hidden)])[0].hidden
    assert result is not None
    assert result.shape == (3, model.n_embd)
    engine.unload()


@pytest.mark.parametrize(
    ("arch", "first", "last"), [("llama", 0, 39), ("qwen35moe", 10, 39), ("gemma3", 0, 6)]
)
def test_the_need_told_before_is_near_what_is_taken(
    random_models: Path, store: Store, arch: str, first: int, last: int
) -> None:
    model = ModelFile.open(random_model(random_models, arch))
    need = memory_need(model, first, last, n_slots=4, n_ctx=1024)
    engine = LlamaEngine.load(model, first, last, n_slots=4, n_ctx=1024, threads=1, store=store)
    taken = engine.describe()["segments"][0]["buffers"]
    kv = taken["KV"] + taken.get("RS", 0)
    assert abs(need.kv - kv) <= 0.05 * kv
    weights = taken["model"]
    assert abs(need.weights - weights) <= 0.1 * weights + (1 << 20)
    assert taken["compute"] <= need.compute
    assert engine.info.memory_bytes == sum(taken.values())
    engine.unload()


def test_the_need_of_the_real_model(smollm2: ModelFile) -> None:
    half = memory_need(smollm2, 0, 14, n_slots=8, n_ctx=1024)
    whole = memory_need(smollm2, 0, 29, n_slots=8, n_ctx=1024)
    assert half.kv * 2 == whole.kv == 30 * 8 * 1024 * 3 * 128 * 2
    assert abs(whole.weights - smollm2.n_bytes) < 0.05 * smollm2.n_bytes
    tail = memory_need(smollm2, 15, 29, n_slots=8, n_ctx=1024)
    assert tail.weights > 30e6 + half.weights * 0.4  # the output matrix


def test_a_shard_that_does_not_fit_is_refused_with_need_and_have(smollm2: ModelFile, store: Store) -> None:
    with pytest.raises(EngineError) as caught:
        LlamaEngine.load(smollm2, 0, 14, n_slots=4, n_ctx=512, memory_limit=50_000_000, store=store)
    message = str(caught.value)
    assert re.search(r"layers 0-14 of SmolLM2.* need [\d,]+ MB \(weights \d+ MB, context \d+ MB", message)
    assert "50 MB may be used" in message
    need = memory_need(smollm2, 0, 29, n_slots=64, n_ctx=1 << 20)
    with pytest.raises(EngineError, match="is available on this machine"):
        check_memory(need, None, "m", 0, 29)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"first": -1}, "has layers 0-29"),
        ({"last": 30}, "0-30 is no range"),
        ({"first": 9, "last": 3}, "9-3"),
        ({"cuts": [20]}, "cut 20 is not a layer of the shard 0-14"),
        ({"n_slots": 0}, "slots is 0"),
        ({"n_slots": 257}, "slots is 257"),
        ({"n_ctx": 0}, "context is 0"),
        ({"max_rows": 0}, "rows per call 0"),
        ({"device": "cuda:0"}, "device cuda:0 is not there"),
        ({"device": "metal"}, "device metal is not there"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"cores": [999]}, r"cores \[999\] cannot be used"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    smollm2: ModelFile, store: Store, options: dict[str, object], words: str
) -> None:
    settings: dict[str, object] = {
        "first": 0,
        "last": 14,
        "n_slots": 1,
        "n_ctx": 256,
        "threads": 1,
        **options,
    }
    first, last = settings.pop("first"), settings.pop("last")
    with pytest.raises(EngineError, match=words):
        LlamaEngine.load(smollm2, first, last, store=store, **settings)  # type: ignore[arg-type]


def test_files_that_are_no_model_are_refused(tmp_path: Path, random_models: Path) -> None:
    with pytest.raises(EngineError, match="missing"):
        LlamaEngine.load(tmp_path / "missing.gguf", 0, 1)
    cut_short = tmp_path / "short.gguf"
    cut_short.write_bytes(random_model(random_models, "qwen3").read_bytes()[:-100_000])
    with pytest.raises(EngineError, match=r"short\.gguf"):
        LlamaEngine.load(cut_short, 0, 1)


def test_compute_is_bound_to_the_cores(random_models: Path, store: Store) -> None:
    """In a thread of its own, because it is the calling thread that is bound."""
    model = ModelFile.open(random_model(random_models, "qwen3"))
    core = min(os.sched_getaffinity(0))
    found: list[set[int]] = []

    def work() -> None:
        engine = LlamaEngine.load(model, 0, 3, n_slots=1, n_ctx=256, cores=[core], store=store)
        assert engine.describe()["threads"] == 1
        engine.open(0, 0, 3)
        engine.run([Step(0, 0, tokens=np.zeros(2, dtype=np.int32))])
        found.append(os.sched_getaffinity(0))
        engine.unload()

    before = os.sched_getaffinity(0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [{core}]
    assert os.sched_getaffinity(0) == before


def test_threads_follow_cores_and_work() -> None:
    assert default_threads([0, 1, 2], 1 << 30) == 3
    assert default_threads([0, 1, 2], 40 << 20) == 2
    assert default_threads(None, 1) == 1
    assert 1 <= default_threads(None, 1 << 40) <= (os.cpu_count() or 1)


def test_thread_counts_give_the_same_bits(smollm2: ModelFile, store: Store) -> None:
    """A row alone over more than 512 cells too, where llama.cpp would split the cells between threads."""
    found = []
    tokens = np.random.default_rng(2).integers(100, 20000, 530, dtype=np.int32)
    for threads in (1, 2, 3):
        engine = LlamaEngine.load(smollm2, 0, 2, n_slots=1, n_ctx=768, threads=threads, store=store)
        engine.open(0, 0, 2)
        for start in range(0, 512, 256):
            engine.run([Step(0, start, tokens=tokens[start : start + 256])])
        rows = [engine.run([Step(0, at, tokens=tokens[at : at + 1])])[0].hidden for at in range(512, 530)]
        found.append(np.concatenate([row for row in rows if row is not None]))
        assert "threads" not in engine.info.numerics_class
        engine.unload()
    assert len(found[0]) == 18
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_the_numerics_class_tells_what_moves_bits() -> None:
    library = load_library()
    plain = numerics_class(library)
    assert library.version in plain
    assert plain == numerics_class(library)
    others = [
        numerics_class(library, repack=True),
        numerics_class(library, threads=2),
        numerics_class(library, devices=("CUDA0:A",)),
    ]
    assert len({plain, *others}) == 4
    assert cpu_features("CPU : SSE3 = 1 | AVX = 0 | AVX2 = 1 | OPENMP = 1 | ") == ("AVX2", "SSE3")


def test_the_cpu_is_taken_where_there_is_nothing_else() -> None:
    library = load_library()
    if accelerators(library):
        pytest.skip("this machine's llama.cpp sees an accelerator")
    for device in ("auto", "cpu"):
        assert choose_devices(library, device, 99).devices == ()


def test_a_fresh_sampler_on_a_kept_state(smollm2: ModelFile, store: Store) -> None:
    """The next turn: the slot is rolled back to the common prefix and gets its own sampling parameters."""
    engine = LlamaEngine.load(smollm2, 28, 29, n_slots=2, n_ctx=256, threads=1, store=store)
    hidden = np.random.default_rng(1).standard_normal((20, 576)).astype(np.float32)
    fresh = SamplingParams(seed=5, prompt_tokens=20, presence_penalty=1.0)
    engine.open(1, 28, 29, fresh)
    expected = engine.run([Step(1, 0, hidden=hidden, sample=1)])[0].sampled
    engine.open(0, 28, 29, SamplingParams(temperature=0.0, prompt_tokens=5))
    engine.run([Step(0, 0, hidden=hidden[:5], sample=1)])
    for row in range(5, 12):
        engine.run([Step(0, row, hidden=hidden[row : row + 1], sample=1)])
    assert engine.rollback(0, 4) == 4
    engine.resample(0, fresh)
    assert engine.run([Step(0, 4, hidden=hidden[4:], sample=1)])[0].sampled == expected
    engine.open(0, 28, 28)
    with pytest.raises(EngineError, match="does not sample"):
        engine.resample(0, fresh)
    engine.unload()


@pytest.mark.parametrize(("first", "last"), [(0, 29), (0, 9), (10, 14), (25, 29), (29, 29), (0, 0)])
def test_the_self_test_measures_what_the_shard_has(
    smollm2: ModelFile, store: Store, first: int, last: int
) -> None:
    cuts = [first + 2] if last - first > 2 else []
    engine = LlamaEngine.load(smollm2, first, last, cuts=cuts, n_slots=4, n_ctx=256, threads=1, store=store)
    found = engine.self_test()
    assert found.decode_ms_per_layer > 0
    assert found.prefill_ms_per_token_layer > 0
    assert last == 29 or found.output_ms == 0
    assert found.embed_ms >= 0
    assert first == 0 or found.embed_ms == 0
    assert set(found.batch_ms) >= {1, 2}
    assert engine.info.replay_rows == 63
    engine.open(0, first, last, SamplingParams() if last == 29 else None)
    assert engine.position(0) == 0
    with pytest.raises(EngineError, match="all slots free"):
        engine.self_test()
    engine.unload()


def test_a_call_that_fails_midway_leaves_its_slots_as_they_were(
    smollm2: ModelFile, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first segment has run and the second fails: both are taken back."""
    engine = LlamaEngine.load(smollm2, 0, 3, cuts=[2], n_slots=3, n_ctx=256, threads=1, store=store)
    tokens = np.arange(100, 112, dtype=np.int32)
    for slot in range(3):
        engine.open(slot, 0, 3)
        engine.run([Step(slot, 0, tokens=tokens[: 8 + slot])])
    expected = engine.run([Step(0, 8, tokens=tokens[8:10])])[0].hidden
    engine.rollback(0, 8)

    def fail(*_: object) -> None:
        raise EngineError("out of luck")

    with monkeypatch.context() as patched:
        patched.setattr(engine._segments[1], "decode", fail)
        with pytest.raises(EngineError, match="out of luck"):
            engine.run([Step(slot, 8 + slot, tokens=tokens[8:10]) for slot in range(3)])
    assert [engine.position(slot) for slot in range(3)] == [8, 9, 10]
    again = engine.run([Step(slot, 8 + slot, tokens=tokens[8:10]) for slot in range(3)])
    assert again[0].hidden is not None
    assert expected is not None
    assert np.array_equal(again[0].hidden, expected)
    engine.unload()


def test_more_logits_than_there_is_room_for_are_refused(smollm2: ModelFile, store: Store) -> None:
    engine = LlamaEngine.load(smollm2, 29, 29, n_slots=1, n_ctx=256, threads=1, store=store)
    hidden = np.random.default_rng(1).standard_normal((70, 576)).astype(np.float32)
    engine.open(0, 29, 29, SamplingParams(temperature=0.0))
    with pytest.raises(EngineError, match="logits of more than 64 rows"):
        engine.run([Step(0, 0, hidden=hidden, sample=65)])
    sampled = engine.run([Step(0, 0, hidden=hidden, sample=64)])[0].sampled
    assert [each.position for each in sampled] == list(range(7, 71))
    engine.unload()
