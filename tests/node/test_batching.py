"""What the engine runs next: rules, and properties over random traffic."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.node.batching import (
    MAX_DECODE_ROWS,
    Arrived,
    Batch,
    Costs,
    Finished,
    Item,
    Measured,
    Pipeline,
    Policy,
    Removed,
    State,
    advance,
    choose,
    cycle_ms,
    decide_groups,
    held_until,
    interpolate,
    plausible,
)

LANE = (0, 0, 14)
SEED = ((1, 3.0), (2, 4.5), (4, 8.0), (8, 10.0), (16, 19.0))
COSTS = Costs(seed=SEED, row_ms=0.5)


def item(number: int, session: int, *, prefill: bool = False, rows: int = 1, **changes: object) -> Item:
    values: dict[str, object] = {
        "number": number,
        "lane": LANE,
        "session": session,
        "slot": session,
        "key": "k",
        "rows": rows,
        "prefill": prefill,
        "stages": 1,
        "arrived": 0.0,
        **changes,
    }
    return Item(**values)  # type: ignore[arg-type]


def start(*items: Item, policy: Policy = Policy()) -> tuple[State, Batch]:  # noqa: B008 - frozen
    state, _ = advance(State(), Measured(LANE, costs=COSTS), 0.0, policy)
    state, batch = advance(state, Arrived(items), 0.0, policy)
    assert batch is not None
    return state, batch


def sessions(batch: Batch | None) -> list[int]:
    assert batch is not None
    return [each.session for each in batch.items]


def test_all_that_decodes_runs_as_one_batch() -> None:
    _, batch = start(*(item(n, n) for n in range(12)))
    assert sessions(batch) == list(range(12))
    assert not batch.prefill


def test_a_batch_has_fewer_than_64_rows() -> None:
    _, batch = start(*(item(n, n) for n in range(100)))
    assert batch.rows <= MAX_DECODE_ROWS
    state, batch = start(*(item(n, n, rows=8) for n in range(20)))
    assert batch.rows <= MAX_DECODE_ROWS
    assert len(state.waiting) + len(batch.items) == 20


def test_groups_are_neighbouring_slots_and_stay_the_same() -> None:
    state, batch = start(*(item(n, n, stages=2) for n in range(16)))
    first = sessions(batch)
    assert len(first) < 16
    assert first == list(range(len(first)))
    state, batch2 = advance(state, Finished(8.0), 0.01, Policy())
    second = sessions(batch2)
    assert not set(first) & set(second)
    again = tuple(item(100 + s, s, stages=2, arrived=0.02) for s in first)
    state, _ = advance(state, Arrived(again), 0.02, Policy())
    state, batch3 = advance(state, Finished(8.0), 0.03, Policy())
    assert sessions(batch3) == first


def test_what_came_together_stays_together_on_the_next_stage() -> None:
    """Two groups that wait at the same time do not become one; fragments of a group do."""
    lane = (0, 15, 29)
    groups = [item(n, n, lane=lane, stages=2, bundle=n // 4) for n in range(8)]
    state, batch = start(*groups)
    assert sessions(batch) == [0, 1, 2, 3]
    state, batch2 = advance(state, Finished(3.0), 0.0, Policy())
    assert sessions(batch2) == [4, 5, 6, 7]
    back = [item(20 + n, n, lane=lane, stages=2, bundle=30 + n // 2) for n in range(8)]
    state, _ = advance(state, Arrived(tuple(back)), 0.0, Policy())
    state, batch3 = advance(state, Finished(3.0), 0.0, Policy())
    assert sessions(batch3) == [0, 1, 2, 3]


def test_sessions_that_come_back_apart_meet_again() -> None:
    """Four fragments of two groups: a head that has two batches on their way waits for one to come back."""
    lane_items = {s: item(s, s, stages=2) for s in range(16)}
    state, batch = start(*lane_items.values())
    number, now = 100, 0.0
    flying: list[list[int]] = []
    sizes = []
    for turn in range(24):
        now += 0.010
        state, following = advance(state, Finished(10.0), now, Policy())
        flying.append(sessions(batch))
        if turn == 0:  # the first group comes back in two halves
            half = flying.pop(0)
            flying += [half[:4], half[4:]]
        while following is None:
            back = flying.pop(0)
            items = []
            for session in back:
                number += 1
                items.append(item(number, session, stages=2, arrived=now))
            state, following = advance(state, Arrived(tuple(items)), now, Policy())
        batch = following
        sizes.append(len(batch.items))
    assert sizes[-8:] == [8] * 8, sizes


def test_a_batch_that_does_not_come_back_is_not_waited_for() -> None:
    state, _ = start(item(1, 1, stages=2))
    state, nothing = advance(state, Finished(3.0), 0.01, Policy())
    assert nothing is None
    state, held = advance(state, Arrived((item(2, 2, stages=2, arrived=0.02),)), 0.02, Policy())
    until = held_until(state)
    if held is None:
        assert until is not None
        state, held = choose(state, until, Policy())
    assert sessions(held) == [2]


def test_a_chunk_runs_alone_between_decode_calls() -> None:
    policy = Policy(max_gap_ms=50)
    chunks = [item(10 + n, 5, prefill=True, rows=256) for n in range(3)]
    state, batch = start(item(1, 1), *chunks, policy=policy)
    kinds = [batch.prefill]
    number, now = 100, 0.0
    for _ in range(5):
        now += 0.128 if batch.prefill else 0.003
        state, following = advance(state, Finished(None), now, policy)
        if not kinds[-1]:
            number += 1
            state, other = advance(state, Arrived((item(number, 1, arrived=now),)), now, policy)
            following = following or other
        assert following is not None
        batch = following
        kinds.append(batch.prefill)
    # the decode step never waits for two chunks in a row, for one alone is longer than the permitted gap
    assert not any(a and b for a, b in itertools.pairwise(kinds))
    assert kinds.count(True) == 3


def test_short_chunks_run_while_they_fit_the_gap() -> None:
    policy = Policy(max_gap_ms=300)
    chunks = [item(10 + n, 5 + n, prefill=True, rows=100) for n in range(8)]
    state, batch = start(item(1, 1), *chunks, policy=policy)
    now, run = 0.0, 0
    while batch.prefill:
        run += 1
        now += 0.05
        state, following = advance(state, Finished(50.0), now, policy)
        assert following is not None
        batch = following
    assert 4 <= run <= 7
    assert now <= 0.3


def test_a_session_runs_in_order_whatever_kind_its_steps_are() -> None:
    state, batch = start(item(1, 1, prefill=True, rows=10), item(2, 1))
    assert batch.prefill
    state, batch2 = advance(state, Finished(1.0), 0.0, Policy())
    assert batch2 is not None
    assert not batch2.prefill


def test_first_come_first_served_within_a_key_and_no_key_starves() -> None:
    chunks = [item(number, number // 3, prefill=True, rows=256, key="greedy") for number in range(6)]
    chunks.append(item(10, 7, prefill=True, rows=256, key="small"))
    state, batch = start(*chunks)
    order = [(batch.items[0].key, batch.items[0].session)]
    while True:
        state, following = advance(state, Finished(1.0), 0.0, Policy())
        if following is None:
            break
        order.append((following.items[0].key, following.items[0].session))
    assert ("small", 7) in order[:2]
    assert [session for key, session in order if key == "greedy"] == [0, 0, 0, 1, 1, 1]


def test_removed_sessions_leave_nothing() -> None:
    state, _ = start(*(item(n, n) for n in range(80)))
    gone = frozenset(i.session for i in state.waiting)
    state, _ = advance(state, Removed(gone), 0.0, Policy())
    assert not state.waiting
    state, following = advance(state, Finished(1.0), 0.0, Policy())
    assert following is None
    assert not gone & set(state.decoding)


def test_groups_fill_the_pipeline_and_no_more() -> None:
    even = Pipeline((1.0,), 0.2)
    assert decide_groups(16, 2, COSTS, even) == 2
    assert decide_groups(16, 1, COSTS, Pipeline()) == 1
    assert decide_groups(1, 2, COSTS, even) == 1
    assert decide_groups(200, 1, COSTS, Pipeline()) == 4
    # on a far link more groups are in flight than stages
    assert decide_groups(16, 2, COSTS, Pipeline((1.0,), 60.0), 1) >= 2


def test_a_batch_of_four_that_is_dear_is_not_taken() -> None:
    """The measured cost decides: here 4 sessions cost as much as 8."""
    dear = Costs(seed=((1, 3.0), (4, 10.0), (8, 10.5), (16, 30.0)))
    assert decide_groups(8, 2, dear, Pipeline((1.0,))) == 1
    cheap = Costs(seed=((1, 1.0), (4, 4.0), (8, 8.0), (16, 16.0)))
    assert decide_groups(8, 2, cheap, Pipeline((1.0,))) >= 2


def test_a_number_of_groups_is_kept_unless_another_is_clearly_better() -> None:
    costs = Costs(seed=((1, 1.0), (8, 8.0), (16, 15.7)))
    both = [decide_groups(16, 2, costs, Pipeline((1.0,)), current) for current in (1, 2)]
    assert both[1] == 2
    now, best = (cycle_ms(g, 16, costs, Pipeline((1.0,))) for g in both)
    assert best <= now


def test_costs_follow_what_runs() -> None:
    costs = COSTS
    batch = Batch(tuple(item(n, n) for n in range(8)), prefill=False)
    for _ in range(50):
        costs = costs.after(batch, 20.0)
    assert 19.5 < costs.decode_ms(8) < 20.5
    assert costs.decode_ms(16) > 30, "sizes that did not run are moved along"
    busy = costs
    for _ in range(50):
        busy = busy.after(batch, 20.0).after(Batch(batch.items[:4], prefill=False), 400.0)
    ratio = busy.decode_ms(4) / busy.decode_ms(8)
    assert ratio < 1.25**2 * 8 / 10, "one size never becomes dear beyond all measure"
    chunk = Batch((item(1, 1, prefill=True, rows=100),), prefill=True)
    for _ in range(50):
        costs = costs.after(chunk, 200.0)
    assert 1.9 < costs.row_ms < 2.1


@given(st.dictionaries(st.sampled_from([1, 2, 4, 8, 16, 32]), st.floats(0.1, 1e4), min_size=1))
def test_measured_batches_are_made_plausible(measured: dict[int, float]) -> None:
    points = plausible(list(measured.items()))
    assert [size for size, _ in points] == sorted(measured)
    for (size, ms), (larger, more) in itertools.pairwise(points):
        assert ms <= more <= ms * larger / size * (1 + 1e-9)
    assert plausible(points) == points or all(
        abs(a[1] - b[1]) <= 1e-9 * b[1] for a, b in zip(plausible(points), points, strict=True)
    )


@given(st.integers(1, 200))
def test_interpolation_rises(size: int) -> None:
    assert 0 < interpolate(SEED, size) <= interpolate(SEED, size + 1)
    assert dict(SEED).get(size, interpolate(SEED, size)) == interpolate(SEED, size)


@dataclass
class Simulation:
    """Random arrivals and removals against the machine, with every rule checked at each batch."""

    state: State = field(default_factory=State)
    now: float = 0.0
    number: int = 0
    running: Batch | None = None
    ran: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    sent: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    policy: Policy = field(default_factory=lambda: Policy(100.0))

    def take(self, event: Arrived | Finished | Removed) -> None:
        self.state, batch = advance(self.state, event, self.now, self.policy)
        if isinstance(event, Finished):
            self.running = None
        self.start(batch)

    def wait(self) -> None:
        """Nothing happens until the machine wants to be asked again."""
        until = held_until(self.state)
        assert until is not None, "what waits without a date waits for ever"
        self.now = max(self.now, until)
        self.state, batch = choose(self.state, self.now, self.policy)
        self.start(batch)

    def start(self, batch: Batch | None) -> None:
        if batch is None:
            return
        assert self.running is None, "one batch at a time"
        self.running = batch
        assert batch.items
        assert len({each.lane for each in batch.items}) == 1
        assert len({each.session for each in batch.items}) == len(batch.items)
        assert all(each.prefill == batch.prefill for each in batch.items)
        if batch.prefill:
            assert len(batch.items) == 1
        else:
            assert batch.rows <= MAX_DECODE_ROWS
        slots = [each.slot for each in batch.items]
        assert slots == sorted(slots)
        for each in batch.items:
            self.ran[each.session].append(each.number)


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["decode", "chunk", "finish", "remove"]),
            st.integers(0, 11),
            st.sampled_from(["a", "b", "c"]),
            st.integers(1, 3),
        ),
        max_size=80,
    )
)
def test_any_traffic_is_run_once_in_order(moves: list[tuple[str, int, str, int]]) -> None:
    simulation = Simulation()
    removed: set[int] = set()
    for kind, session, key, stages in moves:
        simulation.now += 0.01
        if kind == "finish":
            if simulation.running is not None:
                simulation.take(Finished(5.0))
        elif kind == "remove":
            removed.add(session)
            simulation.take(Removed(frozenset({session})))
        elif session not in removed:
            simulation.number += 1
            lane = (0, 0, 14 + session % 2)
            rows = 200 if kind == "chunk" else 1
            step = item(
                simulation.number,
                session,
                prefill=kind == "chunk",
                rows=rows,
                key=key,
                lane=lane,
                stages=stages,
                arrived=simulation.now,
            )
            simulation.sent[session].append(step.number)
            simulation.take(Arrived((step,)))
    for _ in range(simulation.number + 1):
        if simulation.running is None:
            if not simulation.state.waiting:
                break
            simulation.wait()
        simulation.now += 0.01
        simulation.take(Finished(5.0))
    assert simulation.running is None
    assert not simulation.state.waiting
    for session, numbers in simulation.sent.items():
        ran = simulation.ran[session]
        assert ran == numbers[: len(ran)]
        if session not in removed:
            assert ran == numbers
