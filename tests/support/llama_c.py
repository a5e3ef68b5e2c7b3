"""A second, minimal way to run a GGUF on the pinned wheel: llama.cpp's C API, one sequence.

It is what slices are judged by, so it shares no code with the engine.
"""

from __future__ import annotations

import ctypes as c
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp
from numpy.typing import NDArray

Rows = NDArray[np.float32]
ROWS_AT_ONCE = 512


class _Params(c.Structure):
    """Room for either parameter struct; the library writes and reads its own part of it."""

    _fields_ = (("raw", c.c_ubyte * 512),)


class _Batch(c.Structure):
    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.POINTER(c.c_float)),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    )


_LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
_TAP = c.CFUNCTYPE(c.c_bool, c.c_void_p, c.c_bool, c.c_void_p)
_SIGNATURES: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("llama_backend_init", None, ()),
    ("llama_log_set", None, (c.c_void_p, c.c_void_p)),
    ("llama_model_default_params", _Params, ()),
    ("llama_context_default_params", _Params, ()),
    ("llama_model_load_from_file", c.c_void_p, (c.c_char_p, _Params)),
    ("llama_model_free", None, (c.c_void_p,)),
    ("llama_model_get_vocab", c.c_void_p, (c.c_void_p,)),
    ("llama_model_n_embd", c.c_int32, (c.c_void_p,)),
    ("llama_model_rope_type", c.c_int32, (c.c_void_p,)),
    ("llama_vocab_n_tokens", c.c_int32, (c.c_void_p,)),
    (
        "llama_tokenize",
        c.c_int32,
        (c.c_void_p, c.c_char_p, c.c_int32, c.POINTER(c.c_int32), c.c_int32, c.c_bool, c.c_bool),
    ),
    ("llama_init_from_model", c.c_void_p, (c.c_void_p, _Params)),
    ("llama_free", None, (c.c_void_p,)),
    ("llama_decode", c.c_int32, (c.c_void_p, _Batch)),
    ("llama_get_logits_ith", c.POINTER(c.c_float), (c.c_void_p, c.c_int32)),
    ("ggml_get_name", c.c_char_p, (c.c_void_p,)),
    ("ggml_nbytes", c.c_size_t, (c.c_void_p,)),
    ("ggml_backend_tensor_get", None, (c.c_void_p, c.c_void_p, c.c_size_t, c.c_size_t)),
)


def _load() -> c.CDLL:
    library = c.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("*.so"))))
    for name, result, arguments in _SIGNATURES:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_backend_init()
    return library


_library = _load()
_said: list[str] = []


def _hear(_level: int, text: bytes, _data: object) -> None:
    _said.append(text.decode(errors="replace"))
    del _said[:-200]


_log = _LOG(_hear)


class Stage:
    """One file, one context. A step gives the rows of the tensor `tap`; without it, the last row's logits."""

    def __init__(self, path: Path, tap: str | None = None, *, n_ctx: int = 1024, threads: int = 1) -> None:
        api = _library
        # set anew each time: the engine under test sets a log function of its own
        api.llama_log_set(c.cast(_log, c.c_void_p), None)
        self._model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        if not self._model:
            raise RuntimeError("".join(_said[-10:]))
        self.n_embd: int = api.llama_model_n_embd(self._model)
        self._vocab = api.llama_model_get_vocab(self._model)
        self.n_vocab: int = api.llama_vocab_n_tokens(self._vocab)
        self.positions_per_row = 4 if api.llama_model_rope_type(self._model) in (8, 40) else 1
        self._tap = tap
        self._rows: Rows | None = None
        params = api.llama_context_default_params()
        raw = bytearray(bytes(params.raw))
        for offset, value in ((0, n_ctx), (4, ROWS_AT_ONCE), (8, ROWS_AT_ONCE), (28, threads), (32, threads)):
            raw[offset : offset + 4] = value.to_bytes(4, "little")
        if tap is not None:
            self._callback = _TAP(self._on_tensor)
            address = c.cast(self._callback, c.c_void_p).value or 0
            raw[88:96] = address.to_bytes(8, "little")
            raw[136] = 1  # embeddings: all rows of the last layer are kept
        c.memmove(c.byref(params), bytes(raw), len(raw))
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("".join(_said[-10:]))

    def _on_tensor(self, tensor: int, ask: bool, _data: object) -> bool:
        name = _library.ggml_get_name(tensor)
        wanted = self._tap is not None and name == self._tap.encode()
        if ask or not wanted:
            return bool(wanted) if ask else True
        rows: Rows = np.empty(_library.ggml_nbytes(tensor) // 4, np.float32)
        _library.ggml_backend_tensor_get(tensor, rows.ctypes.data_as(c.c_void_p), 0, rows.nbytes)
        self._rows = rows.reshape(-1, self.n_embd)
        return False

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        room = (c.c_int32 * 8192)()
        count = _library.llama_tokenize(self._vocab, data, len(data), room, 8192, False, True)
        assert count >= 0
        return list(room[:count])

    def step(self, position: int, given: list[int] | Rows) -> Rows:
        """Run tokens, or rows of the layer before, at `position` and on."""
        count = len(given)
        batch = _Batch(n_tokens=count)
        positions = list(range(position, position + count))
        if isinstance(given, list):
            batch.token = (c.c_int32 * count)(*given)
        else:
            rows = np.ascontiguousarray(given, np.float32)
            batch.embd = rows.ctypes.data_as(c.POINTER(c.c_float))
            if self.positions_per_row == 4:
                positions = positions * 3 + [0] * count
        batch.pos = (c.c_int32 * len(positions))(*positions)
        batch.n_seq_id = (c.c_int32 * count)(*([1] * count))
        first = c.cast((c.c_int32 * 1)(0), c.POINTER(c.c_int32))
        batch.seq_id = (c.POINTER(c.c_int32) * count)(*([first] * count))
        wanted = [1] * count if self._tap else [0] * (count - 1) + [1]
        batch.logits = (c.c_int8 * count)(*wanted)
        self._rows = None
        code = _library.llama_decode(self._context, batch)
        if self._tap is not None:
            assert self._rows is not None, "".join(_said[-5:])
            return self._rows
        assert code == 0, "".join(_said[-5:])
        logits = _library.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, (self.n_vocab,)).copy()

    def close(self) -> None:
        _library.llama_free(self._context)
        _library.llama_model_free(self._model)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def generate(stages: list[Stage], prompt: list[int], count: int) -> tuple[list[int], Rows]:
    """Greedy tokens through the stages in order, and the logits that each was chosen by."""
    position = 0
    chosen: list[int] = []
    logits: list[Rows] = []

    def run(tokens: list[int]) -> Rows:
        nonlocal position
        rows: list[int] | Rows = tokens
        for stage in stages:
            rows = stage.step(position, rows)
        position += len(tokens)
        return np.asarray(rows)

    for start in range(0, len(prompt), ROWS_AT_ONCE):
        row = run(prompt[start : start + ROWS_AT_ONCE])
    for _ in range(count):
        chosen.append(int(row.argmax()))
        logits.append(row)
        row = run([chosen[-1]])
    return chosen, np.stack(logits)
