"""What the engine runs next: a pure state machine, (state, event) -> (state, batch).

Continuous batching over all sessions of a node. A batch is either decode (fewer than 64 rows, which keeps
results bit-exact however sessions are grouped) or one prefill chunk, never both. Sessions that decode on one
lane form groups of neighbouring slots, as many groups as it takes to fill the pipeline; neighbouring slots
because an engine can only join consecutive sequences into one piece of work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

Lane = tuple[int, int, int]
"""(shard number, entry layer, exit layer): what one engine call has in common."""

MAX_DECODE_ROWS = 63
MAX_GROUPS = 16
ALPHA = 0.2
FLIGHT_FACTOR = 3.0
LEAST_FLIGHT_S, MOST_FLIGHT_S = 0.25, 2.0
"""A batch that is not back after so many expected cycles is waited for no longer."""
REVISE_AFTER = 16
"""Decode batches after which the number of groups is decided anew."""
MOST_SHAPE = 1.25
"""How far live times may move one size of batch against the others."""
WORTH_CHANGING = 0.95
"""Another number of groups must shorten the cycle to this part of it."""


def _empty() -> Mapping[Any, Any]:
    return MappingProxyType({})


class Item(msgspec.Struct, frozen=True):
    """One step that waits. `number` is its rank by arrival, `session` counts up as sessions open; `key` is
    whose it is, for fairness."""

    number: int
    lane: Lane
    session: int
    slot: int
    key: str
    rows: int
    prefill: bool
    stages: int
    """Stages of the session's route: how many groups it takes to keep them all busy."""
    arrived: float
    bundle: int = 0
    """What came in one message has one number: it was one batch on the stage above."""


class Batch(msgspec.Struct, frozen=True):
    """What to run in one engine call."""

    items: tuple[Item, ...]
    prefill: bool

    @property
    def rows(self) -> int:
        return sum(item.rows for item in self.items)


class Costs(msgspec.Struct, frozen=True):
    """Milliseconds of one engine call on a lane: measured by the self-test, moved by what is run.

    `seed`: (rows of one decode call, one per session or some of them drafts; ms), rising (see `plausible`).
    `drift`: live over seed, whatever the size. `shape`: by size, what is left over of that. Both are moving
    averages; the shape is bounded, for a size that seldom runs must not stay dear because it once ran on a
    busy machine. `row_ms`: per row of a prefill chunk.
    """

    seed: tuple[tuple[int, float], ...] = ((1, 1.0),)
    row_ms: float = 1.0
    drift: float = 1.0
    shape: Mapping[int, float] = msgspec.field(default_factory=_empty)

    def decode_ms(self, sessions: int) -> float:
        """Of a decode call with this many sessions."""
        return interpolate(self.seed, sessions) * self.drift * self.shape.get(sessions, 1.0)

    def after(self, batch: Batch, ms: float) -> Costs:
        """Moved by a batch that took `ms`."""
        if batch.prefill:
            rows = batch.rows
            return replace(self, row_ms=self.row_ms + ALPHA * (ms / rows - self.row_ms)) if rows else self
        size = batch.rows
        ratio = ms / max(interpolate(self.seed, size), 1e-6)
        drift = self.drift + ALPHA * (ratio - self.drift)
        old = self.shape.get(size, 1.0)
        left = min(max(old + ALPHA * (ratio / max(drift, 1e-6) - old), 1 / MOST_SHAPE), MOST_SHAPE)
        return replace(self, drift=drift, shape={**self.shape, size: left})


def plausible(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Measured (sessions, ms), rising in both, with what cannot be corrected: a larger batch takes no less
    time, and never more per session than a smaller one, which could be run several times instead."""
    kept: list[tuple[int, float]] = []
    for size, ms in sorted(points):
        if kept:
            before, least = kept[-1]
            ms = min(max(ms, least), least * size / before)
        kept.append((size, ms))
    return tuple(kept)


def interpolate(points: Sequence[tuple[int, float]], size: int) -> float:
    """Linear between known sizes and beyond the last two; in proportion below the first."""
    if not points:
        return float(size)
    if size <= points[0][0] or len(points) == 1:
        return points[0][1] * max(1.0, size / points[0][0]) if size >= points[0][0] else points[0][1]
    below = points[0]
    for above in points[1:]:
        if size <= above[0] or above is points[-1]:
            slope = (above[1] - below[1]) / (above[0] - below[0])
            return max(below[1] + slope * (size - below[0]), 0.0)
        below = above
    raise AssertionError("unreachable")


class Pipeline(msgspec.Struct, frozen=True):
    """The other stages of the routes of a lane, as results report them.

    `ratios`: compute time of each other stage over ours for the same batch; `trips_ms`: links of one round.
    """

    ratios: tuple[float, ...] = ()
    trips_ms: float = 0.0


def cycle_ms(groups: int, sessions: int, costs: Costs, pipeline: Pipeline) -> float:
    """Time in which every session gets one token, with this many groups in flight.

    The slowest stage runs every group once per cycle, and a group cannot come round faster than its way
    through all stages and links.
    """
    own = costs.decode_ms(math.ceil(sessions / groups))
    stages = [own, *(own * ratio for ratio in pipeline.ratios)]
    return max(groups * max(stages), sum(stages) + pipeline.trips_ms)


def decide_groups(sessions: int, stages: int, costs: Costs, pipeline: Pipeline, current: int = 1) -> int:
    """How many groups `sessions` decode in; stays at `current` unless another number is clearly better."""
    least = math.ceil(sessions / MAX_DECODE_ROWS)
    if stages <= 1:
        return max(least, 1)
    if not pipeline.ratios:
        pipeline = replace(pipeline, ratios=(1.0,) * (stages - 1))
    own = costs.decode_ms(math.ceil(sessions / stages))
    slowest = own * max(1.0, *pipeline.ratios)
    round_trip = own * (1 + sum(pipeline.ratios)) + pipeline.trips_ms
    # While one batch makes its round, the slowest stage can run so many; more would only be smaller.
    most = min(sessions, MAX_GROUPS, math.ceil(round_trip / max(slowest, 1e-6) - 0.1))
    candidates = range(max(least, 1), max(most, least, 1) + 1)
    best = min(candidates, key=lambda groups: (cycle_ms(groups, sessions, costs, pipeline), groups))
    if current in candidates:
        now = cycle_ms(current, sessions, costs, pipeline)
        if cycle_ms(best, sessions, costs, pipeline) > WORTH_CHANGING * now:
            return current
    return best


class Policy(msgspec.Struct, frozen=True):
    """`max_gap_ms`: how long prefill may keep a waiting decode step from running, beyond one chunk."""

    max_gap_ms: float = 250.0


class _Grouping(msgspec.Struct, frozen=True):
    sessions: int
    groups: int
    left: int


class Flight(msgspec.Struct, frozen=True):
    """A decode batch of a head on its way through the other stages; until then at the latest it is back."""

    sessions: frozenset[int]
    until: float


class State(msgspec.Struct, frozen=True):
    """Everything the choice depends on. Times are seconds of one monotonic clock."""

    waiting: tuple[Item, ...] = ()
    running: Batch | None = None
    decoding: Mapping[int, Item] = msgspec.field(default_factory=_empty)
    """By session: the last decode step of the sessions that decode."""
    served: Mapping[str, float] = msgspec.field(default_factory=_empty)
    """By key: prefill rows that it had, from a common floor; the least served goes next."""
    costs: Mapping[Lane, Costs] = msgspec.field(default_factory=_empty)
    pipelines: Mapping[Lane, Pipeline] = msgspec.field(default_factory=_empty)
    grouping: Mapping[Lane, _Grouping] = msgspec.field(default_factory=_empty)
    flights: Mapping[Lane, tuple[Flight, ...]] = msgspec.field(default_factory=_empty)
    prefill_ended: float = -math.inf


class Arrived(msgspec.Struct, frozen=True):
    """Steps came in, in the order in which each session's must run."""

    items: tuple[Item, ...]


class Finished(msgspec.Struct, frozen=True):
    """The running batch is done, or failed (`ms` None: learn nothing from it)."""

    ms: float | None


class Removed(msgspec.Struct, frozen=True):
    """Sessions closed: what of theirs waits is dropped."""

    sessions: frozenset[int]


class Measured(msgspec.Struct, frozen=True):
    """What is known of a lane from outside: its self-test, or the other stages of its routes."""

    lane: Lane
    costs: Costs | None = None
    pipeline: Pipeline | None = None


Event = Arrived | Finished | Removed | Measured


def advance(state: State, event: Event, now: float, policy: Policy) -> tuple[State, Batch | None]:
    """`apply`, then `choose`."""
    return choose(apply(state, event, now), now, policy)


def apply(state: State, event: Event, now: float) -> State:
    """The state after the event."""
    if isinstance(event, Arrived):
        decoding = dict(state.decoding)
        decoding.update((item.session, item) for item in event.items if not item.prefill)
        state = _landed(state, {item.session for item in event.items}, whole=True)
        return replace(state, waiting=state.waiting + event.items, decoding=decoding)
    if isinstance(event, Finished):
        batch = state.running
        if batch is None:
            return state
        state = replace(state, running=None, prefill_ended=now if batch.prefill else state.prefill_ended)
        if event.ms is not None:
            lane = batch.items[0].lane
            costs = state.costs.get(lane, Costs()).after(batch, event.ms)
            state = replace(state, costs={**state.costs, lane: costs})
        return state if batch.prefill else _took_off(state, batch, now)
    if isinstance(event, Removed):
        gone = event.sessions
        state = _landed(state, gone, whole=False)
        return replace(
            state,
            waiting=tuple(item for item in state.waiting if item.session not in gone),
            decoding={s: item for s, item in state.decoding.items() if s not in gone},
        )
    if event.costs is not None:
        state = replace(state, costs={**state.costs, event.lane: event.costs})
    if event.pipeline is not None:
        state = replace(state, pipelines={**state.pipelines, event.lane: event.pipeline})
    return state


def _took_off(state: State, batch: Batch, now: float) -> State:
    """A head's batch goes on through the other stages."""
    lane = batch.items[0].lane
    if lane[1] != 0 or batch.items[0].stages < 2:
        return state
    known = state.grouping.get(lane)
    sessions = frozenset(item.session for item in batch.items)
    if known is None or any(item.session in sessions for item in state.waiting):
        return state
    costs, pipeline = state.costs.get(lane, Costs()), state.pipelines.get(lane, Pipeline())
    expected = FLIGHT_FACTOR * cycle_ms(known.groups, known.sessions, costs, pipeline) / 1000
    flight = Flight(sessions, now + min(max(expected, LEAST_FLIGHT_S), MOST_FLIGHT_S))
    return replace(state, flights={**state.flights, lane: (*state.flights.get(lane, ()), flight)})


def _landed(state: State, sessions: AbstractSet[int], *, whole: bool) -> State:
    """Sessions came back, and with them (`whole`) all that flew together; or they ended."""
    if not state.flights:
        return state
    flights: dict[Lane, tuple[Flight, ...]] = {}
    for lane, flying in state.flights.items():
        left = []
        for flight in flying:
            if not flight.sessions & sessions:
                left.append(flight)
            elif not whole and flight.sessions - sessions:
                left.append(replace(flight, sessions=flight.sessions - sessions))
        if left:
            flights[lane] = tuple(left)
    return replace(state, flights=flights)


def held_until(state: State) -> float | None:
    """Where steps wait and `choose` starts nothing: when it is to be asked again, if nothing happens."""
    return min((flight.until for flying in state.flights.values() for flight in flying), default=None)


def choose(state: State, now: float, policy: Policy) -> tuple[State, Batch | None]:
    """What to start now; None where something runs, nothing waits, or what waits is to be joined by others
    (see `held_until`)."""
    if state.running is not None or not state.waiting:
        return state, None
    alone = len(state.waiting) == len(state.decoding) == 1
    if alone and not state.flights and not state.waiting[0].prefill:
        # There is nothing to be weighed.
        batch = Batch(state.waiting, prefill=False)
        return replace(state, waiting=(), running=batch), batch
    heads: dict[int, Item] = {}
    for item in state.waiting:
        heads.setdefault(item.session, item)
    prefill = [item for item in heads.values() if item.prefill]
    state, decode = _may_decode(state, [item for item in heads.values() if not item.prefill], now)
    if prefill and (not decode or _chunk_may_run(state, _next_chunk(state, prefill), decode, now, policy)):
        return _start_prefill(state, prefill)
    return _start_decode(state, decode) if decode else (state, None)


def _may_decode(state: State, decode: list[Item], now: float) -> tuple[State, list[Item]]:
    """The decode steps that may run now: a head sends no more batches through its pipeline than the groups
    that fill it. More would only be smaller ones, for sessions that come back apart never meet again."""
    if not state.flights:
        return state, decode
    flights = {
        lane: left
        for lane, flying in state.flights.items()
        if (left := tuple(flight for flight in flying if flight.until > now))
    }
    state = replace(state, flights=flights)
    held = set()
    for lane in flights:
        members = [item for item in state.decoding.values() if item.lane == lane]
        if members:
            state, groups = _groups(state, lane, len(members), max(item.stages for item in members))
            if len(flights[lane]) >= groups:
                held.add(lane)
    return state, [item for item in decode if item.lane not in held]


def _chunk_may_run(state: State, chunk: Item, decode: list[Item], now: float, policy: Policy) -> bool:
    """Each decode step waits for at most one chunk, or for as many as fit into the permitted gap."""
    oldest = min(item.arrived for item in decode)
    if oldest > state.prefill_ended:
        return True
    expected_ms = state.costs.get(chunk.lane, Costs()).row_ms * chunk.rows
    return (now - oldest) * 1000 + expected_ms <= policy.max_gap_ms


def _next_chunk(state: State, prefill: list[Item]) -> Item:
    """Least served key first, first come first served within it."""
    return min(prefill, key=lambda item: (state.served.get(item.key, 0.0), item.session))


def _start_prefill(state: State, prefill: list[Item]) -> tuple[State, Batch]:
    chunk = _next_chunk(state, prefill)
    # Keys that wait now share one floor, so that a key gains nothing by having been away.
    floor = min(state.served.get(item.key, 0.0) for item in prefill)
    served = {
        key: rows
        for key in {item.key for item in prefill}
        if (rows := max(state.served.get(key, floor) - floor, 0.0)) or key == chunk.key
    }
    served[chunk.key] = served.get(chunk.key, 0.0) + chunk.rows
    batch = Batch((chunk,), prefill=True)
    waiting = tuple(item for item in state.waiting if item.number != chunk.number)
    return replace(state, served=served, waiting=waiting, running=batch), batch


def _start_decode(state: State, decode: list[Item]) -> tuple[State, Batch]:
    """The group of the step that waits longest, with all of that group that waits. A head makes the groups,
    of neighbouring slots; the other stages keep to what comes."""
    first = decode[0]
    lane = first.lane
    members = sorted((item for item in state.decoding.values() if item.lane == lane), key=lambda i: i.slot)
    if lane[1] == 0:
        state, groups = _groups(state, lane, len(members), max(item.stages for item in members))
        size = math.ceil(len(members) / groups)
        rank = next(i for i, item in enumerate(members) if item.session == first.session)
        start = rank - rank % size
        group = {item.session for item in members[start : start + size]}
    else:
        group = _bundles([item for item in decode if item.lane == lane], len(members))
    chosen: list[Item] = []
    rows = 0
    for item in decode:
        if item.lane != lane or item.session not in group:
            continue
        if not chosen or rows + item.rows <= MAX_DECODE_ROWS:
            chosen.append(item)
            rows += item.rows
    chosen.sort(key=lambda item: item.slot)
    numbers = {item.number for item in chosen}
    batch = Batch(tuple(chosen), prefill=False)
    waiting = tuple(item for item in state.waiting if item.number not in numbers)
    return replace(state, waiting=waiting, running=batch), batch


def _bundles(waiting: list[Item], sessions: int) -> set[int]:
    """What came together stays together: the oldest bundle, and further whole ones as long as there are left
    as many batches as the pipeline has stages. Two groups that became one would leave a stage idle."""
    most = math.ceil(sessions / max(item.stages for item in waiting))
    bundles: dict[int, set[int]] = {}
    for item in waiting:
        bundles.setdefault(item.bundle, set()).add(item.session)
    group: set[int] = set()
    for bundle in bundles.values():
        if not group or len(group | bundle) <= most:
            group |= bundle
    return group


def _groups(state: State, lane: Lane, sessions: int, stages: int) -> tuple[State, int]:
    known = state.grouping.get(lane)
    if known is not None and known.sessions == sessions and known.left > 0:
        kept = replace(known, left=known.left - 1)
        return replace(state, grouping={**state.grouping, lane: kept}), known.groups
    costs = state.costs.get(lane, Costs())
    pipeline = state.pipelines.get(lane, Pipeline())
    groups = decide_groups(sessions, stages, costs, pipeline, known.groups if known else 1)
    made = _Grouping(sessions, groups, REVISE_AFTER)
    return replace(state, grouping={**state.grouping, lane: made}), groups
