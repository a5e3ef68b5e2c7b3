"""Measures a loaded shard: medians of compute alone, the layers apart from embedding and output."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from meshnet.engine.base import EngineError, EngineInfo, Hidden, SelfTest
from meshnet.engine.segment import Rows, Segment

PREFILL_ROWS = 64
DEPTH = 32
"""Positions that the decode steps find in the context."""
ROUNDS = 9
PREFILL_ROUNDS = 2
BATCHES = (2, 4, 8, 16, 32)
BATCH_ROUNDS = 3
ENOUGH_MS = 100.0
"""A batch's steps that took so long are enough: noise is small beside them."""
PROOF_ROWS, LEAST_PROOF_ROWS = 40, 8
PROOF_LIMIT_S = 3.0
"""For the least rows of a proof."""
BUDGET_S = 0.6
"""For the decode figures, for the batches and for the proof; a slow machine makes fewer rounds."""


def measure(segments: Sequence[Segment], info: EngineInfo, sample: Callable[[int], None]) -> SelfTest:
    """Times steps over all of the shard's segments; slots must be free and are clear again afterwards.

    `sample` makes a token of the tail's row. Noise is met by medians of interleaved rounds. Raises
    EngineError where a step fails.
    """
    bench = _Bench(segments, info, sample)
    try:
        return bench.run()
    finally:
        for segment in segments:
            for slot in range(info.n_slots):
                segment.clear(slot)


def exact_in_chunks(
    segments: Sequence[Segment], info: EngineInfo, logits: Callable[[int], npt.NDArray[np.float32]]
) -> bool | None:
    """Whether rows computed together are, to the bit, the rows computed one at a time, on these weights.

    Compares up to 40 rows; None where the time is too short for 8. Slots must be free, and are so afterwards.
    """
    bench = _Bench(segments, info, lambda row: None)
    try:
        return bench.exact(logits)
    finally:
        for segment in segments:
            for slot in range(info.n_slots):
                segment.clear(slot)


class _Bench:
    def __init__(self, segments: Sequence[Segment], info: EngineInfo, sample: Callable[[int], None]) -> None:
        self.segments, self.info, self._sample = segments, info, sample
        rows = min(info.max_rows, info.n_ctx)
        self._tokens = np.arange(rows, dtype=np.int32) % info.n_vocab
        noise = np.random.default_rng(7).standard_normal((rows, info.n_embd))
        self._hidden = noise.astype(np.float32)
        self._result: Hidden | None = None
        self._reset_positions()

    def run(self) -> SelfTest:
        info = self.info
        layers = info.last - info.first + 1
        prefill_rows = min(PREFILL_ROWS, info.max_rows, info.n_ctx // 2)
        prefill = min(self._step(1, prefill_rows, info.last) for _ in range(PREFILL_ROUNDS))
        self._rewind(min(DEPTH, prefill_rows))
        short = info.first + layers // 4
        whole: list[float] = []
        deep: list[float] = []
        shallow: list[float] = []
        started = time.perf_counter()
        while len(deep) < ROUNDS and (len(deep) < 3 or time.perf_counter() - started < BUDGET_S):
            deep.append(self._step(1, 1, info.last))
            shallow.append(self._step(1, 1, short))
            if info.is_tail:
                whole.append(self._step(1, 1, None))
        all_layers, some_layers = statistics.median(deep), statistics.median(shallow)
        embed, per_layer = 0.0, all_layers / layers
        fewer = short - info.first + 1
        if info.is_head and fewer < layers:
            slope = max((all_layers - some_layers) / (layers - fewer), 0.0)
            embed = min(max(all_layers - slope * layers, 0.0), all_layers / 2)
            per_layer = (all_layers - embed) / layers
        beyond = [a - b for a, b in zip(whole, deep, strict=True)] if whole else [0.0]
        return SelfTest(
            decode_ms_per_layer=per_layer,
            prefill_ms_per_token_layer=prefill / (prefill_rows * layers),
            embed_ms=embed,
            output_ms=max(statistics.median(beyond), 0.0),
            batch_ms=self._batches(statistics.median(whole or deep)),
        )

    def exact(self, logits: Callable[[int], npt.NDArray[np.float32]]) -> bool | None:
        before = min(DEPTH, self.info.n_ctx // 4)
        most = min(PROOF_ROWS, self.info.max_rows, self.info.n_ctx - before, len(self._tokens))
        until = None if self.info.is_tail else self.info.last
        alone: list[npt.NDArray[np.float32]] = []
        self._step(1, before, self.info.last)
        started = time.perf_counter()
        while len(alone) < most:
            limit = BUDGET_S if len(alone) >= LEAST_PROOF_ROWS else PROOF_LIMIT_S
            if time.perf_counter() - started > limit:
                break
            row = len(alone)
            self._step(1, 1, until, offset=row)
            found = logits(0) if self._result is None else self._result[0]
            alone.append(found.copy())
        if len(alone) < LEAST_PROOF_ROWS:
            return None
        self._rewind(before)
        self._step(1, len(alone), until, wanted=len(alone))
        together = [logits(row) if self._result is None else self._result[row] for row in range(len(alone))]
        return all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))

    def _batches(self, alone: float) -> dict[int, float]:
        found = {1: alone}
        started = time.perf_counter()
        until = None if self.info.is_tail else self.info.last
        for count in BATCHES:
            if count > min(self.info.n_slots, self.info.max_rows) or time.perf_counter() - started > BUDGET_S:
                break
            self._reset()
            steps: list[float] = []
            while len(steps) < 2 or (len(steps) < BATCH_ROUNDS and sum(steps) < ENOUGH_MS):
                steps.append(self._step(count, 1, until))
            found[count] = statistics.median_low(steps)
        return found

    def _rewind(self, position: int) -> None:
        """Takes the first slot, which has run through all segments, back to `position`; a recurrent one gets
        there from the start."""
        if self.info.recurrent:
            self._reset()
            self._step(1, position, self.info.last)
            return
        for segment, positions in zip(self.segments, self._position, strict=True):
            segment.truncate(0, position)
            positions[0] = position

    def _reset(self) -> None:
        for segment in self.segments:
            for slot in range(self.info.n_slots):
                segment.clear(slot)
        self._reset_positions()

    def _reset_positions(self) -> None:
        # A step that stops early leaves the later segments where they are: each counts for itself.
        self._position = [[0] * self.info.n_slots for _ in self.segments]

    def _step(self, slots: int, rows: int, until: int | None, *, offset: int = 0, wanted: int = 1) -> float:
        """Milliseconds for `rows` rows on each of the first `slots` slots, inputs from `offset` on."""
        if self._position[0][0] + rows > self.info.n_ctx:
            self._reset()
        total = slots * rows
        data: Hidden | None = None
        started = time.perf_counter()
        for segment, position in zip(self.segments, self._position, strict=True):
            parts = [Rows(slot, position[slot], rows, wanted * int(until is None)) for slot in range(slots)]
            for slot in range(slots):
                position[slot] += rows
            tokens = self._tokens[offset : offset + total] if segment.is_head else None
            if tokens is None and data is None:
                data = self._hidden[offset : offset + total]
            stop = None if until is None and segment.is_tail else min(until or segment.last, segment.last)
            data = segment.decode(parts, tokens, data, stop)
            if until is not None and until <= segment.last:
                break
        if until is None:
            if data is not None:
                raise EngineError("the shard gave no logits in its self-test")
            for row in range(total):
                self._sample(row)
        self._result = data
        return (time.perf_counter() - started) * 1e3
