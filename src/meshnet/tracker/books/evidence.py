"""What a check needs of a call: prompt, seed and tokens. In memory only, bounded, and for an hour at most."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

MAX_CALLS: Final = 256
MAX_TOKENS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Evidence:
    """A call's prompt and produced tokens (the end-of-sequence token included) and how they were drawn."""

    call_id: str
    model: str
    route: tuple[str, ...]
    numerics: str
    prompt: tuple[int, ...] = field(repr=False)
    output: tuple[int, ...] = field(repr=False)
    seed: int
    sampling: Mapping[str, Any]
    kept_at: int


class EvidenceStore:
    """Holds evidence until its check; when it is full the oldest goes, and with it that check."""

    def __init__(self, keep_ms: int, max_calls: int = MAX_CALLS, max_tokens: int = MAX_TOKENS) -> None:
        self._keep_ms = keep_ms
        self._max_calls = max_calls
        self._max_tokens = max_tokens
        self._held: OrderedDict[str, Evidence] = OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._held)

    def put(self, evidence: Evidence) -> list[str]:
        """Keeps it.

        Returns the ids of calls whose evidence had to go (perhaps this one, when it is too large).
        """
        self.drop(evidence.call_id)
        self._held[evidence.call_id] = evidence
        self._tokens += _size(evidence)
        gone = []
        while len(self._held) > self._max_calls or self._tokens > self._max_tokens:
            call_id, oldest = self._held.popitem(last=False)
            self._tokens -= _size(oldest)
            gone.append(call_id)
        return gone

    def get(self, call_id: str) -> Evidence | None:
        """The evidence of a call, if it is still kept."""
        return self._held.get(call_id)

    def drop(self, call_id: str) -> None:
        """Forgets it; called when its check is over."""
        evidence = self._held.pop(call_id, None)
        if evidence is not None:
            self._tokens -= _size(evidence)

    def expire(self, now: int) -> list[str]:
        """Forgets what was kept for too long; returns the ids of those calls."""
        gone = [call_id for call_id, kept in self._held.items() if now - kept.kept_at >= self._keep_ms]
        for call_id in gone:
            self.drop(call_id)
        return gone


def _size(evidence: Evidence) -> int:
    return len(evidence.prompt) + len(evidence.output)
