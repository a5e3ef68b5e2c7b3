"""The guard's cases as stored: suspects and audits, their checks, and the events that they leave.

A case's money moves first and its state is written after. Both can be done again, so a crash between the two
only means that the case is still open and is closed the same way later.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import structlog
from sqlalchemy import Connection, Row, insert, select, update

from meshnet.tracker.books import schema
from meshnet.tracker.books.guard import (
    SETTING,
    Case,
    CaseEffect,
    CaseEvent,
    Charge,
    Checked,
    GiveBack,
    GuardRules,
    Mark,
    Tick,
    step,
)
from meshnet.tracker.books.mesh import Settings
from meshnet.tracker.books.records import BooksError, Clock, Settlement
from meshnet.tracker.books.storage import Storage

MAX_LISTED: Final = 1_000

log = structlog.get_logger("meshnet.books")


class Ledger(Protocol):
    """What a case does with money."""

    async def confirm(self, call_id: str) -> Settlement: ...
    async def refund(self, call_id: str, why: str) -> Settlement: ...


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a case: on which nodes, and what it found."""

    call_id: str
    cause: str
    nodes: tuple[str, ...]
    passed: bool
    worst_gap: float
    detail: str
    at: int


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the guard did or found: about a call, and about a node where `node_id` is given."""

    id: int
    at: int
    kind: str
    node_id: str | None
    call_id: str | None
    detail: str


class Cases:
    """Opens, advances and lists the guard's cases."""

    def __init__(self, storage: Storage, settings: Settings, ledger: Ledger, clock: Clock) -> None:
        self._storage = storage
        self._settings = settings
        self._ledger = ledger
        self._clock = clock

    async def rules(self) -> GuardRules:
        """The guard's thresholds as set.

        The defaults where the setting cannot be read, so that calls still end.
        """
        try:
            return GuardRules.from_dict(await self._settings.get(SETTING))
        except BooksError as error:
            log.error("the guard's setting is not used", error=error.message)
            return GuardRules()

    async def open(self, case: Case) -> None:
        """Stores a new case and its event; opening it again changes nothing."""
        suspects = schema.suspects

        def write(connection: Connection) -> None:
            if _find(connection, case.call_id) is not None:
                return
            connection.execute(
                insert(suspects).values(
                    call_id=case.call_id,
                    cause=case.cause,
                    model=case.model,
                    route=json.dumps(case.route),
                    reason=case.reason,
                    state=case.state,
                    opened_at=case.opened_at,
                    attempts=case.attempts,
                )
            )
            _note(connection, case.opened_at, f"{case.cause}_opened", case.reason, case.call_id)
            if case.cause == "suspect":
                for node_id in dict.fromkeys(case.route):
                    _note(connection, case.opened_at, "suspect", case.reason, case.call_id, node_id)

        await self._storage.write(write)

    async def advance(self, call_id: str, event: CaseEvent) -> tuple[CaseEffect, ...]:
        """Takes a case one step further, moves its money, and returns the effects for trust and statistics.

        Raises BooksError when there is no such case.
        """
        case = await self.get(call_id)
        now = self._clock()
        after, effects = step(case, event, now, await self.rules())
        for effect in effects:
            match effect:
                case Charge(charged):
                    await self._ledger.confirm(charged)
                case GiveBack(returned, why):
                    await self._ledger.refund(returned, why)
                case _:
                    pass
        if after is not case or isinstance(event, Checked):
            await self._storage.write(lambda connection: _save(connection, case, after, event, effects, now))
        return effects

    async def expire(self, now: int) -> dict[str, tuple[CaseEffect, ...]]:
        """Closes the cases whose time is over; returns each one's effects."""
        rules = await self.rules()
        suspects = schema.suspects.c
        late = await self._storage.read(
            lambda connection: list(
                connection.execute(
                    select(suspects.call_id).where(
                        suspects.closed_at.is_(None), suspects.opened_at <= now - rules.check_ms
                    )
                ).scalars()
            )
        )
        return {call_id: await self.advance(call_id, Tick()) for call_id in late}

    async def get(self, call_id: str) -> Case:
        """One case. Raises BooksError when there is none."""
        case = await self._storage.read(lambda connection: _find(connection, call_id))
        if case is None:
            raise BooksError(
                f"call {call_id!r} is neither suspect nor audited",
                code="unknown_case",
                status=404,
                param="call_id",
            )
        return case

    async def latest(self, *, only_open: bool = False, limit: int = 100) -> list[tuple[Case, list[Check]]]:
        """The latest cases with their checks, newest first."""
        suspects, checks = schema.suspects, schema.checks
        query = select(suspects).order_by(suspects.c.opened_at.desc(), suspects.c.call_id)
        if only_open:
            query = query.where(suspects.c.closed_at.is_(None))

        def read(connection: Connection) -> list[tuple[Case, list[Check]]]:
            cases = [_case(row) for row in connection.execute(query.limit(min(limit, MAX_LISTED)))]
            found: dict[str, list[Check]] = {case.call_id: [] for case in cases}
            rows = connection.execute(
                select(checks).where(checks.c.call_id.in_(list(found))).order_by(checks.c.id)
            )
            for row in rows:
                found[row.call_id].append(_check(row))
            return [(case, found[case.call_id]) for case in cases]

        return await self._storage.read(read)

    async def events(self, *, since: int = 0, after: int = 0, limit: int = MAX_LISTED) -> list[Event]:
        """Events from `since` on with ids above `after`, oldest first. A tracker rebuilds trust from them."""
        events = schema.events
        query = (
            select(
                events.c.id, events.c.at, events.c.kind, events.c.node_id, events.c.call_id, events.c.detail
            )
            .where(events.c.at >= since, events.c.id > after)
            .order_by(events.c.id)
            .limit(min(limit, MAX_LISTED))
        )
        rows = await self._storage.read(lambda connection: connection.execute(query).all())
        return [Event(*row) for row in rows]


def _save(
    connection: Connection,
    before: Case,
    after: Case,
    event: CaseEvent,
    effects: Sequence[CaseEffect],
    now: int,
) -> None:
    suspects = schema.suspects
    changed = connection.execute(
        update(suspects)
        .where(suspects.c.call_id == after.call_id, suspects.c.closed_at.is_(None))
        .values(state=after.state, attempts=after.attempts, reason=after.reason, closed_at=after.closed_at)
    )
    if changed.rowcount == 0:
        return
    if isinstance(event, Checked):
        connection.execute(
            insert(schema.checks).values(
                call_id=after.call_id,
                cause=after.cause,
                route=json.dumps(event.nodes),
                verdict="passed" if event.verdict.passed else "failed",
                worst_gap=repr(event.verdict.worst_gap),
                detail=event.verdict.reason,
                at=now,
            )
        )
    if after.closed and not before.closed:
        _note(connection, now, f"{after.cause}_{after.state}", after.reason, after.call_id)
    for effect in effects:
        if isinstance(effect, Mark):
            for node_id in effect.nodes:
                _note(connection, now, effect.kind, effect.detail, effect.call_id, node_id)


def _note(
    connection: Connection, at: int, kind: str, detail: str, call_id: str, node_id: str | None = None
) -> None:
    connection.execute(
        insert(schema.events).values(at=at, kind=kind, node_id=node_id, call_id=call_id, detail=detail)
    )


def _find(connection: Connection, call_id: str) -> Case | None:
    row = connection.execute(
        select(schema.suspects).where(schema.suspects.c.call_id == call_id)
    ).one_or_none()
    return None if row is None else _case(row)


def _case(row: Row[Any]) -> Case:
    return Case(
        call_id=row.call_id,
        cause=row.cause,
        model=row.model,
        route=tuple(json.loads(row.route)),
        reason=row.reason,
        opened_at=row.opened_at,
        state=row.state,
        attempts=row.attempts,
        closed_at=row.closed_at,
    )


def _check(row: Row[Any]) -> Check:
    return Check(
        call_id=row.call_id,
        cause=row.cause,
        nodes=tuple(json.loads(row.route)),
        passed=row.verdict == "passed",
        worst_gap=float(row.worst_gap),
        detail=row.detail,
        at=row.at,
    )
