"""Slices: their headers, their bytes, their holes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from support.llama_c import Stage
from support.random_gguf import UNCUTTABLE, write_random_model

from meshnet.models.architecture import (
    layer_output_name,
    model_refusal,
    recurrent_layers,
    refusal,
    sliding_layers,
)
from meshnet.models.errors import LayersOutside, ModelError, TruncatedGGUF, Uncuttable
from meshnet.models.files import allocated_bytes
from meshnet.models.gguf import ModelFile
from meshnet.models.slice import MIDDLE_VOCABULARY, SlicePlan, plan_slice, write_slice

RandomModel = Callable[..., Path]


def tensor_data(path: Path, name: str) -> bytes:
    model = ModelFile.open(path)
    tensor = model.by_name[name]
    data = (model.files[tensor.file_index].path or path).read_bytes()
    return data[tensor.offset : tensor.offset + tensor.n_bytes]


def written(plan: SlicePlan, folder: Path) -> ModelFile:
    return ModelFile.open(write_slice(plan, folder / f"{plan.first}-{plan.last}.gguf"))


def test_bytes_and_names(smollm2: ModelFile, smollm2_path: Path, tmp_path: Path) -> None:
    plan = plan_slice(smollm2, 10, 19, fingerprint="ab" * 32)
    shard = written(plan, tmp_path)
    assert shard.n_bytes == plan.n_bytes
    assert (shard.n_layers, shard.shard_range) == (10, (10, 19))
    assert shard.fingerprint == "ab" * 32
    assert shard.metadata["meshnet.model_layers"] == 30
    for layer in (0, 9):
        for part in ("attn_q", "ffn_down", "attn_norm"):
            mine = tensor_data(shard.path, f"blk.{layer}.{part}.weight")
            assert mine == tensor_data(smollm2_path, f"blk.{layer + 10}.{part}.weight")
    assert layer_output_name(shard, 19) == "l_out-9"
    assert layer_output_name(smollm2, 19) == "l_out-19"
    with pytest.raises(LayersOutside, match="holds layers 10-19, not 20"):
        layer_output_name(shard, 20)


def test_the_gguf_package_reads_it(smollm2: ModelFile, tmp_path: Path) -> None:
    shard = written(plan_slice(smollm2, 0, 2), tmp_path)
    reader = gguf.GGUFReader(shard.path)
    assert len(reader.tensors) == len(shard.tensors)
    assert {t.name for t in reader.tensors} == {t.name for t in shard.tensors}


def test_head_middle_and_tail_of_a_tied_model(smollm2: ModelFile, smollm2_path: Path, tmp_path: Path) -> None:
    head, middle, tail = (written(plan_slice(smollm2, *r), tmp_path) for r in ((0, 9), (10, 19), (20, 29)))
    embedding = tensor_data(smollm2_path, "token_embd.weight")
    assert tensor_data(head.path, "token_embd.weight") == embedding
    assert tensor_data(tail.path, "token_embd.weight") == embedding
    assert tensor_data(tail.path, "output_norm.weight") == tensor_data(smollm2_path, "output_norm.weight")
    assert not any(tensor_data(head.path, "output_norm.weight"))
    assert middle.by_name["token_embd.weight"].shape == (576, MIDDLE_VOCABULARY)
    assert middle.metadata["tokenizer.ggml.model"] == "no_vocab"
    assert "tokenizer.ggml.tokens" not in middle.metadata
    assert head.chat_template == tail.chat_template == smollm2.chat_template
    assert middle.n_bytes < 1.01 * sum(smollm2.layer_bytes[10:20])


def test_fillers_cost_nothing(random_models: RandomModel, tmp_path: Path) -> None:
    """The tail of an untied model names an embedding of full size that is not there."""
    model = ModelFile.open(random_models("llama", n_layers=4, quant="q8_0"))
    plan = plan_slice(model, 3, 3)
    shard = written(plan, tmp_path)
    assert shard.by_name["token_embd.weight"].shape == model.by_name["token_embd.weight"].shape
    assert plan.filler_bytes == shard.by_name["token_embd.weight"].n_bytes
    assert not any(tensor_data(shard.path, "token_embd.weight"))
    assert (
        plan.copy_bytes
        == model.layer_bytes[3] + model.output_bytes + model.by_name["rope_freqs.weight"].n_bytes
    )
    assert allocated_bytes(shard.path) <= plan.copy_bytes + len(plan.header) + 3 * 4096
    head = plan_slice(model, 0, 0)
    assert "output.weight" not in written(head, tmp_path).by_name
    assert head.copy_bytes < model.layer_bytes[0] + model.embedding_bytes + 1000


def test_an_architecture_that_demands_an_output_matrix(random_models: RandomModel, tmp_path: Path) -> None:
    model = ModelFile.open(random_models("qwen2moe"))
    for first, last, rows in ((0, 1, model.n_vocab), (2, 3, MIDDLE_VOCABULARY)):
        shard = written(plan_slice(model, first, last), tmp_path)
        assert shard.by_name["output.weight"].shape == (model.n_embd, rows)
        assert not any(tensor_data(shard.path, "output.weight"))


def test_arrays_per_layer_are_cut(random_models: RandomModel, tmp_path: Path) -> None:
    kv = [2, 2, 2, 2]
    model = ModelFile.open(random_models("qwen2", n_layers=4, extra={"attention.head_count_kv": kv}))
    shard = written(plan_slice(model, 1, 2), tmp_path)
    assert shard.metadata["qwen2.attention.head_count_kv"] == [2, 2]


def test_arrays_of_another_kind_are_left_alone(random_models: RandomModel, tmp_path: Path) -> None:
    """qwen35moe's four rope sections are no per-layer array, though the model has four layers."""
    model = ModelFile.open(random_models("qwen35moe", n_layers=4))
    shard = written(plan_slice(model, 0, 2), tmp_path)
    assert shard.metadata["qwen35moe.rope.dimension_sections"] == [6, 5, 5, 0]


def test_kinds_are_written_out(random_models: RandomModel, tmp_path: Path) -> None:
    gemma = ModelFile.open(random_models("gemma3"))
    assert [not kind for kind in sliding_layers(gemma)] == [layer in (5, 11) for layer in range(14)]
    shard = written(plan_slice(gemma, 3, 6), tmp_path)
    assert shard.metadata["gemma3.attention.sliding_window_pattern"] == [True, True, False, True]
    assert sliding_layers(shard) == (True, True, False, True)
    hybrid = ModelFile.open(random_models("qwen35moe"))
    shard = written(plan_slice(hybrid, 22, 25), tmp_path)
    assert shard.metadata["qwen35moe.attention.recurrent_layers"] == [True, False, True, True]
    assert recurrent_layers(shard) == recurrent_layers(hybrid)[22:26]


def test_a_stated_pattern_is_followed(random_models: RandomModel, tmp_path: Path) -> None:
    model = ModelFile.open(random_models("gemma3", extra={"attention.sliding_window_pattern": 3}))
    assert [layer for layer, sliding in enumerate(sliding_layers(model)) if not sliding] == [2, 5, 8, 11]
    all_slide = ModelFile.open(random_models("gemma3", extra={"attention.sliding_window_pattern": 0}))
    assert all(sliding_layers(all_slide))
    explicit = [True] * 13 + [False]
    model = ModelFile.open(random_models("gemma3", extra={"attention.sliding_window_pattern": explicit}))
    shard = written(plan_slice(model, 12, 13), tmp_path)
    assert shard.metadata["gemma3.attention.sliding_window_pattern"] == [True, False]


def test_a_missing_kind_is_filled_with_zeros(random_models: RandomModel, tmp_path: Path) -> None:
    model = ModelFile.open(random_models("qwen3next"))
    recurrent_only = written(plan_slice(model, 4, 6), tmp_path)
    assert recurrent_layers(recurrent_only) == (True, True, True, False)
    assert recurrent_only.filler_before == 0
    assert layer_output_name(recurrent_only, 6) == "l_out-2"
    assert not any(tensor_data(recurrent_only.path, "blk.3.attn_q.weight"))
    tail = written(plan_slice(model, 7, 7), tmp_path)
    assert recurrent_layers(tail) == (True, False)
    assert (tail.filler_before, layer_output_name(tail, 7)) == (1, "l_out-1")
    assert not any(tensor_data(tail.path, "blk.0.attn_qkv.weight"))
    assert tensor_data(tail.path, "blk.1.attn_q.weight") == tensor_data(model.path, "blk.7.attn_q.weight")


def test_prediction_blocks_are_left_out(random_models: RandomModel, tmp_path: Path) -> None:
    model = ModelFile.open(random_models("qwen35", prediction_layers=1))
    shard = written(plan_slice(model, 4, 7), tmp_path)
    assert shard.n_blocks == 4
    assert shard.metadata["qwen35.nextn_predict_layers"] == 0
    assert not any("nextn" in tensor.name for tensor in shard.tensors)


def test_split_source(tmp_path: Path, random_models: RandomModel) -> None:
    """A slice does not show over how many files its model was spread, and the manifest plans the same one."""
    first = write_random_model(tmp_path / "m.gguf", "qwen2", split_tensors=20)
    from_parts = write_slice(plan_slice(ModelFile.open(first), 2, 5), tmp_path / "parts.gguf")
    from_whole = write_slice(
        plan_slice(ModelFile.open(random_models("qwen2")), 2, 5), tmp_path / "whole.gguf"
    )
    assert from_parts.read_bytes() == from_whole.read_bytes()
    model = ModelFile.open(first)
    by_manifest = plan_slice(ModelFile.from_manifest(model.to_manifest()), 2, 5)
    assert (by_manifest.header, by_manifest.pieces) == (
        plan_slice(model, 2, 5).header,
        plan_slice(model, 2, 5).pieces,
    )
    with pytest.raises(ModelError, match="not on this machine"):
        write_slice(by_manifest, tmp_path / "none.gguf")


@pytest.mark.parametrize(("first", "last"), [(0, 30), (-1, 3), (5, 4), (30, 30)])
def test_layers_outside(smollm2: ModelFile, first: int, last: int) -> None:
    with pytest.raises(LayersOutside, match="layers 0-29"):
        plan_slice(smollm2, first, last)


def test_a_slice_of_a_slice_is_refused(smollm2: ModelFile, tmp_path: Path) -> None:
    shard = written(plan_slice(smollm2, 0, 9), tmp_path)
    with pytest.raises(Uncuttable, match=r"itself a slice, layers 0-9 of 30"):
        plan_slice(shard, 0, 4)


def test_refusals_name_architecture_and_reason(random_models: RandomModel) -> None:
    with pytest.raises(Uncuttable, match=rf"'{UNCUTTABLE}' cannot be cut: a layer's position encoding"):
        plan_slice(ModelFile.open(random_models(UNCUTTABLE)), 0, 3)
    assert "input of its own made from the tokens" in (refusal("gemma3n") or "")
    assert "'bert' cannot be cut" in (refusal("bert") or "")
    assert "'mamba9' are not cut: it is not proven" in (refusal("mamba9") or "")
    assert refusal("llama") is None


def test_refusals_of_one_model(random_models: RandomModel) -> None:
    odd = ModelFile.open(random_models("qwen2", extra={"some.new_array": [1] * 8}))
    assert "qwen2.some.new_array has one value per layer" in (model_refusal(odd) or "")
    short = ModelFile.open(random_models("qwen2", extra={"attention.head_count_kv": [2, 2]}))
    assert "has 2 values for 8 layers" in (model_refusal(short) or "")
    deep = ModelFile.open(random_models("gemma3", n_layers=62))
    assert "62 layers" in (model_refusal(deep) or "")


def test_progress_and_failure_leave_no_debris(random_models: RandomModel, tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(random_models("qwen2").read_bytes())
    plan = plan_slice(ModelFile.open(source), 2, 3)
    seen: list[tuple[int, int]] = []
    out = write_slice(plan, tmp_path / "new" / "s.gguf", lambda done, total: seen.append((done, total)))
    assert seen[-1] == (plan.copy_bytes, plan.copy_bytes)
    assert [path.name for path in out.parent.iterdir()] == ["s.gguf"]
    source.write_bytes(source.read_bytes()[: plan.pieces[0].offset])
    before = out.read_bytes()
    with pytest.raises(TruncatedGGUF, match="fetch the file again"):
        write_slice(plan, out)
    assert [path.name for path in out.parent.iterdir()] == ["s.gguf"]
    assert out.read_bytes() == before
    with pytest.raises(ModelError, match="cannot be written"):
        write_slice(plan, source / "inside-a-file.gguf")


def test_a_middle_loads_and_runs(smollm2: ModelFile, tmp_path: Path) -> None:
    import numpy as np

    shard = written(plan_slice(smollm2, 10, 19), tmp_path)
    with Stage(shard.path, layer_output_name(shard, 19)) as stage:
        rows = stage.step(0, np.ones((5, 576), np.float32))
    assert rows.shape == (5, 576)
    assert np.isfinite(rows).all()
