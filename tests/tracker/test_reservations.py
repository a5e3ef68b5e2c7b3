"""Reservations as a state machine, also over random interleavings of calls that race, move, wait and end."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshnet.tracker.reservations import (
    NOTHING,
    Need,
    NoRoom,
    Place,
    QueueFull,
    State,
    Waiting,
    announce,
    enqueue,
    grant,
    head,
    hold,
    leave,
    needs_of,
    position,
    release,
    retry_after_s,
    room,
    straight,
    withdraw,
)

A: Place = ("a", "m")
B: Place = ("b", "m")


def state_with(**slots: int) -> State:
    state = State()
    for node, count in slots.items():
        state = announce(state, (node, "m"), Need(count, count * 100), 0, {})
    return state


def test_two_calls_that_race_for_the_last_slot_never_both_get_it() -> None:
    state = state_with(a=1)
    state, first = hold(state, "one", needs_of(["a"], "m", 1, 50))
    state, second = hold(state, "two", needs_of(["a"], "m", 1, 50))
    assert first is None
    assert second == NoRoom(A)
    state, again = hold(release(state, "one"), "two", needs_of(["a"], "m", 1, 50))
    assert again is None


def test_room_is_taken_on_all_stages_or_on_none() -> None:
    state = state_with(a=2, b=1)
    state, _ = hold(state, "one", needs_of(["b"], "m", 1, 10))
    after, refused = hold(state, "two", needs_of(["a", "b"], "m", 1, 10))
    assert refused == NoRoom(B)
    assert after is state
    assert room(after, A) == Need(2, 200)


def test_kv_room_counts_as_well_as_slots() -> None:
    state = state_with(a=4)
    state, refused = hold(state, "one", needs_of(["a"], "m", 1, 401))
    assert refused == NoRoom(A)


def test_a_node_that_comes_twice_in_a_route_is_held_twice() -> None:
    state, _ = hold(state_with(a=2, b=2), "one", needs_of(["a", "b", "a"], "m", 1, 10))
    assert room(state, A) == Need(0, 180)
    assert room(state, B) == Need(1, 190)


def test_moving_a_call_gives_its_old_route_back() -> None:
    state, _ = hold(state_with(a=1, b=1), "one", needs_of(["a"], "m", 1, 10))
    state, refused = hold(state, "one", needs_of(["a", "b"], "m", 1, 10))
    assert refused is None
    state, refused = hold(state, "one", needs_of(["b"], "m", 1, 10))
    assert refused is None
    assert room(state, A) == Need(1, 100)


def test_what_others_hold_on_a_node_is_not_ours_to_give() -> None:
    state = announce(State(), A, Need(4, 400), 3, {})
    assert room(state, A) == Need(1, 100)
    state = announce(state, A, Need(4, 400), 3, {"ours": 2})
    assert room(state, A) == Need(3, 300)


def test_a_node_that_is_gone_has_no_room_and_its_holds_end_with_their_calls() -> None:
    state, _ = hold(state_with(a=2), "one", needs_of(["a"], "m", 1, 10))
    state = withdraw(state, "a")
    assert room(state, A) == NOTHING
    state, refused = hold(state, "two", needs_of(["a"], "m", 1, 10))
    assert refused == NoRoom(A)
    state = release(state, "one")
    assert dict(state.held) == {}


def test_keys_take_turns_however_much_one_has_queued() -> None:
    state = State()
    for number in range(6):
        state, _ = enqueue(state, Waiting(f"heavy{number}", "heavy", "m", 100))
    state, _ = enqueue(state, Waiting("light", "light", "m", 10))
    order = []
    while (turn := head(state, "m")) is not None:
        order.append(turn.call_id)
        state, _ = grant(state, turn.call_id, {})
    assert order.index("light") == 1
    assert [name for name in order if name != "light"] == [f"heavy{n}" for n in range(6)]


def test_work_already_granted_counts_for_the_turns_to_come() -> None:
    state = State()
    state, _ = enqueue(state, Waiting("h0", "heavy", "m", 1000))
    state, _ = grant(state, "h0", {})
    state, _ = enqueue(state, Waiting("h1", "heavy", "m", 1000))
    state, _ = enqueue(state, Waiting("l0", "light", "m", 10))
    turn = head(state, "m")
    assert turn is not None
    assert turn.call_id == "l0"


def test_a_call_that_lost_its_route_goes_before_all_that_have_not_begun() -> None:
    state, _ = enqueue(State(limit=1), Waiting("one", "k", "m", 1))
    state, full = enqueue(state, Waiting("moved", "other", "m", 1, urgent=True))
    assert full is None
    assert position(state, "moved") == 1
    assert position(state, "one") == 2


def test_the_queue_is_bounded_in_all_and_per_key() -> None:
    state = State(limit=3, limit_per_key=2)
    for name in ("one", "two"):
        state, full = enqueue(state, Waiting(name, "k", "m", 1))
        assert full is None
    state, full = enqueue(state, Waiting("three", "k", "m", 1))
    assert full == QueueFull(2, "key")
    state, full = enqueue(state, Waiting("four", "other", "n", 1))
    assert full is None
    state, full = enqueue(state, Waiting("five", "third", "m", 1))
    assert full == QueueFull(3, "all")
    state = leave(state, "one")
    state, full = enqueue(state, Waiting("six", "k", "m", 1))
    assert full is None


@given(st.integers(0, 10_000), st.integers(0, 1_000), st.floats(0, 10_000))
def test_retry_after_is_a_sensible_number_of_seconds(waiting: int, at_once: int, average: float) -> None:
    assert 1 <= retry_after_s(waiting, at_once, average) <= 120


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), max_size=60))
def test_no_key_waits_for_more_than_its_share(calls: list[tuple[str, int]]) -> None:
    """With all calls there from the start, served work of two waiting keys never differs by more than the
    largest two costs."""
    state = State()
    for number, (key, cost) in enumerate(calls):
        state, full = enqueue(state, Waiting(str(number), key, "m", cost))
        assert full is None
    served = dict.fromkeys("abc", 0.0)
    most = max((cost for _, cost in calls), default=0)
    while (turn := head(state, "m")) is not None:
        waiting = {call.key for call in state.lines["m"].waiting}
        behind = min(served[key] for key in waiting)
        assert served[turn.key] - behind <= most
        served[turn.key] += turn.cost
        state, _ = grant(state, turn.call_id, {})


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.booleans()), max_size=20))
def test_the_straight_way_leaves_what_queue_and_grant_leave(calls: list[tuple[str, int, bool]]) -> None:
    by_turns = straight_on = state_with(a=10)
    needs = needs_of(["a"], "m", 1, 10)
    for number, (key, cost, urgent) in enumerate(calls):
        call = Waiting(str(number), key, "m", cost, urgent)
        queued, full = enqueue(by_turns, call)
        assert full is None
        granted, refused = grant(queued, call.call_id, needs)
        by_turns = granted if refused is None else leave(queued, call.call_id)
        straight_on, refused_too = straight(straight_on, call, needs)
        assert refused_too == refused
        if refused is not None:
            return
        assert straight_on == by_turns


@dataclass
class Model:
    """What must be true, kept by hand."""

    totals: dict[Place, Need] = field(default_factory=dict)
    holds: dict[str, dict[Place, Need]] = field(default_factory=dict)
    queue: set[str] = field(default_factory=set)


class Interleavings(RuleBasedStateMachine):
    """Calls come, wait, get room, move and end in any order, while nodes come, shrink and go."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State(limit=4, limit_per_key=3)
        self.model = Model()
        self.names = 0

    @rule(node=st.sampled_from("abc"), slots=st.integers(0, 3), busy=st.integers(0, 4))
    def a_node_announces(self, node: str, slots: int, busy: int) -> None:
        place = (node, "m")
        ours = {c: n[place].slots for c, n in self.model.holds.items() if place in n}
        self.state = announce(self.state, place, Need(slots, slots * 10), busy, ours)
        self.model.totals[place] = Need(slots, slots * 10)

    @rule(node=st.sampled_from("abc"))
    def a_node_goes(self, node: str) -> None:
        self.state = withdraw(self.state, node)
        self.model.totals.pop((node, "m"), None)

    @rule(key=st.sampled_from("xyz"), cost=st.integers(1, 5), urgent=st.booleans())
    def a_call_comes(self, key: str, cost: int, urgent: bool) -> None:
        self.names += 1
        name = f"call{self.names}"
        waiting = len(self.model.queue)
        self.state, full = enqueue(self.state, Waiting(name, key, "m", cost, urgent))
        if full is None:
            assert urgent or waiting < 4
            self.model.queue.add(name)

    @precondition(lambda self: bool(self.model.queue))
    @rule(route=st.lists(st.sampled_from("abc"), min_size=1, max_size=3), slots=st.integers(1, 2))
    def the_next_gets_room(self, route: list[str], slots: int) -> None:
        turn = head(self.state, "m")
        assert turn is not None
        needs = needs_of(route, "m", slots, slots * 10)
        fits = all(need.within(room(self.state, place)) for place, need in needs.items())
        self.state, refused = grant(self.state, turn.call_id, needs)
        assert (refused is None) == fits
        if fits:
            self.model.queue.discard(turn.call_id)
            self.model.holds[turn.call_id] = dict(needs)

    @precondition(lambda self: bool(self.model.holds))
    @rule(data=st.data(), route=st.lists(st.sampled_from("abc"), min_size=1, max_size=3))
    def a_call_moves(self, data: st.DataObject, route: list[str]) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.holds)))
        needs = needs_of(route, "m", 1, 10)
        self.state, refused = hold(self.state, name, needs)
        if refused is None:
            self.model.holds[name] = dict(needs)

    @precondition(lambda self: bool(self.model.holds or self.model.queue))
    @rule(data=st.data())
    def a_call_ends(self, data: st.DataObject) -> None:
        """Complete, cancelled, failed, timed out in the queue: all of them release."""
        name = data.draw(st.sampled_from(sorted({*self.model.holds, *self.model.queue})))
        self.state = release(self.state, name)
        self.model.holds.pop(name, None)
        self.model.queue.discard(name)
        assert release(self.state, name) == self.state

    @invariant()
    def sums_agree(self) -> None:
        sums: dict[Place, Need] = {}
        for needs in self.model.holds.values():
            for place, need in needs.items():
                sums[place] = sums.get(place, NOTHING) + need
        assert dict(self.state.held) == sums
        assert set(self.state.holds) == set(self.model.holds)
        queued = {call.call_id for line in self.state.lines.values() for call in line.waiting}
        assert queued == self.model.queue

    @invariant()
    def nothing_is_given_twice(self) -> None:
        """Room is never negative, but where a node shrank under what it had promised."""
        for place, total in self.model.totals.items():
            held = self.state.held.get(place, NOTHING)
            free = room(self.state, place)
            assert free.slots <= total.slots - held.slots
            assert free.slots + held.slots <= total.slots

    def teardown(self) -> None:
        for name in [*self.model.holds, *self.model.queue]:
            self.state = release(self.state, name)
        assert dict(self.state.held) == {}
        assert dict(self.state.holds) == {}
        assert all(not line.waiting for line in self.state.lines.values())


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
