"""Who holds room on which nodes, and who waits for it: a pure state machine.

A call holds slots and KV room on every stage of its route from selection to its end. What the tracker counts
is a forecast: a node is the authority over its own slots and may refuse; what nodes announce that is none of
our calls' counts as taken by others. Calls that do not fit wait in one bounded queue per model, fair between
keys by start-time fair queueing: each call is given a virtual start, no earlier than its key's last virtual
finish, and the least start goes first. A key that sends little is served next, however much others have
queued; within a key it is first come, first served. The head of a queue is never passed over, so large calls
do not starve either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

Place = tuple[str, str]
"""(node id, model id): slots belong to a loaded model on a node."""


def frozen(values: Mapping[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(dict(values))


EMPTY: Mapping[Any, Any] = MappingProxyType({})


class Need(msgspec.Struct, frozen=True):
    """Sessions and positions of KV room, on one place."""

    slots: int
    tokens: int

    def __add__(self, other: Need) -> Need:
        return Need(self.slots + other.slots, self.tokens + other.tokens)

    def __sub__(self, other: Need) -> Need:
        return Need(self.slots - other.slots, self.tokens - other.tokens)

    def within(self, room: Need) -> bool:
        return self.slots <= room.slots and self.tokens <= room.tokens


NOTHING = Need(0, 0)
Needs = Mapping[Place, Need]


class Room(msgspec.Struct, frozen=True):
    """What a place has in all, and what of it others than our calls hold."""

    total: Need
    foreign: Need = NOTHING


class Waiting(msgspec.Struct, frozen=True):
    """A call in the queue. `cost` is its expected work in tokens; `start` its virtual start.

    `urgent` calls, which run already and lost their route, come before all others and count for no turn.
    """

    call_id: str
    key: str
    model: str
    cost: float
    urgent: bool = False
    start: float = 0.0
    number: int = 0

    @property
    def turn(self) -> tuple[bool, float, int]:
        return not self.urgent, self.start, self.number


class Line(msgspec.Struct, frozen=True):
    """The queue of one model: `now` is its virtual time, `finish` the last virtual finish by key."""

    waiting: tuple[Waiting, ...] = ()
    """In the order of their turns."""
    now: float = 0.0
    finish: Mapping[str, float] = EMPTY


EMPTY_LINE = Line()


class State(msgspec.Struct, frozen=True):
    """`limit` and `limit_per_key` bound the queues of all models together."""

    limit: int = 512
    limit_per_key: int = 256
    rooms: Mapping[Place, Room] = EMPTY
    held: Mapping[Place, Need] = EMPTY
    """Sums of the holds by place."""
    holds: Mapping[str, Needs] = EMPTY
    lines: Mapping[str, Line] = EMPTY
    numbers: int = 0


class QueueFull(msgspec.Struct, frozen=True):
    """Why a call cannot even wait."""

    waiting: int
    whose: str
    """"all" or "key"."""


class NoRoom(msgspec.Struct, frozen=True):
    """The first place, in order, without room for what was asked."""

    place: Place


def needs_of(stages: Iterable[str], model: str, slots: int, tokens: int) -> Needs:
    """What a route takes: `slots` and `tokens` on the node of each stage (twice where a node comes twice)."""
    needs: dict[Place, Need] = {}
    for node_id in stages:
        place = (node_id, model)
        needs[place] = needs.get(place, NOTHING) + Need(slots, tokens)
    return frozen(needs)


def room(state: State, place: Place) -> Need:
    """What is free at a place; negative where more is held than it has. A place nobody announced has none."""
    known = state.rooms.get(place)
    if known is None:
        return NOTHING
    return known.total - known.foreign - state.held.get(place, NOTHING)


def announce(state: State, place: Place, total: Need, busy_slots: int, ours: Mapping[str, int]) -> State:
    """A node's word on a place: its size, how many slots are busy, and which calls (by id) hold how many.

    Busy slots of calls that hold room here, or that `ours` names as ended a moment ago, are not foreign.
    """
    known = sum(ours.values())
    foreign = max(0, min(busy_slots, total.slots) - known)
    per_slot = total.tokens // total.slots if total.slots else 0
    taken = Need(foreign, foreign * per_slot)
    if state.rooms.get(place) == Room(total, taken):
        return state
    return replace(state, rooms=frozen({**state.rooms, place: Room(total, taken)}))


def withdraw(state: State, node_id: str) -> State:
    """A node is gone, or must not be used: it has no room. Holds stay until their calls end or move."""
    if not any(place[0] == node_id for place in state.rooms):
        return state
    return replace(state, rooms=frozen({p: r for p, r in state.rooms.items() if p[0] != node_id}))


def close(state: State, place: Place) -> State:
    """A model is no longer served at a place."""
    return replace(state, rooms=frozen({p: r for p, r in state.rooms.items() if p != place}))


def hold(state: State, call_id: str, needs: Needs) -> tuple[State, NoRoom | None]:
    """Takes room on all places or on none. What the call held before (a route that failed) is given back."""
    before = state.holds.get(call_id, EMPTY)
    for place, need in needs.items():
        if not need.within(room(state, place) + before.get(place, NOTHING)):
            return state, NoRoom(place)
    held = _add(_subtract(state.held, before), needs)
    holds = frozen({**state.holds, call_id: needs})
    return replace(state, held=held, holds=holds), None


def release(state: State, call_id: str) -> State:
    """Gives everything back and leaves the queue. Releasing a call that holds nothing changes nothing."""
    state = leave(state, call_id)
    before = state.holds.get(call_id)
    if before is None:
        return state
    holds = {key: value for key, value in state.holds.items() if key != call_id}
    return replace(state, held=_subtract(state.held, before), holds=frozen(holds))


def enqueue(state: State, call: Waiting) -> tuple[State, QueueFull | None]:
    """Puts a call in its model's queue, also one that gets room at once: that keeps turns fair."""
    total = 0 if call.urgent else sum(len(line.waiting) for line in state.lines.values())
    if total >= state.limit:
        return state, QueueFull(total, "all")
    mine = sum(w.key == call.key for line in state.lines.values() for w in line.waiting) if total else 0
    if mine >= state.limit_per_key:
        return state, QueueFull(mine, "key")
    line = state.lines.get(call.model, EMPTY_LINE)
    start, finish = _turn(line, call)
    placed = replace(call, start=start, number=state.numbers)
    waiting = tuple(sorted((*line.waiting, placed), key=lambda item: item.turn))
    state = replace(state, numbers=state.numbers + 1)
    return _with_line(state, call.model, Line(waiting, line.now, finish)), None


def head(state: State, model: str) -> Waiting | None:
    """Whose turn it is."""
    line = state.lines.get(model)
    return line.waiting[0] if line is not None and line.waiting else None


def grant(state: State, call_id: str, needs: Needs) -> tuple[State, NoRoom | None]:
    """Takes room for a waiting call and takes it out of its queue; the virtual time moves to its start."""
    after, refused = hold(state, call_id, needs)
    if refused is not None:
        return state, refused
    for model, line in state.lines.items():
        for call in line.waiting:
            if call.call_id == call_id:
                now = line.now if call.urgent else max(line.now, call.start)
                after = _with_line(after, model, replace(_without(line, call_id), now=now))
                return after, None
    return after, None


def straight(state: State, call: Waiting, needs: Needs) -> tuple[State, NoRoom | None]:
    """`enqueue` and `grant` in one step, for a call that comes while nobody waits."""
    after, refused = hold(state, call.call_id, needs)
    if refused is not None:
        return state, refused
    line = state.lines.get(call.model, EMPTY_LINE)
    start, finish = _turn(line, call)
    passed = line if call.urgent else Line((), start, finish)
    return _with_line(replace(after, numbers=state.numbers + 1), call.model, passed), None


def leave(state: State, call_id: str) -> State:
    """Takes a call out of its queue, if it is in one."""
    for model, line in state.lines.items():
        if any(call.call_id == call_id for call in line.waiting):
            return _with_line(state, model, _without(line, call_id))
    return state


def position(state: State, call_id: str) -> int | None:
    """1 for whose turn is next; None for a call that does not wait."""
    for line in state.lines.values():
        for index, call in enumerate(line.waiting):
            if call.call_id == call_id:
                return index + 1
    return None


def retry_after_s(waiting: int, at_once: int, average_s: float) -> int:
    """Whole seconds until a queue of `waiting` calls has moved through `at_once` slots; 1 to 120."""
    return max(1, min(120, math.ceil((waiting + 1) * average_s / max(1, at_once))))


def _turn(line: Line, call: Waiting) -> tuple[float, Mapping[str, float]]:
    """The virtual time at which a call that comes now starts, and the line's `finish` with it."""
    start = max(line.now, line.finish.get(call.key, 0.0))
    if call.urgent:
        return start, line.finish
    return start, frozen({**line.finish, call.key: start + max(call.cost, 1.0)})


def _without(line: Line, call_id: str) -> Line:
    return replace(line, waiting=tuple(call for call in line.waiting if call.call_id != call_id))


def _with_line(state: State, model: str, line: Line) -> State:
    if not line.waiting:
        # Nobody waits: keys whose last turn lies behind start afresh anyway.
        line = replace(line, finish=frozen({k: at for k, at in line.finish.items() if at > line.now}))
    return replace(state, lines=frozen({**state.lines, model: line}))


def _add(held: Mapping[Place, Need], needs: Needs) -> Mapping[Place, Need]:
    result = dict(held)
    for place, need in needs.items():
        result[place] = result.get(place, NOTHING) + need
    return frozen(result)


def _subtract(held: Mapping[Place, Need], needs: Needs) -> Mapping[Place, Need]:
    result = dict(held)
    for place, need in needs.items():
        left = result.get(place, NOTHING) - need
        if left == NOTHING:
            result.pop(place, None)
        else:
            result[place] = left
    return frozen(result)
