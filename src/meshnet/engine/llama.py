"""The default engine: a shard of a model on llama.cpp, as adjoining segments."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshnet.engine.base import (
    EngineError,
    EngineInfo,
    Hidden,
    Sampled,
    SamplingParams,
    SelfTest,
    Step,
    StepResult,
    Tokens,
)
from meshnet.engine.grammar import Grammar
from meshnet.engine.hardware import choose_devices, hardware_name
from meshnet.engine.library import load_library
from meshnet.engine.memory import check_memory, memory_need
from meshnet.engine.numerics import EXACT_ROWS, numerics_class
from meshnet.engine.replay import proven_rows
from meshnet.engine.sampling import Logits, SlotSampler, draw
from meshnet.engine.segment import Rows, Segment, SegmentOptions
from meshnet.engine.selftest import exact_in_chunks, measure
from meshnet.engine.shards import (
    Progress,
    ShardStore,
    default_threads,
    layers_on_gpu,
    part_of,
    pin_thread,
    segment_borders,
    shard_file,
)
from meshnet.engine.steps import check_rows, groups, joined
from meshnet.models.architecture import architecture, refusal
from meshnet.models.errors import ModelError
from meshnet.models.gguf import ModelFile

MAX_SLOTS = 256
KEPT_CHECKPOINTS = 3


@dataclass
class _Slot:
    entry: int
    exit: int
    position: int = 0
    sampler: SlotSampler | None = None
    rows_before: int = 0
    """Rows of the last step."""
    checkpoints: list[tuple[int, tuple[bytes, ...]]] = field(default_factory=list)
    """Recurrent states by position, oldest first, one per segment that the slot runs."""


class LlamaEngine:
    """Implements `Engine`. Built by `load`."""

    def __init__(
        self,
        info: EngineInfo,
        segments: list[Segment],
        options: SegmentOptions,
        cores: tuple[int, ...] | None,
        cleanup: ExitStack,
        proven: bool,
    ) -> None:
        self._info = info
        self._segments = segments
        self._options = options
        self._cores = cores
        self._cleanup = cleanup
        self._proven = proven
        self._pinned: int | None = None
        self._slots: dict[int, _Slot] = {}
        self._api = load_library().api
        tail = segments[-1]
        self._vocabulary = tail.vocabulary
        self._eog = (
            frozenset(t for t in range(tail.n_vocab) if self._api.llama_vocab_is_eog(tail.vocabulary, t))
            if info.is_tail
            else frozenset()
        )

    @classmethod
    def load(
        cls,
        model: ModelFile | str | Path,
        first: int,
        last: int,
        *,
        cuts: Sequence[int] = (),
        n_slots: int = 8,
        n_ctx: int = 2048,
        threads: int | None = None,
        cores: Sequence[int] | None = None,
        gpu_layers: int = 0,
        device: str = "auto",
        memory_limit: int | None = None,
        max_rows: int = 256,
        repack: bool = False,
        native_tap: bool = True,
        progress: Progress | None = None,
        store: ShardStore | None = None,
    ) -> LlamaEngine:
        """Load layers `first..last`, both inclusive, as one segment per entry layer.

        `cuts` are further entry layers inside the shard. `n_ctx` is per slot. `cores` are the CPUs that
        compute threads are bound to; `threads` defaults to their number, or to that of the CPUs this process
        may use, and to fewer for small shards. `memory_limit` is in bytes; without it, what the machine has
        available counts. `repack` copies the weights into a layout that some CPUs multiply faster; with
        K-quants, results then hang on how many rows a call has, so it is off unless asked for. Raises
        EngineError.
        """
        library = load_library()
        try:
            model = model if isinstance(model, ModelFile) else ModelFile.open(model)
        except ModelError as error:
            raise EngineError(str(error)) from error
        if not 1 <= n_slots <= MAX_SLOTS:
            raise EngineError(f"slots is {n_slots}; 1 to {MAX_SLOTS} are possible")
        if n_ctx < 1 or max_rows < 1:
            raise EngineError(f"context is {n_ctx} and rows per call {max_rows}; both must be at least 1")
        borders = segment_borders(model, first, last, cuts)
        everything = (first, last) == (0, model.n_layers - 1) and len(borders) == 1
        whole = everything and model.shard_range is None and model.is_local
        if not whole and (reason := refusal(model.arch)):
            raise EngineError(reason)
        need = memory_need(model, first, last, n_slots=n_slots, n_ctx=n_ctx, max_rows=max_rows)
        check_memory(need, memory_limit, model.name, first, last)
        chosen = choose_devices(library, device, gpu_layers)
        known = None if refusal(model.arch) else architecture(model.arch)
        options = SegmentOptions(
            n_slots=n_slots,
            n_ctx=n_ctx,
            max_rows=max_rows,
            threads=threads or default_threads(cores, need.weights),
            layer_output=known.layer_output if known else "l_out",
            positions_per_row=known.positions_per_row if known else 1,
            recurrent=known.recurrent if known else False,
            native_tap=native_tap,
            repack=repack,
            devices=chosen.addresses,
        )
        pin_thread(cores)
        cleanup = ExitStack()
        segments: list[Segment] = []
        try:
            for index, (a, b) in enumerate(borders):
                path = shard_file(model, a, b, whole, store, cleanup)
                segments.append(
                    Segment(
                        library,
                        path,
                        a,
                        b,
                        options,
                        is_head=a == 0,
                        is_tail=b == model.n_layers - 1,
                        n_embd=model.n_embd,
                        gpu_layers=layers_on_gpu(chosen.layers, b - a + 1, last - b),
                        progress=part_of(progress, index, len(borders), a, b),
                    )
                )
                cleanup.callback(segments[-1].close)
        except (EngineError, ModelError) as error:
            cleanup.close()
            raise EngineError(str(error)) from error
        numerics = numerics_class(
            library,
            devices=chosen.names,
            repack=repack,
            threads=None if all(s.thread_independent for s in segments) else options.threads,
        )
        proven = proven_rows(model.arch, model.quantisation, numerics)
        info = EngineInfo(
            model=model.name,
            fingerprint=model.fingerprint,
            arch=model.arch,
            first=first,
            last=last,
            model_layers=model.n_layers,
            n_embd=model.n_embd,
            n_vocab=model.n_vocab,
            n_ctx=n_ctx,
            n_slots=n_slots,
            max_rows=max_rows,
            entry_layers=tuple(a for a, _ in borders),
            recurrent=options.recurrent,
            numerics_class=numerics,
            replay_rows=proven or 1,
            hardware=hardware_name(chosen),
            memory_bytes=sum(sum(segment.buffers.values()) for segment in segments),
        )
        return cls(info, segments, options, tuple(cores) if cores else None, cleanup, proven is not None)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def files(self) -> tuple[tuple[int, int, Path], ...]:
        """First layer, last layer and file of each segment."""
        return tuple((segment.first, segment.last, segment.path) for segment in self._segments)

    @property
    def vocabulary(self) -> int:
        """Address of llama.cpp's vocabulary, for a tokenizer; of a head or a tail only."""
        if not (self._info.is_head or self._info.is_tail):
            raise EngineError("a shard in the middle of a model has no vocabulary; ask a head or a tail")
        return (self._segments[0] if self._info.is_head else self._segments[-1]).vocabulary

    def open(self, slot: int, entry: int, exit: int, sampling: SamplingParams | None = None) -> None:
        info = self._info
        self._alive()
        if not 0 <= slot < info.n_slots:
            raise EngineError(f"slot {slot} is not one of 0..{info.n_slots - 1}")
        if entry not in info.entry_layers:
            has = ", ".join(map(str, info.entry_layers))
            raise EngineError(f"layer {entry} is no entry layer of this shard; it has {has}")
        if not entry <= exit <= info.last:
            raise EngineError(f"exit layer {exit} is not one of {entry}..{info.last}")
        if exit == info.model_layers - 1 and sampling is None:
            raise EngineError(f"slot {slot} ends at the model's last layer: sampling parameters are required")
        sampler = self._sampler(sampling) if exit == info.model_layers - 1 and sampling else None
        self.close(slot)
        self._slots[slot] = _Slot(entry, exit, sampler=sampler)

    def run(self, steps: Sequence[Step]) -> list[StepResult]:
        if not steps:
            return []
        self._alive()
        slots = self._check(steps)
        self._pin_thread()
        run_segments = self._run_segments(slots[0])
        results: list[StepResult | None] = [None] * len(steps)
        before = [slot.position for slot in slots]
        try:
            if self._info.recurrent:
                self._take_checkpoints(steps, slots)
            for group in groups(steps, self._info.max_rows):
                self._run_group(steps, slots, group, run_segments, results)
        except EngineError:
            self._undo(steps, slots, before)
            raise
        for step, slot in zip(steps, slots, strict=True):
            slot.position = step.position + step.rows
            slot.rows_before = step.rows
        return [result for result in results if result is not None]

    def replay_tokens(self, slot: int, tokens: Tokens, position: int) -> None:
        state = self._slot(slot)
        if state.sampler is None:
            raise EngineError(f"slot {slot} does not sample here; replay its tokens at the tail")
        state.sampler.observe(tokens, position)

    def position(self, slot: int) -> int:
        return self._slot(slot).position

    def rollback(self, slot: int, position: int) -> int:
        state = self._slot(slot)
        if not 0 <= position <= state.position:
            raise EngineError(
                f"slot {slot} holds {state.position} positions; it cannot go back to {position}"
            )
        if position == state.position:
            return position
        reached = self._rewind(slot, state, position)
        if state.sampler is not None:
            state.sampler.truncate(position)
        return reached

    def fork(self, source: int, target: int, sampling: SamplingParams | None = None) -> None:
        origin = self._slot(source)
        if source == target or not 0 <= target < self._info.n_slots:
            raise EngineError(f"slot {target} cannot become a copy of slot {source}")
        sampler = None
        if origin.sampler is not None:
            sampler = self._sampler(sampling) if sampling else origin.sampler.fork(self._grammar)
        self.close(target)
        for segment in self._run_segments(origin):
            segment.copy(source, target)
        self._slots[target] = _Slot(
            origin.entry, origin.exit, origin.position, sampler, origin.rows_before, list(origin.checkpoints)
        )

    def logits(self, row: int) -> Logits:
        """The raw logits (n_vocab,) of a row of the last call, for checks; the next call overwrites them.

        Rows count over the steps of the last run's last group, and only sampled rows have logits.
        """
        self._alive()
        return self._segments[-1].logits(row)

    def resample(self, slot: int, sampling: SamplingParams) -> None:
        state = self._slot(slot)
        if state.sampler is None:
            raise EngineError(f"slot {slot} does not sample here")
        fresh = self._sampler(sampling)
        state.sampler.close()
        state.sampler = fresh

    def close(self, slot: int) -> None:
        state = self._slots.pop(slot, None)
        if state is None:
            return
        if state.sampler is not None:
            state.sampler.close()
        for segment in self._segments:
            segment.clear(slot)

    def self_test(self) -> SelfTest:
        self._alive()
        if self._slots:
            raise EngineError("the self-test needs all slots free; close them first")
        self._pin_thread()
        tail = self._segments[-1]
        plain = SamplingParams(temperature=0.0)

        def sample(row: int) -> None:
            draw(tail.logits(row), plain, 0)

        if not self._proven and exact_in_chunks(self._segments, self._info, tail.logits):
            self._info = replace(self._info, replay_rows=EXACT_ROWS)
        return measure(self._segments, self._info, sample)

    def unload(self) -> None:
        for state in self._slots.values():
            if state.sampler is not None:
                state.sampler.close()
        self._slots.clear()
        self._segments.clear()
        self._cleanup.close()

    def describe(self) -> dict[str, Any]:
        return {
            "engine": self._info.numerics_class,
            "threads": self._options.threads,
            "cores": list(self._cores) if self._cores else None,
            "tap": "native" if all(segment.native_tap for segment in self._segments) else "python",
            "segments": [
                {"first": s.first, "last": s.last, "file": s.path.name, "buffers": dict(s.buffers)}
                for s in self._segments
            ],
            "open_slots": len(self._slots),
        }

    def _alive(self) -> None:
        if not self._segments:
            raise EngineError("this engine was unloaded")

    def _grammar(self, text: str) -> Grammar:
        return Grammar(self._api, self._vocabulary, text)

    def _sampler(self, params: SamplingParams) -> SlotSampler:
        return SlotSampler(params, self._info.n_vocab, self._eog, self._grammar)

    def _slot(self, slot: int) -> _Slot:
        state = self._slots.get(slot)
        if state is None:
            raise EngineError(f"slot {slot} is not open")
        return state

    def _pin_thread(self) -> None:
        thread = threading.get_ident()
        if self._pinned != thread:
            pin_thread(self._cores)
            self._pinned = thread

    def _run_segments(self, slot: _Slot) -> list[Segment]:
        return [s for s in self._segments if s.last >= slot.entry and s.first <= slot.exit]

    def _check(self, steps: Sequence[Step]) -> list[_Slot]:
        """Every step's slot, after all that a caller can get wrong was looked at."""
        info = self._info
        slots = [self._slot(step.slot) for step in steps]
        if len({step.slot for step in steps}) != len(steps):
            raise EngineError("a slot stands twice in one call; give it one step with more rows")
        entry, exit_ = slots[0].entry, slots[0].exit
        total = 0
        for step, slot in zip(steps, slots, strict=True):
            if (slot.entry, slot.exit) != (entry, exit_):
                raise EngineError(
                    f"slot {step.slot} runs layers {slot.entry}-{slot.exit}, others {entry}-{exit_}"
                )
            check_rows(step, entry, info)
            if step.position != slot.position:
                raise EngineError(
                    f"slot {step.slot}: position {step.position} was given, {slot.position} was expected"
                )
            if step.position + step.rows > info.n_ctx:
                raise EngineError(
                    f"slot {step.slot}: {step.position + step.rows} positions, its context holds {info.n_ctx}"
                )
            if not 0 <= step.sample <= step.rows or (step.sample and slot.sampler is None):
                raise EngineError(f"slot {step.slot}: cannot sample {step.sample} of {step.rows} rows here")
            total += step.rows
        if total > info.max_rows:
            raise EngineError(f"{total} rows in one call; {info.max_rows} is the most")
        return slots

    def _run_group(
        self,
        steps: Sequence[Step],
        slots: Sequence[_Slot],
        group: Sequence[int],
        segments: Sequence[Segment],
        results: list[StepResult | None],
    ) -> None:
        parts = [steps[i] for i in group]
        rows = [Rows(step.slot, step.position, step.rows, step.sample) for step in parts]
        tokens: Tokens | None = None
        data: Hidden | None = None
        if parts[0].tokens is not None:
            tokens = joined([step.tokens for step in parts if step.tokens is not None])
        else:
            data = joined([step.hidden for step in parts if step.hidden is not None])
        exit_ = slots[group[0]].exit
        is_tail = exit_ == self._info.model_layers - 1
        for segment in segments:
            until = None if is_tail and segment.is_tail else min(exit_, segment.last)
            data = segment.decode(rows, tokens, data, until)
            tokens = None
        start = 0
        for i in group:
            step, slot = steps[i], slots[i]
            end = start + step.rows
            if data is not None:
                results[i] = StepResult(step.slot, step.position, hidden=data[start:end].copy())
            else:
                if slot.sampler is not None and step.tokens is not None:
                    # drafts behind the first sampled row are not generated tokens yet
                    known = step.tokens[: step.rows - max(step.sample, 1) + 1]
                    if not slot.sampler.agrees(known, step.position):
                        slot.sampler.observe(known, step.position)
                sampled = self._sample(segments[-1], step, slot, end) if step.sample else ()
                results[i] = StepResult(step.slot, step.position, sampled=sampled)
            start = end

    def _sample(self, tail: Segment, step: Step, slot: _Slot, end: int) -> tuple[Sampled, ...]:
        sampler = slot.sampler
        assert sampler is not None
        after = step.position + step.rows
        sampled: list[Sampled] = []
        for index, back in enumerate(range(step.sample, 0, -1)):
            sampled.append(sampler.sample(tail.logits(end - back), after - back + 1))
            if index < len(step.drafts) and (sampled[-1].end or sampled[-1].token != step.drafts[index]):
                break
        return tuple(sampled)

    def _take_checkpoints(self, steps: Sequence[Step], slots: Sequence[_Slot]) -> None:
        """Before a step of a few rows, which may be drafts, and where a prompt ends.

        The rule sees nothing but positions and rows, so that all stages of a route have the same checkpoints.
        """
        for step, slot in zip(steps, slots, strict=True):
            drafts = 1 < step.rows <= EXACT_ROWS
            if step.position and (drafts or (step.rows == 1 and slot.rows_before > 1)):
                states = tuple(s.save_recurrent(step.slot) for s in self._run_segments(slot))
                slot.checkpoints.append((step.position, states))
                del slot.checkpoints[:-KEPT_CHECKPOINTS]

    def _rewind(self, number: int, slot: _Slot, position: int) -> int:
        """Take the memory back to `position`, or below it where only a checkpoint can be reached."""
        segments = self._run_segments(slot)
        if not self._info.recurrent:
            for segment in segments:
                segment.truncate(number, position)
            slot.position = position
            return position
        while slot.checkpoints and slot.checkpoints[-1][0] > position:
            slot.checkpoints.pop()
        reached = 0
        if slot.checkpoints:
            reached, states = slot.checkpoints[-1]
            for segment, state in zip(segments, states, strict=True):
                if not (segment.restore_recurrent(number, state) and segment.truncate(number, reached)):
                    reached = 0
                    slot.checkpoints.clear()
                    break
        if reached == 0:
            for segment in segments:
                segment.clear(number)
        slot.position = reached
        slot.rows_before = 0
        return reached

    def _undo(self, steps: Sequence[Step], slots: Sequence[_Slot], before: Sequence[int]) -> None:
        """After a failed call: slots as they were; a recurrent one that cannot go back there is closed."""
        for step, slot, position in zip(steps, slots, before, strict=True):
            if self._rewind(step.slot, slot, position) != position:
                self.close(step.slot)
            elif slot.sampler is not None:
                slot.sampler.truncate(position)
