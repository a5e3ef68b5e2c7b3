"""Where the bytes of a model can be read from by range on this machine: its files, a slice of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from meshnet.models.errors import ModelError, TruncatedGGUF
from meshnet.models.gguf import ModelFile
from meshnet.models.slice import SlicePlan

CHUNK = 1 << 20


class LocalSource:
    """The files of a model that is on this machine. Use one instance per reader."""

    def __init__(self, model: ModelFile) -> None:
        self._files = model.files

    async def read(self, file_index: int, offset: int, length: int) -> AsyncIterator[bytes]:
        """Raises ModelError for a range outside the files."""
        if not 0 <= file_index < len(self._files):
            raise ModelError(f"file {file_index} is asked for, the model has {len(self._files)}")
        file = self._files[file_index]
        if offset < 0 or length < 0 or offset + length > file.n_bytes or file.path is None:
            raise ModelError(f"{file.name}: bytes {offset}+{length} are asked for, there are {file.n_bytes}")
        async for chunk in _read_file(file.path, offset, length):
            yield chunk


class SliceSource:
    """A neighbour's slice, read by the offsets of the whole model's files: serves the tensors it holds.

    `plan` is the plan that the slice was made by.
    """

    def __init__(self, plan: SlicePlan, path: Path) -> None:
        self._pieces = sorted(plan.pieces, key=lambda piece: (piece.file_index, piece.offset))
        self._path = path
        self._label = f"{plan.model.name} layers {plan.first}-{plan.last}"

    def holds(self, file_index: int, offset: int, length: int) -> bool:
        """Whether these bytes of the whole model are all in the slice."""
        return self._ranges(file_index, offset, length) is not None

    def _ranges(self, file_index: int, offset: int, length: int) -> list[tuple[int, int]] | None:
        """The byte ranges (offset, length) of the slice that make up a range of the model."""
        found: list[tuple[int, int]] = []
        end = offset + length
        for piece in self._pieces:
            start = max(offset, piece.offset)
            stop = min(end, piece.offset + piece.length)
            if piece.file_index != file_index or start >= stop or start != offset:
                continue
            found.append((piece.target_offset + start - piece.offset, stop - start))
            offset = stop
        return found if offset == end else None

    async def read(self, file_index: int, offset: int, length: int) -> AsyncIterator[bytes]:
        """Raises ModelError for bytes that the slice does not hold."""
        ranges = self._ranges(file_index, offset, length)
        if ranges is None:
            raise ModelError(f"{self._label}: does not hold bytes {offset}+{length} of file {file_index}")
        for start, count in ranges:
            async for chunk in _read_file(self._path, start, count):
                yield chunk


async def _read_file(path: Path, offset: int, length: int) -> AsyncIterator[bytes]:
    try:
        stream = await asyncio.to_thread(path.open, "rb", 0)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    with stream:
        stream.seek(offset)
        while length:
            chunk: bytes = await asyncio.to_thread(stream.read, min(length, CHUNK))
            if not chunk:
                raise TruncatedGGUF(f"{path}: ended at {stream.tell()}, {length} bytes early; fetch it again")
            length -= len(chunk)
            yield chunk
