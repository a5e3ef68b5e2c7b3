"""What proposed cuts go by: how much each part of a model weighs for so many calls at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshnet.models.gguf import ModelFile
from meshnet.routing.placement import ModelLayers
from meshnet.tracker.weighing import model_layers

STREAMS = 16
"""Calls at once that cuts are proposed for, unless told otherwise: a node's slots by default."""
MAX_GROUP = 32
"""Sessions per call beyond which the balance hardly moves."""


def rows_of(streams: int, nodes: int) -> int:
    """Sessions per decode call when `streams` run in as many groups as there are nodes."""
    return max(1, min(math.ceil(streams / nodes), MAX_GROUP))


@dataclass(frozen=True, slots=True)
class Weighed:
    """A model for placement, and `why` in words. `layer_ms`: of a decode call here, one layer; None where
    nothing was measured."""

    layers: ModelLayers
    layer_ms: float | None
    why: str


def weigh(file: ModelFile, rows: int) -> Weighed:
    """`model_layers` with the output's work as it is measured here for decode calls of `rows` sessions, or by
    the bytes that are read where nothing can be measured."""
    from meshnet.engine.balance import measure_balance
    from meshnet.engine.base import EngineError

    layers = model_layers(file)
    reason = "the model has too few layers to measure, or too large ones"
    try:
        balance = measure_balance(file, rows)
    except EngineError as error:
        balance, reason = None, str(error)
    if balance is None:
        return Weighed(
            layers, None, f"output counted by its bytes ({layers.output_work:.1f} layers): {reason}"
        )
    work = balance.output_work
    why = f"output takes the time of {work:.1f} layers, measured with {rows} sessions per call"
    return Weighed(replace(layers, output_work=work), balance.layer_ms, why)
