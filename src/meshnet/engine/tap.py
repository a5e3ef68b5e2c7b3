"""Takes one layer's result out of a running graph and stops the graph there.

ggml's scheduler asks a callback about every tensor (some 470 for 15 layers). As a Python function that costs
0.3 ms per step, and takes Python's lock each time: with one other busy Python thread, a step of 4.6 ms took
170 ms. As 108 bytes of machine code it costs nothing that can be measured. The code comes from `tap.ll`
(`tests/engine/test_tap.py` compiles it again and compares), is position-independent, and calls only what the
`Tap` struct points to. On a platform without it the same logic runs through ctypes.
"""

from __future__ import annotations

import ctypes as c
import mmap
import platform
from typing import Any

import numpy as np
import numpy.typing as npt

from meshnet.engine.base import EngineError
from meshnet.engine.bindings import EvalCallback

# llvmlite 0.50 (LLVM 22), x86-64, System V calling convention, -O2, from tap.ll
CODE_X86_64 = bytes.fromhex(
    "41565350488b1a4885db742348837a200075204084f674254c8b7230ff52284889c74889de41ffd685c00f94c0eb064080f60189"
    "f04883c4085b415ec34889fb4989d6ff52384989461849c7462001000000493b46107710498b76084889df31d24889c141ff5640"
    "31c0ebc9"
)


class TapState(c.Structure):
    """`%tap` of tap.ll."""

    _fields_ = (
        ("name", c.c_char_p),
        ("buffer", c.c_void_p),
        ("room", c.c_int64),
        ("seen_bytes", c.c_int64),
        ("hits", c.c_int64),
        ("ggml_get_name", c.c_void_p),
        ("strcmp", c.c_void_p),
        ("ggml_nbytes", c.c_void_p),
        ("ggml_backend_tensor_get", c.c_void_p),
    )


def _address(function: Any) -> int:
    return c.cast(function, c.c_void_p).value or 0


class _Code:
    """The machine code in a page of its own, written first and made executable then; never freed."""

    address: int | None = None
    tried = False
    page: mmap.mmap | None = None


def native_code() -> int | None:
    """Address of the native callback, or None where this platform has none or forbids it."""
    if _Code.tried:
        return _Code.address
    _Code.tried = True
    if platform.machine().lower() not in ("x86_64", "amd64") or platform.system() != "Linux":
        return None
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    page.write(CODE_X86_64)
    address = c.addressof(c.c_char.from_buffer(page))
    libc = c.CDLL(None)
    libc.mprotect.argtypes = (c.c_void_p, c.c_size_t, c.c_int)
    if libc.mprotect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        return None
    _Code.page, _Code.address = page, address
    return address


class Tap:
    """One context's tap. `arm` before a decode call, `take` after it."""

    def __init__(self, handle: c.CDLL, rows: int, width: int, *, native: bool = True) -> None:
        self._data = np.zeros((rows, width), dtype=np.float32)
        self._names: dict[str, bytes] = {}
        self._handle = handle
        self._state = TapState(
            None,
            self._data.ctypes.data,
            self._data.nbytes,
            0,
            0,
            _address(handle.ggml_get_name),
            _address(c.CDLL(None).strcmp),
            _address(handle.ggml_nbytes),
            _address(handle.ggml_backend_tensor_get),
        )
        code = native_code() if native else None
        self.native = code is not None
        self._python = EvalCallback(self._call)
        self.callback: int = code if code is not None else _address(self._python)
        self.user_data: int = c.addressof(self._state)

    def _call(self, tensor: int, ask: bool, _user: int) -> bool:
        """tap.ll in Python."""
        state = self._state
        if state.name is None:
            return not ask
        if state.hits:
            return ask
        if ask:
            return bool(self._handle.ggml_get_name(tensor) == state.name)
        size = int(self._handle.ggml_nbytes(tensor))
        state.seen_bytes, state.hits = size, 1
        if size <= state.room:
            self._handle.ggml_backend_tensor_get(tensor, state.buffer, 0, size)
        return False

    def arm(self, tensor: str) -> None:
        """Take the tensor of this name in the next decode call."""
        self._state.hits = 0
        self._state.seen_bytes = 0
        self._state.name = self._names.setdefault(tensor, tensor.encode())

    def disarm(self) -> None:
        """Let graphs run to their end."""
        self._state.name = None

    def take(self, rows: int) -> npt.NDArray[np.float32]:
        """The tensor's `rows` rows, as a view that the next decode call overwrites. Raises EngineError."""
        expected = rows * self._data.shape[1] * 4
        if not self._state.hits or self._state.seen_bytes != expected:
            name = (self._state.name or b"").decode()
            raise EngineError(
                f"tensor {name} came with {self._state.seen_bytes} bytes where {expected} were expected; "
                "this llama.cpp builds the graph of this architecture in another way"
            )
        return self._data[:rows]
