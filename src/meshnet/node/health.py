"""What a node says of itself: load, latency and speed, from its own measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshnet.engine.base import EngineInfo, SelfTest
from meshnet.node.batching import Costs, Lane, plausible

if TYPE_CHECKING:
    from meshnet.node.executor import Outcome
    from meshnet.node.sessions import Session, Shard

ALPHA = 0.2
MOST_DRIFT = 1.5
"""Live step times move a self-test's figures upwards by this factor at most."""


@dataclass(frozen=True, slots=True)
class Ewma:
    """An exponentially weighted mean; the first value counts whole."""

    value: float | None = None
    alpha: float = ALPHA

    def after(self, sample: float) -> Ewma:
        if self.value is None:
            return Ewma(sample, self.alpha)
        return Ewma(self.value + self.alpha * (sample - self.value), self.alpha)


def step_ms(info: EngineInfo, test: SelfTest, start: int, end: int) -> float:
    """Milliseconds of one decode step over layers start..end by the self-test."""
    ms = (end - start + 1) * test.decode_ms_per_layer
    ms += test.embed_ms if start == 0 else 0.0
    return ms + (test.output_ms if end == info.model_layers - 1 else 0.0)


def lane_costs(info: EngineInfo, test: SelfTest, start: int, end: int) -> Costs:
    """The self-test's batch times for a part of the shard, in proportion to what one step takes."""
    whole = max(step_ms(info, test, info.first, info.last), 1e-6)
    alone = step_ms(info, test, start, end)
    batches = dict(test.batch_ms) or {1: whole}
    seed = plausible([(size, ms * alone / whole) for size, ms in batches.items()])
    return Costs(seed=seed, row_ms=(end - start + 1) * test.prefill_ms_per_token_layer)


def capacity_score(info: EngineInfo, test: SelfTest) -> float:
    """Decode tokens per second over the whole model's depth, as if this node had all of it."""
    return 1000 / max(info.model_layers * test.decode_ms_per_layer + test.embed_ms + test.output_ms, 1e-3)


def moved(test: SelfTest, drift: float, prefill_drift: float) -> SelfTest:
    """The self-test's figures as live steps have them: at most 1.5 times slower, never less than it said."""
    decode = min(max(drift, 1.0), MOST_DRIFT)
    prefill = min(max(prefill_drift, 1.0), MOST_DRIFT)
    return replace(
        test,
        decode_ms_per_layer=test.decode_ms_per_layer * decode,
        embed_ms=test.embed_ms * decode,
        output_ms=test.output_ms * decode,
        prefill_ms_per_token_layer=test.prefill_ms_per_token_layer * prefill,
    )


@dataclass(slots=True)
class Counters:
    """Since boot."""

    served: int = 0
    failed: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    decode_calls: int = 0
    prefill_calls: int = 0


class WorkerState:
    """The node's live figures. `shards` gives what is loaded now; `costs` a lane's live costs."""

    def __init__(
        self,
        node_id: str,
        shards: Callable[[], Sequence[Shard]],
        costs: Callable[[Lane], Costs | None],
    ) -> None:
        self.node_id = node_id
        self.counters = Counters()
        self.alive = True
        self.plane_load: Callable[[], float] = lambda: 0.0
        """Load of the data plane itself, in slots: steps that wait for the engine."""
        self._shards = shards
        self._costs = costs
        self._latency = Ewma()
        self._links: dict[str, float] = {}
        self._lanes: dict[int, Lane] = {}

    def seed(self, shard: Shard) -> None:
        """A shard was loaded and measured."""
        if self._latency.value is None:
            info = shard.info
            self._latency = self._latency.after(step_ms(info, shard.test, info.first, info.last))

    def note_link(self, node_id: str, ms: float) -> None:
        """A link's one-way time was measured."""
        self._links[node_id] = ms

    def links(self) -> dict[str, float]:
        """One way to each peer that was measured, in milliseconds."""
        return dict(self._links)

    def link_ms(self, node_id: str) -> float:
        """One way to a peer, 0 to this node itself or while unknown."""
        return 0.0 if node_id == self.node_id else self._links.get(node_id, 0.0)

    def note_batch(self, outcomes: Sequence[Outcome]) -> None:
        """One engine call ended."""
        if outcomes and outcomes[0].work.prefill:
            self.counters.prefill_calls += 1
        else:
            self.counters.decode_calls += 1

    def note_step(self, outcome: Outcome, session: Session) -> None:
        """One step ran: counts it, and moves the latency where it was a decode step."""
        work = outcome.work
        self._lanes[work.lane[0]] = work.lane
        if work.prefill:
            self.counters.prefill_tokens += work.rows
            return
        self.counters.decode_tokens += work.rows
        if work.rows > 1:  # drafts: no step that a plain one is to be compared with
            return
        stages = session.ticket.stages
        trip = self.link_ms(stages[(session.stage + 1) % len(stages)].node_id)
        self._latency = self._latency.after(outcome.compute_ms + outcome.queue_ms + trip)

    @property
    def latency_ms(self) -> float:
        return self._latency.value or 0.0

    @property
    def current_load(self) -> float:
        """Busy slots, and steps that wait, over slots."""
        shards = self._shards()
        slots = sum(shard.info.n_slots for shard in shards)
        busy = sum(shard.busy_slots for shard in shards) + self.plane_load()
        return busy / slots if slots else 0.0

    def live_test(self, shard: Shard) -> SelfTest:
        """The shard's figures, moved by what it runs."""
        lane = self._lanes.get(shard.number)
        costs = None if lane is None else self._costs(lane)
        if lane is None or costs is None:
            return shard.test
        seeded = lane_costs(shard.info, shard.test, lane[1], lane[2])
        return moved(shard.test, costs.drift, costs.row_ms / max(seeded.row_ms, 1e-9))

    def health(self) -> dict[str, Any]:
        """Design 3.7: what `NodeState.from_dict` reads."""
        shards = self._shards()
        return {
            "node_id": self.node_id,
            "latency_ms": self.latency_ms,
            "current_load": self.current_load,
            "capacity_score": max((capacity_score(s.info, s.test) for s in shards), default=0.0),
            "served_layers": [[shard.info.first, shard.info.last] for shard in shards],
            "alive": self.alive,
            "mid_shard_entry": bool(shards) and all(shard.mid_shard_entry for shard in shards),
            "served_requests": self.counters.served,
            "failed_requests": self.counters.failed,
            "load": self.plane_load(),
        }
