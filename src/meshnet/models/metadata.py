"""The key-value part of a GGUF header: typed, decoded on demand, and kept as the bytes that were read.

Values stay raw until asked for, because a large vocabulary is a million small strings that a slice only
has to copy. Layout: the GGUF specification, version 3 (little endian).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

Scalar = int | float | bool | str
Value = Scalar | list[int] | list[float] | list[bool] | list[str]

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)

SCALAR_FORMAT: dict[int, str] = {
    UINT8: "B",
    INT8: "b",
    UINT16: "H",
    INT16: "h",
    UINT32: "I",
    INT32: "i",
    FLOAT32: "f",
    BOOL: "?",
    UINT64: "Q",
    INT64: "q",
    FLOAT64: "d",
}
SCALAR_SIZE: dict[int, int] = {kind: struct.calcsize("<" + code) for kind, code in SCALAR_FORMAT.items()}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_ARRAY_HEAD = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class Entry:
    """One value: its GGUF type, and its bytes as in the file (an array starts with its type and count)."""

    kind: int
    raw: bytes

    @property
    def array_kind(self) -> int | None:
        """The type of the elements, or None for a scalar."""
        return None if self.kind != ARRAY else int(_U32.unpack_from(self.raw)[0])

    @property
    def array_length(self) -> int | None:
        """The number of elements, or None for a scalar."""
        return None if self.kind != ARRAY else int(_U64.unpack_from(self.raw, 4)[0])

    def decode(self) -> Value:
        """The value in Python's types; text that is not UTF-8 keeps its bytes as surrogate escapes."""
        if self.kind == STRING:
            return self.raw[8:].decode("utf-8", "surrogateescape")
        if self.kind != ARRAY:
            return cast(Scalar, struct.unpack("<" + SCALAR_FORMAT[self.kind], self.raw)[0])
        kind, count = _ARRAY_HEAD.unpack_from(self.raw)
        if kind != STRING:
            return list(struct.unpack_from(f"<{count}{SCALAR_FORMAT[kind]}", self.raw, _ARRAY_HEAD.size))
        texts: list[str] = []
        at = _ARRAY_HEAD.size
        for _ in range(count):
            (length,) = _U64.unpack_from(self.raw, at)
            at += 8
            texts.append(self.raw[at : at + length].decode("utf-8", "surrogateescape"))
            at += length
        return texts

    def pick(self, indices: list[int]) -> Entry:
        """An array of numbers or booleans with only the elements at these indices, in this order."""
        kind = self.array_kind
        if kind is None or kind == STRING:
            raise ValueError("only an array of numbers or booleans can be cut")
        size, start = SCALAR_SIZE[kind], _ARRAY_HEAD.size
        chosen = (self.raw[start + index * size : start + (index + 1) * size] for index in indices)
        return Entry(ARRAY, _ARRAY_HEAD.pack(kind, len(indices)) + b"".join(chosen))


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogateescape")
    return _U64.pack(len(data)) + data


def scalar_entry(kind: int, value: Scalar) -> Entry:
    """An entry of GGUF type `kind`."""
    if kind == STRING:
        return Entry(STRING, _text(str(value)))
    return Entry(kind, struct.pack("<" + SCALAR_FORMAT[kind], value))


def array_entry(kind: int, values: list[int] | list[float] | list[bool] | list[str]) -> Entry:
    """An array entry whose elements have GGUF type `kind`."""
    head = _ARRAY_HEAD.pack(kind, len(values))
    if kind == STRING:
        return Entry(ARRAY, head + b"".join(_text(str(value)) for value in values))
    return Entry(ARRAY, head + struct.pack(f"<{len(values)}{SCALAR_FORMAT[kind]}", *values))


def encode_pair(key: str, entry: Entry) -> bytes:
    """One key-value pair as it stands in a header."""
    return _text(key) + _U32.pack(entry.kind) + entry.raw


class Metadata(Mapping[str, Value]):
    """The metadata of a model in file order. Indexing decodes; `entry` gives type and bytes."""

    __slots__ = ("_decoded", "_entries")

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)
        self._decoded: dict[str, Value] = {}

    def __getitem__(self, key: str) -> Value:
        found = self._decoded.get(key)
        if found is None:
            found = self._decoded[key] = self._entries[key].decode()
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def entry(self, key: str) -> Entry:
        """Type and bytes of one value."""
        return self._entries[key]

    def entries(self) -> dict[str, Entry]:
        """A copy of all entries, in file order, to build another header from."""
        return dict(self._entries)

    def integer(self, key: str) -> int | None:
        """The value, if it is there and an integer (a boolean is not)."""
        if key not in self._entries or self._entries[key].kind in (STRING, ARRAY, BOOL, FLOAT32, FLOAT64):
            return None
        return cast(int, self[key])

    def text(self, key: str) -> str | None:
        """The value, if it is there and a string."""
        return cast(str, self[key]) if key in self._entries and self._entries[key].kind == STRING else None
