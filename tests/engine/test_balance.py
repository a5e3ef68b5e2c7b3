"""What the output matrix weighs against a layer: measured on a busy machine, so bounds are wide."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.random_gguf import random_model

from meshnet.commands.balance import MAX_GROUP, rows_of, weigh
from meshnet.engine.balance import measure_balance
from meshnet.models.gguf import ModelFile
from meshnet.tracker.weighing import model_layers


def test_the_output_of_a_batch_weighs_less_than_its_bytes(smollm2: ModelFile) -> None:
    """SmolLM2's output matrix reads as many bytes as 13.5 layers, and computes as much as 8 of them."""
    by_bytes = model_layers(smollm2)
    assert 13 < by_bytes.output_work < 14
    balance = measure_balance(smollm2, 8)
    assert balance is not None
    assert balance.rows == 8
    assert balance.output_ms > balance.layer_ms > 0
    assert 2 < balance.output_work < 13
    weighed = weigh(smollm2, 8)
    assert "measured with 8 sessions" in weighed.why
    assert weighed.layer_ms
    assert 2 < weighed.layers.output_work < 13
    assert weighed.layers.layer_bytes == by_bytes.layer_bytes


def test_a_model_too_short_to_measure_goes_by_bytes(tmp_path: Path) -> None:
    model = ModelFile.open(random_model(tmp_path, "llama", n_layers=3))
    assert measure_balance(model, 2) is None
    weighed = weigh(model, 2)
    assert weighed.layers == model_layers(model)
    assert weighed.layer_ms is None
    assert "by its bytes" in weighed.why
    assert "too few layers" in weighed.why


@pytest.mark.parametrize(
    ("streams", "nodes", "rows"), [(16, 2, 8), (1, 2, 1), (9, 2, 5), (1000, 2, MAX_GROUP)]
)
def test_sessions_run_in_as_many_groups_as_nodes(streams: int, nodes: int, rows: int) -> None:
    assert rows_of(streams, nodes) == rows
