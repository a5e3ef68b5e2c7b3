"""The ledger's decisions, pure: (what the database says, a command) -> (the answer, what to write).

A call is `open` from its reservation on; it ends `settled` or `released`, by way of `held` when it is
suspect, and a settled one may be `refunded`. Each step writes at most one set of entries, unique per (call,
kind, line), so a command that comes twice finds the step done and changes nothing.

    reserve   account -> held                      at acceptance, the most that the call can cost
    settle    held -> nodes and mesh               the measured charge, at most what was reserved
    release   held -> account                      the rest, or all of it
    refund    nodes and mesh -> account            the mirror image of settle

Nothing is charged for a call that failed on our side or produced no token; a client that left pays for what
was produced. A call that moves no money ends with one entry of amount 0, so that it too is booked exactly
once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from meshnet.tracker.books.prices import Share, charge, shares
from meshnet.tracker.books.records import Outcome, Price, Refusal, Settlement, Status, Usage, Work

MESH: Final = "mesh"
OUTSIDE: Final = "outside"
ALL_TIME: Final = "all"


def account_book(account_id: int) -> str:
    """The book of what an account is free to spend."""
    return f"account:{account_id}"


def held_book(account_id: int) -> str:
    """The book of what an account's open and held calls have reserved."""
    return f"held:{account_id}"


def node_book(node_id: str) -> str:
    """The book of what a node has earned."""
    return f"node:{node_id}"


def month(at: int) -> str:
    """The calendar month (UTC) of a time, as `2026-11`."""
    return _month(at // 3_600_000)


@lru_cache(maxsize=1024)
def _month(hour: int) -> str:
    return datetime.fromtimestamp(hour * 3600, UTC).strftime("%Y-%m")


def seconds_to_next_month(at: int) -> int:
    """Whole seconds until the next calendar month (UTC) begins."""
    now = datetime.fromtimestamp(at / 1000, UTC)
    first = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
    return max(1, -(-(int(first.timestamp()) * 1000 - at) // 1000))


@dataclass(frozen=True, slots=True)
class Call:
    """A call as the books know it.

    `reserved` is fixed at acceptance, like the prices and the mesh's share.
    """

    id: str
    account_id: int
    key_id: int
    tracker: str
    model: str
    price_input: int
    price_output: int
    mesh_share: int
    reserved: int
    accepted_at: int
    status: Status = "open"
    outcome: str | None = None
    reason: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    charge: int = 0
    ended_at: int | None = None

    @property
    def price(self) -> Price:
        return Price(self.model, self.price_input, self.price_output, self.accepted_at)

    @property
    def spent(self) -> int:
        """What counts against the key's budgets: the reservation while unfinished, then the charge."""
        match self.status:
            case "open" | "held":
                return self.reserved
            case "settled":
                return self.charge
            case _:
                return 0


@dataclass(frozen=True, slots=True)
class NewEntry:
    """An entry to be written; its id and time are given when it is."""

    call_id: str | None
    kind: str
    line: int
    part: str
    source: str
    target: str
    amount: int
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Reserve:
    """Accept `call` if the account and the key's budgets have room for its reservation."""

    call: Call
    monthly_budget: int | None
    total_budget: int | None


@dataclass(frozen=True, slots=True)
class Settle:
    """End a call by its measured usage. `call` is given for a free call, whose row is first written now."""

    call_id: str
    usage: Usage
    outcome: Outcome
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """Put a suspect call aside, with its usage, until it is confirmed or released."""

    call_id: str
    usage: Usage
    outcome: Outcome
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class Confirm:
    """Charge a held call, by the usage it was held with."""

    call_id: str


@dataclass(frozen=True, slots=True)
class Release:
    """End an open or held call without a charge. With `lost_tracker` only if that tracker is still gone."""

    call_id: str
    reason: str
    call: Call | None = None
    lost_tracker: str | None = None


@dataclass(frozen=True, slots=True)
class Refund:
    """Give a settled call's charge back; a held or open call is released instead."""

    call_id: str
    why: str


Command = Reserve | Settle | Hold | Confirm | Release | Refund


@dataclass(frozen=True, slots=True)
class State:
    """What a batch of commands has read, as changed by its commands so far.

    `balances` and `unlimited` are by account id, `spending` by (key id, period). `lost` are the trackers that
    are known to be gone. `work` is that of held and settled calls.
    """

    calls: dict[str, Call] = field(default_factory=dict)
    balances: dict[int, int] = field(default_factory=dict)
    unlimited: dict[int, bool] = field(default_factory=dict)
    spending: dict[tuple[int, str], int] = field(default_factory=dict)
    work: dict[str, tuple[Work, ...]] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to a command, and what it changes: the call as it now is, its entries, its work."""

    answer: Settlement | Refusal | None
    call: Call | None = None
    entries: tuple[NewEntry, ...] = ()
    work: tuple[Work, ...] | None = None


def decide(state: State, command: Command, now: int) -> Decision:
    """Decides one command.

    Reserve answers None when accepted; an unknown call is answered with None as well.
    """
    match command:
        case Reserve():
            return _reserve(state, command)
        case Settle(call_id, usage, outcome, given):
            call = state.calls.get(call_id) or given
            if call is None:
                return Decision(None)
            if call.status == "open":
                return _settle(_used(call, usage, outcome), usage, now)
            return _as_it_is(state, call)
        case Hold(call_id, usage, outcome, given):
            call = state.calls.get(call_id) or given
            if call is None:
                return Decision(None)
            if call.status == "open":
                held = replace(_used(call, usage, outcome), status="held")
                return Decision(Settlement(call.id, "held", 0), held, (), usage.work)
            return _as_it_is(state, call)
        case Confirm(call_id):
            call = state.calls.get(call_id)
            if call is None:
                return Decision(None)
            if call.status == "held":
                usage = Usage(call.prompt_tokens, call.output_tokens, state.work.get(call.id, ()))
                return replace(_settle(call, usage, now), work=None)
            return _as_it_is(state, call)
        case Release(call_id, reason, given, lost_tracker):
            call = state.calls.get(call_id) or given
            if call is None:
                return Decision(None)
            if lost_tracker is not None and lost_tracker not in state.lost:
                return _as_it_is(state, call)
            if call.status in ("open", "held"):
                return _release(call, reason, now)
            return _as_it_is(state, call)
        case Refund(call_id, why):
            call = state.calls.get(call_id)
            if call is None:
                return Decision(None)
            if call.status in ("open", "held"):
                return _release(call, why, now)
            if call.status == "settled" and call.charge:
                return _refund(state, call, why)
            return _as_it_is(state, call)


def _reserve(state: State, command: Reserve) -> Decision:
    call = command.call
    before = state.calls.get(call.id)
    if before is not None:
        # The same call again (a retry of the request's acceptance) has its reservation; anything else is a
        # clash.
        same = (before.key_id, before.model, before.reserved, before.status) == (
            call.key_id,
            call.model,
            call.reserved,
            "open",
        )
        return Decision(None if same else duplicate(call.id))
    need = call.reserved
    for field_name, budget, period in (
        ("monthly_budget", command.monthly_budget, month(call.accepted_at)),
        ("total_budget", command.total_budget, ALL_TIME),
    ):
        if budget is None or need == 0:
            continue
        spent = state.spending.get((call.key_id, period), 0)
        if spent + need > budget:
            return Decision(
                Refusal(
                    "budget_exceeded",
                    f"this call may cost {need} micro-units; of the key's {field_name} of {budget}, "
                    f"{max(0, budget - spent)} are left. Ask for fewer tokens, or have the budget raised.",
                    429,
                    "insufficient_quota",
                    seconds_to_next_month(call.accepted_at) if field_name == "monthly_budget" else None,
                )
            )
    if need and not state.unlimited.get(call.account_id, False):
        free = state.balances.get(call.account_id, 0)
        if free < need:
            return Decision(
                Refusal(
                    "insufficient_quota",
                    f"this call may cost {need} micro-units; the account has {max(0, free)} free. "
                    "Ask for fewer tokens, or have the account topped up.",
                    429,
                    "insufficient_quota",
                )
            )
    entries: tuple[NewEntry, ...] = ()
    if need:
        entries = (
            NewEntry(
                call.id, "reserve", 0, "", account_book(call.account_id), held_book(call.account_id), need
            ),
        )
    return Decision(None, call, entries)


def duplicate(call_id: str) -> Refusal:
    """The refusal of a call whose id another call has."""
    return Refusal(
        "duplicate_call",
        f"call {call_id!r} is known already, with other terms or ended; use a new id",
        409,
        "invalid_request_error",
    )


def _used(call: Call, usage: Usage, outcome: Outcome) -> Call:
    return replace(
        call, prompt_tokens=usage.prompt_tokens, output_tokens=usage.output_tokens, outcome=outcome
    )


def _settle(call: Call, usage: Usage, now: int) -> Decision:
    if call.outcome == "failed":
        return replace(_release(call, "failed on our side", now), work=usage.work)
    if call.output_tokens == 0:
        return replace(_release(call, "produced nothing", now), work=usage.work)
    amount = min(charge(call.price, call.prompt_tokens, call.output_tokens), call.reserved)
    split = shares(call.price, usage, amount, call.mesh_share)
    held = held_book(call.account_id)
    # Without a reservation nothing was moved to `held`; the one entry of amount 0 comes from the account.
    source = held if call.reserved else account_book(call.account_id)
    entries = [
        NewEntry(call.id, "settle", line, share.part, source, _book(share), share.amount)
        for line, share in enumerate(split)
    ]
    if call.reserved > amount:
        entries.append(
            NewEntry(call.id, "release", 0, "", held, account_book(call.account_id), call.reserved - amount)
        )
    done = replace(call, status="settled", charge=amount, ended_at=now)
    return Decision(_settlement(done, split), done, tuple(entries), usage.work)


def _release(call: Call, reason: str, now: int) -> Decision:
    account, held = account_book(call.account_id), held_book(call.account_id)
    entry = NewEntry(call.id, "release", 0, "", held, account, call.reserved, reason)
    done = replace(call, status="released", charge=0, reason=reason, ended_at=now)
    return Decision(Settlement(call.id, "released", 0), done, (entry,))


def _refund(state: State, call: Call, why: str) -> Decision:
    entries = tuple(
        NewEntry(
            call.id,
            "refund",
            line,
            share.part,
            _book(share),
            account_book(call.account_id),
            share.amount,
            why,
        )
        for line, share in enumerate(_split(state, call))
    )
    done = replace(call, status="refunded", reason=why)
    return Decision(Settlement(call.id, "refunded", 0), done, entries)


def _split(state: State, call: Call) -> list[Share]:
    usage = Usage(call.prompt_tokens, call.output_tokens, state.work.get(call.id, ()))
    return shares(call.price, usage, call.charge, call.mesh_share)


def _as_it_is(state: State, call: Call) -> Decision:
    if call.status != "settled":
        return Decision(Settlement(call.id, call.status, 0, repeated=True))
    settlement = _settlement(call, _split(state, call))
    return Decision(replace(settlement, repeated=True))


def _settlement(call: Call, split: list[Share]) -> Settlement:
    earned: dict[str, int] = {}
    for share in split:
        if share.node_id is not None:
            earned[share.node_id] = earned.get(share.node_id, 0) + share.amount
    to_mesh = sum(share.amount for share in split if share.node_id is None)
    return Settlement(call.id, "settled", call.charge, to_mesh, earned)


def _book(share: Share) -> str:
    return MESH if share.node_id is None else node_book(share.node_id)


def deltas(entries: Iterable[NewEntry]) -> dict[str, int]:
    """What the entries add to each book."""
    sums: dict[str, int] = {}
    for entry in entries:
        if entry.amount:
            sums[entry.source] = sums.get(entry.source, 0) - entry.amount
            sums[entry.target] = sums.get(entry.target, 0) + entry.amount
    return sums
