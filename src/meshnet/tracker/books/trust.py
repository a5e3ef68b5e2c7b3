"""How far a node's answers are trusted: lost by broken endings, earned back by good ones. Pure.

Trust is a number from 0 to 1; a new node has 1. Each mark moves it by a fraction of the way down or up, and
what is missing to 1 halves every RECOVERY_MS by itself, so that a node that was repaired gets calls to prove
it with. Routing divides a node's measured speed by its trust, and below DISTRUSTED uses it only where nothing
else is left.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from meshnet.routing import NodeTimes
from meshnet.tracker.books.cases import Event

MarkKind = Literal["failed", "suspect", "unconfirmed", "passed", "good"]

KEEPS: Final[Mapping[str, float]] = {"failed": 0.4, "suspect": 0.9, "unconfirmed": 0.95}
"""What is left of trust after a failed check, after a suspect ending, and when nothing confirmed that one."""
EARNS: Final[Mapping[str, float]] = {"passed": 0.5, "good": 0.02}
"""What part of the missing trust a passed check earns, and a call whose samples count."""

RECOVERY_MS: Final = 30 * 60_000
DISTRUSTED: Final = 0.5
LEAST: Final = 0.05
KEPT_MARKS: Final = 20
MAX_NODES: Final = 10_000


@dataclass(frozen=True, slots=True)
class MarkRecord:
    """One mark, as the dashboard shows it."""

    at: int
    kind: MarkKind
    call_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class Standing:
    """A node's trust at a time, with its latest marks."""

    score: float = 1.0
    at: int = 0
    failed: int = 0
    suspect: int = 0
    unconfirmed: int = 0
    passed: int = 0
    marks: tuple[MarkRecord, ...] = field(default=())


def at_time(standing: Standing, now: int) -> Standing:
    """The standing at `now`: half of what is missing comes back every RECOVERY_MS."""
    passed = max(0, now - standing.at)
    missing = (1.0 - standing.score) * 0.5 ** (passed / RECOVERY_MS)
    return replace(standing, score=1.0 - missing, at=max(now, standing.at))


def marked(standing: Standing, kind: MarkKind, now: int, call_id: str = "", detail: str = "") -> Standing:
    """The standing after one mark."""
    before = at_time(standing, now)
    if kind in KEEPS:
        score = max(LEAST, before.score * KEEPS[kind])
    else:
        score = before.score + (1.0 - before.score) * EARNS[kind]
    if kind == "good":
        return replace(before, score=score)
    return replace(
        before,
        score=score,
        failed=before.failed + (kind == "failed"),
        suspect=before.suspect + (kind == "suspect"),
        unconfirmed=before.unconfirmed + (kind == "unconfirmed"),
        passed=before.passed + (kind == "passed"),
        marks=(*before.marks, MarkRecord(now, kind, call_id, detail))[-KEPT_MARKS:],
    )


class Trust:
    """The standings of all nodes. The least recently marked are forgotten, which makes them trusted again."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[str, Standing] = OrderedDict()

    def mark(
        self, nodes: Iterable[str], kind: MarkKind, now: int, call_id: str = "", detail: str = ""
    ) -> None:
        """Marks nodes."""
        for node_id in nodes:
            before = self._nodes.get(node_id)
            if before is None and kind in EARNS:
                continue
            self._nodes[node_id] = marked(before or Standing(at=now), kind, now, call_id, detail)
            self._nodes.move_to_end(node_id)
        while len(self._nodes) > MAX_NODES:
            self._nodes.popitem(last=False)

    def standing(self, node_id: str, now: int) -> Standing:
        """A node's standing at `now`."""
        found = self._nodes.get(node_id)
        return Standing(at=now) if found is None else at_time(found, now)

    def score(self, node_id: str, now: int) -> float:
        """A node's trust at `now`, from LEAST to 1."""
        return self.standing(node_id, now).score

    def apply(self, event: Event) -> None:
        """Takes a mark from the stored events: one's own, another tracker's, or one of before a restart."""
        if event.node_id is not None and event.kind in ("failed", "suspect", "unconfirmed", "passed"):
            kind: MarkKind = event.kind  # type: ignore[assignment]
            self.mark([event.node_id], kind, event.at, event.call_id or "", event.detail)

    def all(self, now: int) -> dict[str, Standing]:
        """The standings of all nodes that were ever marked down."""
        return {node_id: self.standing(node_id, now) for node_id in sorted(self._nodes)}

    def distrusted(self, now: int) -> dict[str, str]:
        """Nodes to leave out where another route exists, with the reason as the rest of a sentence."""
        return {
            node_id: f"has lost trust ({score:.2f} of 1): its answers failed checks or ended too soon"
            for node_id in self._nodes
            if (score := self.score(node_id, now)) < DISTRUSTED
        }


def tempered(times: NodeTimes, score: float) -> NodeTimes:
    """A node's times as routing should take them: what it claims, divided by how far it is trusted."""
    if score >= 1.0:
        return times
    return replace(
        times,
        decode_ms_per_layer=times.decode_ms_per_layer / max(score, LEAST),
        prefill_ms_per_token_layer=times.prefill_ms_per_token_layer / max(score, LEAST),
    )
