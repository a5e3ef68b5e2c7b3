"""A call's life as a state machine: (state, event) -> (state, effects). No sockets, no clock.

What streams (tokens, prefill progress) does not pass through here; what changes a call's phase, its route or
its fate does. The orchestrator carries the effects out and reports back with further events.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec.structs import replace

from meshnet.protocol.calls import NO_WAY_BACK

Phase = Literal[
    "accepted",
    "queued",
    "route_selected",
    "connected",
    "prefill",
    "generating",
    "complete",
    "cancelled",
    "failed",
]
Outcome = Literal["complete", "cancelled", "failed"]
ENDED: frozenset[Phase] = frozenset({"complete", "cancelled", "failed"})
BUSY_CODES = frozenset({"no_slots", "busy", "draining", "loading"})
"""A node's refusals that say nothing against it: another node, or the same later, may take the call."""
MAX_BUSY = 40
MAX_FORGIVEN = 2
"""How often a call tries nodes again that failed it, when no others are left."""


class Rules(msgspec.Struct, frozen=True):
    max_reroutes: int = 8
    fallback: bool = False
    """A fallback model is configured for the call's model."""


class State(msgspec.Struct, frozen=True):
    """`sent`: something has gone to the client. `opened`: the head has begun the attempt of this epoch."""

    rules: Rules
    phase: Phase = "accepted"
    epoch: int = 0
    nodes: tuple[str, ...] = ()
    """Of the route, head first."""
    opened: bool = False
    sent: bool = False
    excluded: frozenset[str] = frozenset()
    """Nodes that failed this call."""
    avoided: frozenset[str] = frozenset()
    """Nodes that were busy a moment ago."""
    reroutes: int = 0
    busy: int = 0
    forgiven: int = 0
    unheard: frozenset[str] = frozenset()
    """Tails that did not reach a head which reached them."""
    degraded: bool = False
    repairing: bool = False

    @property
    def head(self) -> str:
        return self.nodes[0] if self.nodes else ""

    @property
    def ended(self) -> bool:
        return self.phase in ENDED


class Queued(msgspec.Struct, frozen=True):
    """No room yet."""


class Placed(msgspec.Struct, frozen=True):
    """A route with room was taken; `same_head` when the head goes on with its session of the call."""

    nodes: tuple[str, ...]
    same_head: bool = False


class NoPlace(msgspec.Struct, frozen=True):
    """No route, and waiting does not help. `code`: no_route, queue_full, queue_timeout, ..."""

    status: int
    code: str
    message: str


class Connected(msgspec.Struct, frozen=True):
    """The head has accepted the attempt."""


class PrefillBegan(msgspec.Struct, frozen=True):
    pass


class TokensCame(msgspec.Struct, frozen=True):
    """The first tokens of an attempt, or after a repair; `sent` when the client sees them."""

    sent: bool = True


class NodeLost(msgspec.Struct, frozen=True):
    """The head reports that a node downstream failed; it parks the call."""

    node_id: str
    code: str
    message: str


class HeadFailed(msgspec.Struct, frozen=True):
    """The way to the head broke, it missed its deadline, it refused, or the mesh lost it."""

    code: str
    message: str


class Refused(msgspec.Struct, frozen=True):
    """The request itself is at fault: another node would say the same."""

    status: int
    code: str
    message: str
    param: str | None = None


class Finished(msgspec.Struct, frozen=True):
    """Every choice has ended and the head has let go of the call."""


class Cancelled(msgspec.Struct, frozen=True):
    """By the client (client_gone, cancelled), a limit (stalled_reader, call_limit) or a shutdown.

    `failed_with` is a status of our own fault; without one the call counts as cancelled.
    """

    code: str
    message: str
    failed_with: int | None = None


Event = (
    Queued
    | Placed
    | NoPlace
    | Connected
    | PrefillBegan
    | TokensCame
    | NodeLost
    | HeadFailed
    | Refused
    | Finished
    | Cancelled
)


class Place(msgspec.Struct, frozen=True):
    """Find a route for the whole model and hold it; then open the head with what was generated so far.

    `avoid` are to be passed over where that is possible. `again`: there was none a moment ago.
    """

    without: frozenset[str]
    avoid: frozenset[str] = frozenset()
    again: bool = False


class Repair(msgspec.Struct, frozen=True):
    """Find substitutes for `lost` and send the head a Reroute."""

    lost: frozenset[str]
    without: frozenset[str]
    avoid: frozenset[str] = frozenset()


class GoOn(msgspec.Struct, frozen=True):
    """Nothing to decide: listen to the head further."""


class Open(msgspec.Struct, frozen=True):
    """Send GenerateCall to the head of the route just taken."""


class Reroute(msgspec.Struct, frozen=True):
    """Send the new route to the head that stays."""


class UseFallback(msgspec.Struct, frozen=True):
    """Plan the fallback model instead; nothing has been sent yet."""


class End(msgspec.Struct, frozen=True):
    """The call is over: release, settle, tell the client."""

    outcome: Outcome
    status: int = 200
    code: str = ""
    message: str = ""
    param: str | None = None


Effect = Place | Repair | GoOn | Open | Reroute | UseFallback | End
Step = tuple[State, tuple[Effect, ...]]


def step(state: State, event: Event) -> Step:
    """What an event does. After its end nothing changes a call any more."""
    if state.ended:
        return state, ()
    match event:
        case Queued():
            return replace(state, phase="queued"), ()
        case Placed():
            return _placed(state, event)
        case NoPlace():
            return _no_place(state, event)
        case Connected():
            return replace(state, phase="connected"), ()
        case PrefillBegan():
            return replace(state, phase="prefill", opened=True), ()
        case TokensCame():
            sent = state.sent or event.sent
            return replace(state, phase="generating", opened=True, sent=sent, repairing=False), ()
        case NodeLost():
            return _node_lost(state, event)
        case HeadFailed():
            return _head_failed(state, event)
        case Refused():
            return _end(state, End("failed", event.status, event.code, event.message, event.param))
        case Finished():
            return _end(state, End("complete"))
        case Cancelled():
            if event.failed_with is None:
                return _end(state, End("cancelled", 499, event.code, event.message))
            return _end(state, End("failed", event.failed_with, event.code, event.message))


def _end(state: State, end: End) -> Step:
    return replace(state, phase=end.outcome), (end,)


def _placed(state: State, event: Placed) -> Step:
    epoch = state.epoch + 1 if state.nodes else 0
    state = replace(state, nodes=event.nodes, epoch=epoch, avoided=frozenset())
    if event.same_head:
        return state, (Reroute(),)
    return replace(state, phase="route_selected", opened=False), (Open(),)


def _no_place(state: State, event: NoPlace) -> Step:
    if (
        not state.sent
        and state.rules.fallback
        and not state.degraded
        and event.code in ("no_route", "route_lost")
    ):
        fresh = replace(state, degraded=True, excluded=frozenset(), phase="accepted", repairing=False)
        return fresh, (UseFallback(),)
    if state.repairing and state.excluded and event.code == "no_route" and state.forgiven < MAX_FORGIVEN:
        # What failed this call before may be back, or was blamed for another's fault; nothing else is left.
        forgiving = replace(state, excluded=frozenset(), forgiven=state.forgiven + 1)
        return forgiving, (Place(frozenset(), again=True),)
    if state.repairing:
        return _end(state, End("failed", 503, "route_lost", event.message))
    return _end(state, End("failed", event.status, event.code, event.message))


def _node_lost(state: State, event: NodeLost) -> Step:
    if event.node_id in state.excluded and event.node_id not in state.nodes:
        # The head tells what the tracker has acted on already.
        return state, (GoOn(),)
    if event.node_id == state.head or event.node_id not in state.nodes:
        # The head speaks of itself, or of a node that is not in its route: start over.
        return _head_failed(state, HeadFailed(event.code, event.message), blame=event.node_id == state.head)
    if event.code == NO_WAY_BACK and event.node_id not in state.unheard:
        # The head's port is closed, more likely than every way out of the tail. If that tail does not reach
        # the next head either, it is the tail.
        state = replace(state, unheard=state.unheard | {event.node_id})
        return _head_failed(state, HeadFailed(event.code, event.message))
    state, too_many = _counted(state, event.node_id, event.code)
    if too_many is not None:
        return _end(state, too_many)
    lost = frozenset(state.nodes) & (state.excluded | state.avoided)
    return state, (Repair(lost, state.excluded, state.avoided),)


def _head_failed(state: State, event: HeadFailed, *, blame: bool = True) -> Step:
    state, too_many = _counted(state, state.head if blame else "", event.code)
    if too_many is not None:
        return _end(state, too_many)
    return state, (Place(state.excluded, state.avoided),)


def _counted(state: State, failed: str, code: str) -> tuple[State, End | None]:
    """Another repair, if the call may have one. A busy node is avoided, any other is excluded."""
    if failed and code in BUSY_CODES:
        state = replace(state, avoided=state.avoided | {failed}, busy=state.busy + 1, repairing=True)
        if state.busy > MAX_BUSY:
            return state, End("failed", 503, "busy", f"nodes refused the call {state.busy} times: {code}")
        return state, None
    excluded = state.excluded | {failed} if failed else state.excluded
    state = replace(state, excluded=excluded, reroutes=state.reroutes + 1, repairing=True)
    if state.reroutes > state.rules.max_reroutes:
        message = f"the call lost its route {state.reroutes} times (last: {code})"
        return state, End("failed", 503, "route_lost", message)
    return state, None
