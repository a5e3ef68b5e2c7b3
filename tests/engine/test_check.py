"""`meshnet model check`: what it says of good cuts, and that it would say so of bad ones; replay proofs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from support.random_gguf import random_model

from meshnet.engine.base import EngineError
from meshnet.engine.check import compare, prompts_for, run_check
from meshnet.engine.llama import LlamaEngine
from meshnet.engine.proof import Proof, prove
from meshnet.engine.replay import proven_rows, record_proof
from meshnet.engine.tokenizer import Tokenizer
from meshnet.models.gguf import ModelFile
from meshnet.models.store import Store


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHNET_CACHE", str(tmp_path))
    return tmp_path


def load(path: Path, store: Store, first: int, last: int, *, repack: bool = False) -> LlamaEngine:
    model = store.identified(ModelFile.open(path))
    return LlamaEngine.load(model, first, last, n_slots=4, n_ctx=768, threads=1, store=store, repack=repack)


def test_a_good_cut_is_identical(
    random_models: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = random_model(random_models, "qwen3")
    assert run_check(path, [3, 5]) == 0
    said = capsys.readouterr().out
    assert "cut at 3, 5: identical" in said
    assert "differ by 0 at most" in said


def test_json_and_the_default_cut(
    random_models: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = random_model(random_models, "gemma3")
    assert run_check(path, [], json_output=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["identical"] is True
    assert found["cuts"] == [7]
    assert max(found["prompts"]) > 512
    assert found["tokens"] == 64 * len(found["prompts"])
    assert found["parts"] == []
    assert found["replay"] is None


@pytest.mark.parametrize(
    ("cuts", "words"), [([0], "cuts lie at 1-7"), ([8], "not at 8"), ([3, 99], "not at 3, 99")]
)
def test_cuts_outside_the_model_are_refused(
    random_models: Path, cache: Path, capsys: pytest.CaptureFixture[str], cuts: list[int], words: str
) -> None:
    assert run_check(random_model(random_models, "qwen3"), cuts) == 2
    assert words in capsys.readouterr().err


def test_a_file_that_is_no_model_is_refused(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.gguf").write_bytes(b"nothing")
    assert run_check(tmp_path / "wrong.gguf", [3]) == 2
    assert "wrong.gguf" in capsys.readouterr().err


def test_a_bad_cut_is_shown_with_where_it_parts(random_models: Path, store: Store) -> None:
    """A layer run twice: what a node does that starts at its own first layer."""
    path = random_model(random_models, "qwen3")
    tokenizer = Tokenizer(path)
    whole = load(path, store, 0, 7)
    pieces = [load(path, store, 0, 4), load(path, store, 4, 7)]
    found = compare(whole, pieces, tokenizer, prompts_for(tokenizer)[:2], 16)
    assert not found.identical
    assert found.largest_difference > 0.01
    part = found.parts[0]
    assert part.prompt == 0
    assert part.position >= found.prompts[0]
    assert part.whole_token != part.cut_token
    assert part.logit_gap is None or part.logit_gap > 0
    for engine in (whole, *pieces):
        engine.unload()
    tokenizer.close()


CASES = [
    ("llama", {"quant": "q4_k"}),
    ("llama", {"quant": "q8_0"}),
    ("llama", {"quant": "q4_1"}),
    ("qwen35moe", {}),
    ("gemma3", {}),
]


@pytest.mark.parametrize(("arch", "options"), CASES)
def test_sessions_are_rebuilt_exactly(
    random_models: Path, store: Store, arch: str, options: dict[str, str]
) -> None:
    path = random_model(random_models, arch, **options)
    tokenizer = Tokenizer(path)
    engine = load(path, store, 0, ModelFile.open(path).n_layers - 1)
    found = prove(engine, prompts_for(tokenizer), continuations=12, tokens=48)
    assert found == Proof(63, 12, found.compared_rows, 0)
    assert found.compared_rows > 60
    engine.unload()
    tokenizer.close()


@pytest.mark.full
def test_the_real_models_sessions_are_rebuilt_exactly(smollm2: ModelFile, tokenizer: Tokenizer) -> None:
    engine = LlamaEngine.load(smollm2, 0, 29, n_slots=8, n_ctx=768)
    found = prove(engine, prompts_for(tokenizer), continuations=120)
    assert found == Proof(63, 120, found.compared_rows, 0)
    engine.unload()


def test_a_proof_notices_what_is_not_exact(random_models: Path, store: Store) -> None:
    """K-quants with repacked weights: a row alone goes through another kernel than four together."""
    path = random_model(random_models, "llama", quant="q4_k")
    engine = load(path, store, 0, 39, repack=True)
    if "repacked" not in engine.describe()["segments"][0]["buffers"]:
        pytest.skip("this CPU has no repacked kernels for Q4_K")
    tokenizer = Tokenizer(path)
    found = prove(engine, prompts_for(tokenizer)[:3], continuations=4, tokens=24)
    assert found.rows < 63
    assert found.differences > 0
    assert "63" not in found.as_text()
    engine.self_test()
    assert engine.info.replay_rows == 1
    engine.unload()
    tokenizer.close()


def test_only_a_whole_model_proves(random_models: Path, store: Store) -> None:
    engine = load(random_model(random_models, "qwen3"), store, 0, 4)
    with pytest.raises(EngineError, match="whole model"):
        prove(engine, [])
    engine.unload()


def test_proofs_are_kept_and_engines_find_them(
    random_models: Path, store: Store, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = random_model(random_models, "qwen3")
    engine = load(path, store, 0, 7)
    info = engine.info
    assert info.replay_rows == 1
    engine.self_test()
    assert engine.info.replay_rows == 63  # tried on its own weights
    engine.unload()
    assert proven_rows(info.arch, "F32", info.numerics_class) is None
    assert run_check(path, [4], replay=True) == 0
    assert "replay: exact to the bit in chunks of up to 63 rows" in capsys.readouterr().out
    assert proven_rows(info.arch, "ALL_F32", info.numerics_class) is None
    assert proven_rows(info.arch, ModelFile.open(path).quantisation, info.numerics_class) == 63
    engine = load(path, store, 0, 3)
    assert engine.info.replay_rows == 63
    engine.unload()
    record_proof(info.arch, ModelFile.open(path).quantisation, info.numerics_class, 0)
    engine = load(path, store, 0, 3)
    engine.self_test()
    assert engine.info.replay_rows == 1  # what the check found stands
    engine.unload()


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a|b|c": "x", "llama|F32|k": 99}'])
def test_a_damaged_file_of_proofs_proves_nothing(cache: Path, content: str) -> None:
    (cache / "replay.json").write_text(content)
    assert proven_rows("llama", "F32", "k") is None
    record_proof("llama", "F32", "k", 63)
    assert proven_rows("llama", "F32", "k") == 63


def test_a_proof_says_what_it_found() -> None:
    proof = Proof(1, 4, 30, 7)
    assert "in chunks 7 rows differ" in proof.as_text()
    assert "NOT exact" in dataclasses.replace(proof, rows=0).as_text()
