"""Several sources of one model as one: each gives the bytes that it holds, the next takes over on failure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from meshnet.models.errors import FetchFailed, ModelError
from meshnet.models.remote import ByteSource, SourceCut
from meshnet.models.slice import Piece, SlicePlan

Span = tuple[int, int, int]
"""File index, first byte, end (exclusive)."""


def spans_of(pieces: Sequence[Piece]) -> tuple[Span, ...]:
    """The bytes of the model's files that these pieces are, adjoining ones together."""
    found: list[Span] = []
    for piece in sorted(pieces, key=lambda piece: (piece.file_index, piece.offset)):
        end = piece.offset + piece.length
        if found and found[-1][0] == piece.file_index and found[-1][2] >= piece.offset:
            found[-1] = (piece.file_index, found[-1][1], max(end, found[-1][2]))
        else:
            found.append((piece.file_index, piece.offset, end))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Origin:
    """One source: `name` for people, `spans` of the bytes that it holds (None: all of them)."""

    name: str
    source: ByteSource
    spans: tuple[Span, ...] | None = None

    def reach(self, file_index: int, offset: int, end: int) -> int:
        """The end of what it can give from `offset` on; `offset` itself where it holds nothing there."""
        if self.spans is None:
            return end
        for index, first, last in self.spans:
            if index == file_index and first <= offset < last:
                return min(last, end)
        return offset


class Origins:
    """A ByteSource over origins, the first that holds the bytes first. One reader at a time."""

    def __init__(self, origins: Sequence[Origin], using: Callable[[str], None] | None = None) -> None:
        """`using` is told the name of the origin that bytes come from, each time that it changes."""
        self.origins = list(origins)
        self._using = using
        self._last: Origin | None = None

    def missing(self, plan: SlicePlan) -> bool:
        """Whether some byte of a slice is held by none of the origins."""
        for file_index, offset, end in spans_of(plan.pieces):
            while offset < end:
                reach = max((o.reach(file_index, offset, end) for o in self.origins), default=offset)
                if reach <= offset:
                    return True
                offset = reach
        return False

    async def read(self, file_index: int, offset: int, length: int) -> AsyncIterator[bytes]:
        """Raises SourceCut where no origin gives more now, FetchFailed where none ever will."""
        end = offset + length
        failed: dict[str, ModelError] = {}
        while offset < end:
            origin = self._pick(file_index, offset, end, failed)
            stop = origin.reach(file_index, offset, end)
            if origin is not self._last:
                self._last = origin
                if self._using is not None:
                    self._using(origin.name)
            try:
                async for chunk in origin.source.read(file_index, offset, stop - offset):
                    offset += len(chunk)
                    yield chunk
                if offset < stop:
                    raise SourceCut(f"{origin.name}: ended {stop - offset} bytes early")
            except ModelError as error:
                failed[origin.name] = error
                # Whoever failed comes last from now on.
                self.origins.remove(origin)
                self.origins.append(origin)

    def blame(self, piece: Piece) -> None:
        """The bytes of a piece were wrong: who sent the last ones is not asked again while others hold it."""
        guilty, end = self._last, piece.offset + piece.length
        others = [o for o in self.origins if o is not guilty]
        if guilty is not None and any(o.reach(piece.file_index, piece.offset, end) == end for o in others):
            self.origins = others
            self._last = None

    def _pick(self, file_index: int, offset: int, end: int, failed: dict[str, ModelError]) -> Origin:
        holding = [o for o in self.origins if o.reach(file_index, offset, end) > offset]
        for origin in holding:
            if origin.name not in failed:
                return origin
        errors = [failed[origin.name] for origin in holding]
        for error in errors:
            if isinstance(error, SourceCut):
                raise error
        if errors:
            raise FetchFailed(str(errors[-1])) from errors[-1]
        asked = ", ".join(origin.name for origin in self.origins) or "nobody"
        raise FetchFailed(f"no machine of the mesh has byte {offset} of file {file_index} (asked: {asked})")
