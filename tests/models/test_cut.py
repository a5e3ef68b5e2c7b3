"""Whole against cut, on llama.cpp alone: the facts that `meshnet.models.architecture` claims.

Each case runs greedy decoding through the whole file and through slices, and wants the same tokens and the
same logits to the bit; a wrong start layer must change them. One prompt has more than 512 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from support.llama_c import Rows, Stage, generate
from support.random_gguf import CUTTABLE

from meshnet.engine.base import Step
from meshnet.engine.llama import LlamaEngine
from meshnet.models.architecture import layer_output_name
from meshnet.models.gguf import ModelFile
from meshnet.models.slice import plan_slice, write_slice

RandomModel = Callable[..., Path]
SHORT = "<|im_start|>user\nWhat is the answer to everything?<|im_end|>\n<|im_start|>assistant\n"
LONG = "The quick brown fox jumps over the lazy dog, and then it jumps back again. " * 12
TOKENS = 48

# borders that fit no pattern, single layers of every kind at both ends and in the middle
CUTS: dict[str, list[list[int]]] = {
    "llama": [[22], [1], [39], [13, 14, 30]],
    "gpt-oss": [[3], [1, 2, 5], [7]],
    "gemma3": [[7], [1, 5, 6], [11, 12], [13]],
    "qwen35moe": [[22], [1, 3, 4], [39], [37, 38]],
}
HYBRID_CUTS = [[5], [1, 3, 4], [7], [2, 6]]
PLAIN_CUTS = [[3], [1, 7]]
HYBRIDS = ("qwen3next", "qwen35")


def cuts_of(arch: str) -> list[list[int]]:
    return CUTS.get(arch, HYBRID_CUTS if arch in HYBRIDS else PLAIN_CUTS)


def run_whole(path: Path, prompt: str) -> tuple[list[int], Rows, list[int]]:
    with Stage(path) as stage:
        tokens = stage.tokenize(prompt)
        chosen, logits = generate([stage], tokens, TOKENS)
    return chosen, logits, tokens


def run_cut(
    model: ModelFile, borders: list[int], prompt: list[int], folder: Path, shift: int = 0
) -> tuple[list[int], Rows]:
    """Greedy tokens through slices; with `shift`, the last one starts that many layers too early."""
    starts = [0, *borders]
    ends = [*(border - 1 for border in borders), model.n_layers - 1]
    starts[-1] -= shift
    with ExitStack() as stack:
        stages = []
        for first, last in zip(starts, ends, strict=True):
            path = write_slice(plan_slice(model, first, last), folder / f"{first}-{last}.gguf")
            tail = last == model.n_layers - 1
            tap = None if tail else layer_output_name(ModelFile.open(path), last)
            stages.append(stack.enter_context(Stage(path, tap)))
        return generate(stages, prompt, TOKENS)


@pytest.mark.parametrize("arch", CUTTABLE)
def test_cut_equals_whole(arch: str, random_models: RandomModel, tmp_path: Path) -> None:
    path = random_models(arch)
    model = ModelFile.open(path)
    for prompt, cuts in ((SHORT, cuts_of(arch)), (LONG, cuts_of(arch)[:1])):
        expected, logits, tokens = run_whole(path, prompt)
        assert len(set(expected)) >= 20
        for borders in cuts:
            chosen, cut_logits = run_cut(model, borders, tokens, tmp_path)
            assert chosen == expected, borders
            assert np.array_equal(cut_logits, logits), borders
    assert len(tokens) > 512
    wrong, wrong_logits = run_cut(model, cuts_of(arch)[0], tokens, tmp_path, shift=1)
    assert wrong != expected
    assert np.abs(wrong_logits - logits).max() > 0.1


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {"quant": "q4_1", "n_layers": 8}),
        ("llama", {"quant": "q4_k", "n_layers": 8}),
        ("llama", {"quant": "f16", "tied": True, "n_layers": 8}),
        ("qwen35moe", {"quant": "q8_0", "n_layers": 8}),
        ("qwen35moe", {"quant": "q4_k", "n_layers": 8, "prediction_layers": 1}),
        ("qwen35", {"quant": "q4_1", "prediction_layers": 1}),
        ("gemma3", {"quant": "q4_k", "n_layers": 12}),
        ("gemma3", {"extra": {"attention.sliding_window_pattern": 3}}),
        ("qwen3next", {"full_attention_every": 3}),
    ],
)
def test_variants(arch: str, options: dict[str, object], random_models: RandomModel, tmp_path: Path) -> None:
    path = random_models(arch, **options)
    model = ModelFile.open(path)
    expected, logits, tokens = run_whole(path, SHORT)
    for borders in ([3], [1, 4], [model.n_layers - 1]):
        chosen, cut_logits = run_cut(model, borders, tokens, tmp_path)
        assert chosen == expected, borders
        assert np.array_equal(cut_logits, logits), borders


def test_a_tail_with_filler_in_front_stops_early(random_models: RandomModel, tmp_path: Path) -> None:
    """The zeros in front shift the blocks of a tail; a stage that stops inside it must tap the right one."""
    model = ModelFile.open(random_models("qwen3next", n_layers=6))
    rows = np.random.default_rng(0).standard_normal((5, model.n_embd)).astype(np.float32)
    stopped = []
    for last in (4, 5):
        path = write_slice(plan_slice(model, 4, last), tmp_path / f"{last}.gguf")
        shard = ModelFile.open(path)
        assert shard.filler_before == (1 if last == 5 else 0)
        with Stage(path, layer_output_name(shard, 4)) as stage:
            stopped.append(stage.step(0, rows))
    assert np.array_equal(stopped[0], stopped[1])
    for first, last in ((4, 4), (4, 5)):
        engine = LlamaEngine.load(model, first, last, n_slots=1, n_ctx=64, max_rows=8)
        engine.open(0, entry=4, exit=4)
        hidden = engine.run([Step(0, 0, hidden=rows)])[0].hidden
        assert hidden is not None
        assert np.allclose(hidden, stopped[0], atol=1e-4)
        engine.unload()
    assert np.abs(stopped[0] - rows).max() > 1


def test_real_model(smollm2: ModelFile, tmp_path: Path) -> None:
    expected, logits, tokens = run_whole(smollm2.path, SHORT)
    for borders in ([15], [10, 20]):
        chosen, cut_logits = run_cut(smollm2, borders, tokens, tmp_path)
        assert chosen == expected
        assert np.array_equal(cut_logits, logits)
    wrong, _ = run_cut(smollm2, [15], tokens, tmp_path, shift=1)
    assert wrong != expected


@pytest.mark.full
@pytest.mark.parametrize("arch", CUTTABLE)
def test_every_border(arch: str, random_models: RandomModel, tmp_path: Path) -> None:
    path = random_models(arch, n_layers=14)
    model = ModelFile.open(path)
    expected, logits, tokens = run_whole(path, SHORT)
    for border in range(1, 14):
        chosen, cut_logits = run_cut(model, [border], tokens, tmp_path)
        assert chosen == expected, border
        assert np.array_equal(cut_logits, logits), border
