"""Stop strings in a stream of text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in text that comes in pieces, cut anywhere.

    Text is held back only while it may still be the beginning of a stop string, so at most one character
    less than the longest of them. Which match counts: the one that is complete first; of several complete
    at the same character, the one that begins first. The stop string itself is never emitted.
    """

    __slots__ = ("_held", "_hit", "_longest", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._hit: str | None = None

    @property
    def hit(self) -> str | None:
        """The stop string that ended the text, once one has."""
        return self._hit

    @property
    def held(self) -> str:
        """What has been pushed and neither emitted nor matched yet."""
        return self._held

    def push(self, text: str) -> tuple[str, bool]:
        """`(emit, hit)`: text that is safe to show, and whether the text has ended at a stop string.

        Text pushed after the hit is dropped: `("", True)`.
        """
        if self._hit is not None:
            return "", True
        if not self._stops:
            return text, False
        text = self._held + text
        found = self._first(text)
        if found is not None:
            start, self._hit = found
            self._held = ""
            return text[:start], True
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text ended otherwise: what was held back belongs to it."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Start and string of the match that is complete first, then of the one that begins first."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
