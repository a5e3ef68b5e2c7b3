"""What a token reads of a model, and the plan that is made from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from meshnet.commands.model import parse_sizes, parse_speeds
from meshnet.models.gguf import ModelFile
from meshnet.models.work import decode_work
from meshnet.tracker.weighing import model_layers

RandomModel = Callable[..., Path]


def test_a_dense_model_reads_all_of_its_layers(smollm2: ModelFile) -> None:
    work = decode_work(smollm2)
    assert work.layers == smollm2.layer_bytes
    assert work.output == smollm2.output_bytes
    assert work.embedding == smollm2.embedding_bytes // 49152
    assert 13 < work.output / work.mean_layer < 14, "the output matrix weighs as much as 13.6 layers"


def test_a_mixture_reads_the_experts_that_are_used(random_models: RandomModel) -> None:
    model = ModelFile.open(random_models("qwen3moe"))
    experts = sum(t.n_bytes for t in model.tensors if t.layer == 0 and "_exps." in t.name)
    assert decode_work(model).layers[0] == model.layer_bytes[0] - experts // 2


def test_prediction_blocks_are_not_read(random_models: RandomModel) -> None:
    model = ModelFile.open(random_models("qwen35", prediction_layers=1))
    assert len(decode_work(model).layers) == 8


def test_layers_for_placement(smollm2: ModelFile) -> None:
    layers = model_layers(smollm2)
    assert layers.layers == 30
    assert layers.tied
    assert sum(layers.layer_work) == pytest.approx(30)
    assert sum(layers.layer_bytes) + layers.output_bytes == sum(t.n_bytes for t in smollm2.tensors)


def test_speeds_and_sizes() -> None:
    speeds = parse_speeds("mini:30, the:laptop:12.5")
    assert speeds == {"mini": 30.0, "the:laptop": 12.5}
    sizes = parse_sizes("mini:8GB,the:laptop:512MiB", speeds)
    assert sizes == {"mini": 8_000_000_000, "the:laptop": 512 << 20}
    assert parse_sizes("mini:1000", speeds) == {"mini": 1000}
    for text in ("", "a", "a:", ":3", "a:x", "a:0", "a:-1", "a:nan", "a:inf", "a:1,a:2"):
        with pytest.raises(typer.BadParameter):
            parse_speeds(text)
    for text in ("mini:many", "mini:", "other:8GB", "mini:8XB"):
        with pytest.raises(typer.BadParameter):
            parse_sizes(text, speeds)
