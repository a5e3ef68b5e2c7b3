"""How much the output matrix weighs against a layer, measured here for batches of a given size.

One token alone is bound by the bytes of the weights; a batch is bound by arithmetic, where the output matrix
of a small model counts for much less than its bytes say. So the balance between stages hangs on how many
sessions run together, and is measured rather than derived: on the model's last few layers, in about a second.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from meshnet.engine.base import SamplingParams, Step
from meshnet.engine.llama import LlamaEngine
from meshnet.models.gguf import ModelFile

LAYERS = 4
MAX_BYTES = 2 << 30
"""Of the weights that are cut out and loaded; beyond, measuring would take too long."""
CONTEXT = 256
"""Positions per slot; `DEPTH` of them are filled first, as in the middle of a short answer."""
DEPTH = 96
FILL_ROWS = 32
LEAST_ROUNDS = 7
BUDGET_S = 1.0
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Balance:
    """Milliseconds of a decode call of `rows` sessions: of one layer; of norm, output matrix and sampling."""

    rows: int
    layer_ms: float
    output_ms: float

    @property
    def output_work(self) -> float:
        """Norm, output matrix and sampling, in layers."""
        return self.output_ms / self.layer_ms


def measure_balance(model: ModelFile, rows: int) -> Balance | None:
    """Times a decode call of `rows` sessions on the model's last layers, stopped early, late and not at all.

    None for a model with too few layers to tell, or with too large ones. Computes on one thread and counts
    its own time on the CPU, so that what else the machine does hardly matters; medians of interleaved rounds
    meet the rest. Raises EngineError where the model cannot be cut or run here.
    """
    last = model.n_layers - 1
    first = last - LAYERS + 1
    if first < 1 or sum(model.layer_bytes[first:]) + model.output_bytes > MAX_BYTES:
        return None
    engine = LlamaEngine.load(
        model, first, last, n_slots=3 * rows, n_ctx=CONTEXT, threads=1, max_rows=max(rows, FILL_ROWS)
    )
    try:
        return _measure(engine, first, last, rows)
    finally:
        engine.unload()


def _measure(engine: LlamaEngine, first: int, last: int, rows: int) -> Balance:
    hidden = np.random.default_rng(7).standard_normal((DEPTH, engine.info.n_embd)).astype(np.float32)
    exits = (first, last - 1, last)
    """One layer, all but the last one, and everything: three groups of slots."""
    for group, exit_ in enumerate(exits):
        for slot in range(group * rows, (group + 1) * rows):
            engine.open(slot, first, exit_, GREEDY if exit_ == last else None)
            for start in range(0, DEPTH, FILL_ROWS):
                engine.run([Step(slot, start, None, hidden[start : start + FILL_ROWS], 0)])
    times: list[list[float]] = [[] for _ in exits]
    started = time.perf_counter()
    position = DEPTH
    while position < CONTEXT:
        for group, found in enumerate(times):
            sample = int(exits[group] == last)
            row = position % DEPTH
            steps = [
                Step(group * rows + i, position, None, hidden[row : row + 1], sample) for i in range(rows)
            ]
            begun = time.thread_time()
            engine.run(steps)
            found.append((time.thread_time() - begun) * 1e3)
        position += 1
        if len(times[0]) >= LEAST_ROUNDS and time.perf_counter() - started > BUDGET_S:
            break
    one, most, whole = (statistics.median(found) for found in times)
    layer = max((most - one) / (last - 1 - first), 1e-6)
    return Balance(rows, layer, max(whole - most - layer, 0.0))
