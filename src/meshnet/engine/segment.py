"""One model file and one context over it: the layers between two cuts of a shard.

A call to `decode` is one ubatch of llama.cpp, always: rows of one slot, or equally many rows of slots with
consecutive numbers, slot by slot. llama.cpp would split anything else by itself and hand rows back in an
order of its own; with one ubatch the order is the one that went in, and the tap fires once.
"""

from __future__ import annotations

import ctypes as c
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshnet.engine.base import EngineError, Hidden
from meshnet.engine.bindings import OPTIONAL, Batch, ProgressCallback
from meshnet.engine.library import Library, forget_messages, last_messages, listen
from meshnet.engine.numerics import EXACT_ROWS
from meshnet.engine.tap import Tap
from meshnet.models.gguf import ModelFile
from meshnet.models.memory import LOGIT_ROWS

PARTIAL_STATE = 1
"""LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: the recurrent part of a sequence's state."""

MAX_VIEWS = 1024
"""Rows of logits whose views are kept; llama.cpp gives them at the same few addresses."""

_BUFFER_LINE = re.compile(r"(\S+)\s+(model|KV|RS|compute|output)\s+buffer size\s*=\s*([\d.]+) MiB")


@dataclass(frozen=True)
class SegmentOptions:
    """What all segments of a shard have in common."""

    n_slots: int
    n_ctx: int
    max_rows: int
    threads: int
    layer_output: str
    positions_per_row: int
    recurrent: bool
    native_tap: bool = True
    repack: bool = False
    devices: tuple[int, ...] = ()
    """Addresses of ggml devices; empty: CPU only."""


@dataclass(frozen=True)
class Rows:
    """`count` rows of `slot` at `position`..; the last `wanted` of them are to give logits."""

    slot: int
    position: int
    count: int
    wanted: int = 0


class Segment:
    """Layers `first..last` of the model, loaded from a file that holds just those."""

    def __init__(
        self,
        library: Library,
        path: Path,
        first: int,
        last: int,
        options: SegmentOptions,
        *,
        is_head: bool,
        is_tail: bool,
        n_embd: int,
        gpu_layers: int,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.first, self.last = first, last
        self.is_head, self.is_tail = is_head, is_tail
        self.n_embd = n_embd
        self.path = path
        self.buffers: dict[str, int] = {}
        """Bytes by use (`model`, `repacked`, `KV`, `RS`, `compute`, `output`), as llama.cpp reported them."""
        self._api = library.api
        self._options = options
        self._filler_before = ModelFile.open(path).filler_before
        self._model: int | None = None
        self._context: int | None = None
        forget_messages()
        with listen(self._note_buffer):
            self._load(gpu_layers, progress)
            self._start()
        self._memory = self._api.llama_get_memory(self._context)
        self.vocabulary: int = self._api.llama_model_get_vocab(self._model)
        self.n_vocab: int = self._api.llama_vocab_n_tokens(self.vocabulary)
        self._cpu_backend = self._find_plain_attention()
        self._plain = False
        self._views: dict[int, npt.NDArray[np.float32]] = {}
        self._prepare_batch()

    def _note_buffer(self, line: str) -> None:
        found = _BUFFER_LINE.search(line)
        if found:
            kind = "repacked" if "REPACK" in found[1] else found[2]
            self.buffers[kind] = self.buffers.get(kind, 0) + int(float(found[3]) * (1 << 20))

    def _load(self, gpu_layers: int, progress: Callable[[float], None] | None) -> None:
        params = self._api.llama_model_default_params()
        params.use_extra_bufts = self._options.repack
        params.n_gpu_layers = gpu_layers
        devices = (c.c_void_p * (len(self._options.devices) + 1))(*self._options.devices, None)
        params.devices = c.addressof(devices)

        def report(fraction: float, _user: int) -> bool:
            if progress is not None:
                progress(fraction)
            return True

        callback = ProgressCallback(report)
        params.progress_callback = c.cast(callback, c.c_void_p)
        self._model = self._api.llama_model_load_from_file(str(self.path).encode(), params)
        if not self._model:
            raise EngineError(
                f"{self.path.name} cannot be loaded: {last_messages() or 'llama.cpp gave no reason'}"
            )

    def _start(self) -> None:
        options = self._options
        params = self._api.llama_context_default_params()
        params.n_ctx = options.n_ctx * options.n_slots
        params.n_batch = params.n_ubatch = options.max_rows
        params.n_seq_max = options.n_slots
        params.n_threads = params.n_threads_batch = options.threads
        if self.is_tail:
            params.n_outputs_max = LOGIT_ROWS
        params.flash_attn_type = 1
        params.kv_unified = False
        self._tap = Tap(self._api, options.max_rows, self.n_embd, native=options.native_tap)
        params.cb_eval = self._tap.callback
        params.cb_eval_user_data = self._tap.user_data
        self._embeddings = self.is_head and not self.is_tail
        params.embeddings = self._embeddings
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            reason = last_messages() or "llama.cpp gave no reason"
            self.close()
            raise EngineError(f"no context for layers {self.first}-{self.last}: {reason}")

    def _find_plain_attention(self) -> int | None:
        """The context's CPU backend, if it can be told to run the plain kernel (see `_choose_kernel`)."""
        api = self._api
        if not all(hasattr(api, name) for name in OPTIONAL):
            return None
        scheduler = api._ZNK13llama_context9get_schedEv(self._context)
        for index in range(api.ggml_backend_sched_get_n_backends(scheduler)):
            backend: int = api.ggml_backend_sched_get_backend(scheduler, index)
            if api.ggml_backend_is_cpu(backend):
                return backend
        return None

    def _choose_kernel(self, total: int) -> None:
        """Have small calls computed by one kernel, however many rows, sessions, threads and cells there are.

        Left alone, the CPU backend splits the cells between its threads for one row over 512 cells or more,
        and multiplies K-quants in tiles from 8 rows on: other bits than the same row gives in other company.
        Its switch for the plain kernels keeps it from both. Prompts in chunks of 64 rows and more want the
        tiles for speed, and are run again with the same chunks wherever their bits matter.
        """
        plain = total <= EXACT_ROWS
        if self._cpu_backend is not None and plain != self._plain:
            self._api.ggml_backend_cpu_set_use_ref(self._cpu_backend, plain)
            self._plain = plain

    def _prepare_batch(self) -> None:
        rows = self._options.max_rows
        self._positions = np.zeros(rows * self._options.positions_per_row, dtype=np.int32)
        self._sequence_counts = np.ones(rows, dtype=np.int32)
        self._sequences = np.zeros(rows, dtype=np.int32)
        self._sequence_addresses = self._sequences.ctypes.data + 4 * np.arange(rows, dtype=np.uint64)
        self._flags = np.zeros(rows, dtype=np.int8)
        self._batch = Batch()
        self._batch.pos = self._positions.ctypes.data
        self._batch.n_seq_id = self._sequence_counts.ctypes.data
        self._batch.seq_id = self._sequence_addresses.ctypes.data
        self._batch.logits = self._flags.ctypes.data

    @property
    def thread_independent(self) -> bool:
        """Whether results do not hang on the number of threads."""
        return self._cpu_backend is not None

    @property
    def native_tap(self) -> bool:
        return self._tap.native

    def decode(
        self,
        rows: Sequence[Rows],
        tokens: npt.NDArray[np.int32] | None,
        hidden: Hidden | None,
        until: int | None,
    ) -> Hidden | None:
        """Run rows, slot by slot in rising order, up to layer `until`, or to the logits where it is None.

        Exactly one of `tokens` (n,) and `hidden` (n, n_embd), both contiguous, is given. Returns the layer's
        result as a view that the next call overwrites. Raises EngineError; the memory of the slots is then
        in an unknown state beyond the positions before the call.
        """
        total = self._fill(rows, until)
        batch = self._batch
        batch.n_tokens = total
        if tokens is not None:
            batch.token, batch.embd = tokens.ctypes.data, None
        else:
            assert hidden is not None
            batch.token, batch.embd = None, hidden.ctypes.data
            if self._options.positions_per_row == 4:
                # sections of time, height, width (equal for text) and an unused one
                pos = self._positions
                pos[total : 2 * total] = pos[2 * total : 3 * total] = pos[:total]
                pos[3 * total : 4 * total] = 0
        if until is None:
            self._tap.disarm()
        else:
            block = until - self.first + self._filler_before
            self._tap.arm(f"{self._options.layer_output}-{block}")
        self._choose_kernel(total)
        forget_messages()
        status = self._api.llama_decode(self._context, batch)
        if status != 0:
            raise EngineError(
                f"llama.cpp could not run {total} rows through layers {self.first}-{self.last} "
                f"(status {status}): {last_messages() or 'no reason given'}"
            )
        return None if until is None else self._tap.take(total)

    def _fill(self, rows: Sequence[Rows], until: int | None) -> int:
        total = 0
        flags = self._flags
        all_rows = until == self.last
        for part in rows:
            end = total + part.count
            if part.count == 1:
                self._positions[total] = part.position
                self._sequences[total] = part.slot
                flags[total] = all_rows or part.wanted
            else:
                self._positions[total:end] = np.arange(part.position, part.position + part.count)
                self._sequences[total:end] = part.slot
                flags[total:end] = all_rows
                if part.wanted:
                    flags[end - part.wanted : end] = 1
            total = end
        if self.is_tail and np.count_nonzero(flags[:total]) > LOGIT_ROWS:
            raise EngineError(f"logits of more than {LOGIT_ROWS} rows in one call; ask for fewer")
        if self.is_head and not self.is_tail:
            # With `embeddings` all rows come through the last layer and no logits are copied, but a hybrid
            # memory then splits the batch by slot.
            embeddings = len(rows) == 1 or not self._options.recurrent
            if embeddings != self._embeddings:
                self._api.llama_set_embeddings(self._context, embeddings)
                self._embeddings = embeddings
            if embeddings:
                flags[:total] = 1
        return total

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """The logits of a row of the last call, a view of shape (n_vocab,) that the next call overwrites."""
        address = self._api.llama_get_logits_ith(self._context, row)
        if not address:
            raise EngineError(f"llama.cpp has no logits for row {row}: {last_messages()}")
        view = self._views.get(address)
        if view is None:
            # Making a view takes longer than finding the largest logit in it.
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            memory = (c.c_float * self.n_vocab).from_address(address)
            view = self._views[address] = np.ctypeslib.as_array(memory)
        return view

    def truncate(self, slot: int, position: int) -> bool:
        """Forget positions from `position` on; False where the memory cannot (a recurrent state)."""
        return bool(self._api.llama_memory_seq_rm(self._memory, slot, position, -1))

    def clear(self, slot: int) -> None:
        self._api.llama_memory_seq_rm(self._memory, slot, -1, -1)

    def copy(self, source: int, target: int) -> None:
        """Make `target`, which must be clear, a copy of `source`."""
        self._api.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def save_recurrent(self, slot: int) -> bytes:
        """The recurrent part of a slot's state."""
        size = self._api.llama_state_seq_get_size_ext(self._context, slot, PARTIAL_STATE)
        buffer = c.create_string_buffer(size)
        written = self._api.llama_state_seq_get_data_ext(self._context, buffer, size, slot, PARTIAL_STATE)
        return buffer.raw[:written]

    def restore_recurrent(self, slot: int, state: bytes) -> bool:
        """Put back what `save_recurrent` gave."""
        read = self._api.llama_state_seq_set_data_ext(self._context, state, len(state), slot, PARTIAL_STATE)
        return bool(read == len(state))

    def close(self) -> None:
        """Free context and model."""
        if self._context:
            self._api.llama_free(self._context)
            self._context = None
        if self._model:
            self._api.llama_model_free(self._model)
            self._model = None
