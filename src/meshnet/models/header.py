"""The header of a GGUF file, read without trusting it.

Every count and length is checked against the bytes that are really there before anything is allocated. The
reader is our own because it must be quick on large vocabularies; type names and block sizes come from the
`gguf` package.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

import gguf.constants as ggml

from meshnet.models.errors import BadGGUF, NotGGUF, TruncatedGGUF
from meshnet.models.metadata import ARRAY, SCALAR_SIZE, STRING, Entry, Metadata

DEFAULT_ALIGNMENT = 32
MAX_HEADER_BYTES = 256 << 20
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_NAME_BYTES = 1 << 10
MAX_STRINGS = 1 << 22

_CHUNK = 1 << 20
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_LAYER_NAME = re.compile(r"^blk\.(\d{1,6})\.(.+)$", re.DOTALL)
_HEAD_TENSORS = ("token_embd", "token_types", "position_embd")
_TAIL_TENSORS = ("output",)

QUANT_SIZES: dict[int, tuple[int, int]] = {int(kind): sizes for kind, sizes in ggml.GGML_QUANT_SIZES.items()}
TYPE_NAMES: dict[int, str] = {int(kind): str(kind.name) for kind in ggml.GGML_QUANT_SIZES}


def tensor_bytes(shape: tuple[int, ...], ggml_type: int) -> int:
    """Bytes of a tensor of this shape (row length first); ValueError if its rows do not fill blocks."""
    block, size = QUANT_SIZES[ggml_type]
    if shape[0] % block:
        raise ValueError(f"rows of {shape[0]} do not fill blocks of {block}")
    count = 1
    for extent in shape:
        count *= extent
    return count // block * size


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: `shape` in ggml order (row length first), `offset` in bytes from the start of its file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    n_bytes: int
    file_index: int
    offset: int

    @property
    def type_name(self) -> str:
        return TYPE_NAMES[self.ggml_type]

    @property
    def layer(self) -> int | None:
        """The layer it belongs to, or None."""
        match = _LAYER_NAME.match(self.name)
        return int(match[1]) if match else None

    @property
    def is_head(self) -> bool:
        """Needed where tokens become rows."""
        return self.name.startswith(_HEAD_TENSORS)

    @property
    def is_tail(self) -> bool:
        """Needed where rows become logits."""
        return self.name.startswith(_TAIL_TENSORS)


class Cursor:
    """Takes bytes in order from something that can be read by range, and never asks beyond its end."""

    def __init__(self, label: str, size: int, read: Callable[[int, int], bytes]) -> None:
        self.label = label
        self.size = size
        self.at = 0
        self._read = read
        self._base = 0
        self._buffer = b""

    def need(self, length: int, what: str) -> None:
        """Refuse to go on when fewer than `length` bytes are left."""
        if length > self.size - self.at:
            raise TruncatedGGUF(
                f"{self.label}: ends after {self.size} bytes, in the middle of {what}; "
                "the download was cut short, fetch the file again"
            )
        if self.at + length > MAX_HEADER_BYTES:
            raise BadGGUF(
                f"{self.label}: a header of more than {MAX_HEADER_BYTES} bytes ({what}); the file is damaged"
            )

    def take(self, length: int, what: str) -> bytes:
        self.need(length, what)
        start = self.at - self._base
        if start + length > len(self._buffer):
            want = min(max(length, _CHUNK), self.size - self.at)
            self._buffer, self._base, start = self._read(self.at, want), self.at, 0
            if len(self._buffer) < length:
                raise TruncatedGGUF(f"{self.label}: ended while it was read, at {what}; fetch the file again")
        self.at += length
        return self._buffer[start : start + length]

    def strings(self, count: int, what: str) -> bytes:
        """The bytes of `count` strings, each with its length before it."""
        self.need(count * 8, what)
        data = bytearray(self._buffer[self.at - self._base :])
        end = 0
        for _ in range(count):
            if end + 8 > len(data):
                self._extend(data, end + 8, what)
            end += 8 + int(_U64.unpack_from(data, end)[0])
            if end > len(data):
                self._extend(data, end, what)
        self._buffer, self._base = bytes(data[end:]), self.at + end
        self.at += end
        return bytes(data[:end])

    def _extend(self, data: bytearray, length: int, what: str) -> None:
        """Read on until `data`, which starts where the cursor is, has at least `length` bytes."""
        self.need(length, what)
        missing = length - len(data)
        start = self.at + len(data)
        data += self._read(start, min(max(missing, _CHUNK), self.size - start))
        if len(data) < length:
            raise TruncatedGGUF(f"{self.label}: ended while it was read, at {what}; fetch the file again")

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def name(self, what: str) -> str:
        length = self.u64(what)
        if not 0 < length <= MAX_NAME_BYTES:
            raise BadGGUF(f"{self.label}: {what} of {length} bytes; the file is damaged, fetch it again")
        return self.take(length, what).decode("utf-8", "surrogateescape")


def read_value(cursor: Cursor, key: str, kind: int) -> Entry:
    if kind in SCALAR_SIZE:
        return Entry(kind, cursor.take(SCALAR_SIZE[kind], key))
    if kind == STRING:
        length = cursor.u64(key)
        return Entry(kind, _U64.pack(length) + cursor.take(length, key))
    if kind != ARRAY:
        raise BadGGUF(f"{cursor.label}: {key} has the unknown type {kind}; the file is damaged or too new")
    element = cursor.u32(key)
    count = cursor.u64(key)
    head = struct.pack("<IQ", element, count)
    if element in SCALAR_SIZE:
        return Entry(kind, head + cursor.take(count * SCALAR_SIZE[element], key))
    if element != STRING:
        raise BadGGUF(f"{cursor.label}: {key} is an array of the unknown type {element}; the file is damaged")
    if count > MAX_STRINGS:
        raise BadGGUF(f"{cursor.label}: {key} claims {count} strings, at most {MAX_STRINGS} are read")
    return Entry(kind, head + cursor.strings(count, key))


def check_shape(label: str, name: str, shape: tuple[int, ...], ggml_type: int) -> None:
    if ggml_type not in QUANT_SIZES:
        raise BadGGUF(
            f"{label}: tensor {name} has the unknown type {ggml_type}; "
            "the file is damaged or newer than this version of meshnet"
        )
    count = 1
    for extent in shape:
        count *= extent
    if not 1 <= len(shape) <= 4 or min(shape) < 1 or count >= 1 << 48:
        raise BadGGUF(f"{label}: tensor {name} has the impossible shape {list(shape)}; the file is damaged")
    if shape[0] % QUANT_SIZES[ggml_type][0]:
        raise BadGGUF(
            f"{label}: rows of {shape[0]} in tensor {name} do not fit the blocks of {TYPE_NAMES[ggml_type]}; "
            "the file is damaged"
        )


def alignment_of(label: str, metadata: Metadata) -> int:
    """What the offsets of a file's tensors are multiples of. Raises BadGGUF."""
    if "general.alignment" not in metadata:
        return DEFAULT_ALIGNMENT
    alignment = metadata.integer("general.alignment")
    if alignment is None or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise BadGGUF(f"{label}: general.alignment is {alignment}, not a power of two; the file is damaged")
    return alignment


def parse_header(
    label: str, size: int, read: Callable[[int, int], bytes], file_index: int = 0
) -> tuple[Metadata, list[Tensor]]:
    """Metadata and tensors of one GGUF file of `size` bytes; `read(offset, length)` gives its bytes.

    `label` names the file in errors. Raises NotGGUF, TruncatedGGUF or BadGGUF.
    """
    if size < 24:
        magic = read(0, 4)
        if magic != b"GGUF"[: len(magic)] or not magic:
            raise NotGGUF(f"{label}: not a GGUF file (it starts with {magic!r}); give a .gguf model file")
    cursor = Cursor(label, size, read)
    magic = cursor.take(4, "the magic number")
    if magic != b"GGUF":
        raise NotGGUF(f"{label}: not a GGUF file (it starts with {magic!r}); give a .gguf model file")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0:
        raise NotGGUF(f"{label}: a big-endian GGUF; convert it to little endian first (gguf-convert-endian)")
    if version not in (2, 3):
        raise NotGGUF(f"{label}: GGUF version {version}, only 2 and 3 are read; convert the model again")
    n_tensors = cursor.u64("the number of tensors")
    n_pairs = cursor.u64("the number of metadata entries")
    if n_tensors > MAX_TENSORS or n_pairs > MAX_PAIRS:
        raise BadGGUF(
            f"{label}: claims {n_tensors} tensors and {n_pairs} metadata entries "
            f"(at most {MAX_TENSORS} and {MAX_PAIRS} are read); the file is damaged, fetch it again"
        )
    entries: dict[str, Entry] = {}
    for _ in range(n_pairs):
        key = cursor.name("a metadata key")
        if key in entries:
            raise BadGGUF(f"{label}: the metadata key {key} stands twice; the file is damaged")
        entries[key] = read_value(cursor, key, cursor.u32(key))
    metadata = Metadata(entries)
    alignment = alignment_of(label, metadata)
    infos: list[tuple[str, tuple[int, ...], int, int]] = []
    names: set[str] = set()
    for _ in range(n_tensors):
        name = cursor.name("a tensor's name")
        n_dims = cursor.u32(name)
        if not 1 <= n_dims <= 4:
            raise BadGGUF(f"{label}: tensor {name} has {n_dims} dimensions; the file is damaged")
        shape = tuple(cursor.u64(name) for _ in range(n_dims))
        ggml_type, offset = cursor.u32(name), cursor.u64(name)
        check_shape(label, name, shape, ggml_type)
        if name in names:
            raise BadGGUF(f"{label}: tensor {name} stands twice; the file is damaged")
        if offset % alignment:
            raise BadGGUF(f"{label}: tensor {name} is not aligned to {alignment} bytes; the file is damaged")
        names.add(name)
        infos.append((name, shape, ggml_type, offset))
    data_start = (cursor.at + alignment - 1) // alignment * alignment
    tensors = []
    for name, shape, ggml_type, offset in infos:
        tensor = Tensor(
            name, shape, ggml_type, tensor_bytes(shape, ggml_type), file_index, data_start + offset
        )
        if tensor.offset + tensor.n_bytes > size:
            raise TruncatedGGUF(
                f"{label}: has {size} bytes, but tensor {name} ends at {tensor.offset + tensor.n_bytes}; "
                "the download was cut short, fetch the file again"
            )
        tensors.append(tensor)
    return metadata, tensors
