"""The books as the tracker sees them: who may call, what a call may cost, what it did cost.

What is durable when. A call that costs money is accepted only once its reservation is committed, and settled
once its entries are on disk. A call at price 0 reserves nothing and touches no disk before it ends; its
record follows within LINGER_S of its end, together with others. So a crash can lose records of free calls of
the last moments, never money: **no call without a row in the database has money reserved or charged.**
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import structlog
from sqlalchemy import ColumnElement, Connection, and_, exists, or_, select

from meshnet.tracker.books import schema
from meshnet.tracker.books.accounts import Accounts, insert_account
from meshnet.tracker.books.cases import Cases
from meshnet.tracker.books.guard import Admit, Case, CaseEffect, CaseEvent, Exclude
from meshnet.tracker.books.keys import Keys, insert_key
from meshnet.tracker.books.ledger import (
    Call,
    Command,
    Confirm,
    Hold,
    Refund,
    Release,
    Reserve,
    Settle,
    State,
    decide,
    duplicate,
)
from meshnet.tracker.books.limits import Limits
from meshnet.tracker.books.mesh import Joins, Mesh, Settings, ensure_mesh, insert_join_token
from meshnet.tracker.books.prices import MAX_TOKENS, Prices, charge
from meshnet.tracker.books.records import (
    BooksError,
    BooksUnavailable,
    Clock,
    KeyInfo,
    Outcome,
    Refusal,
    Reservation,
    Settlement,
    Usage,
)
from meshnet.tracker.books.reports import Reports
from meshnet.tracker.books.secret import new_secret
from meshnet.tracker.books.statistics import CallSample, Statistics
from meshnet.tracker.books.storage import Storage, wall_clock
from meshnet.tracker.books.trackers import BEAT_MS, Trackers
from meshnet.tracker.books.trust import Trust
from meshnet.tracker.books.watch import POLL_MS, Watch
from meshnet.tracker.books.writer import Writer

MESH_SHARE: Final = "mesh_share"
"""The setting with the mesh's share of each charge, in basis points (1/100 of a percent); 0 by default."""
MAX_LIVE: Final = 100_000
MAX_PARKED: Final = 10_000
FORGOTTEN_MS: Final = 60_000
PAGE: Final = 1_000
SAVE_MS: Final = 30_000
EVENTS_MS: Final = 24 * 3_600_000
"""How far back a tracker that starts reads the guard's events; older marks have faded."""
FIRST_ACCOUNT: Final = "home"

log = structlog.get_logger("meshnet.books")


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The secrets of a new mesh, shown once: an admin key, a use key, and a join token without expiry."""

    admin_key: str
    use_key: str
    join_token: str


@dataclass(slots=True)
class _Live:
    """A call in flight here.

    `tokens` its rate limit was charged, `written` the writing of its reservation.
    """

    call: Call
    key: KeyInfo
    tokens: int
    written: asyncio.Future[Refusal | None] | None = None


class Books:
    """One process's way to the books. Open with `await Books.open(...)`, end with `await books.close()`."""

    def __init__(self, storage: Storage, mesh: Mesh, clock: Clock) -> None:
        self.storage: Final = storage
        self.mesh: Final = mesh
        self.clock: Final = clock
        self.watch: Final = Watch(storage, clock)
        self.accounts: Final = Accounts(storage, clock)
        self.keys: Final = Keys(storage, self.watch, clock)
        self.prices: Final = Prices(storage, self.watch, clock)
        self.settings: Final = Settings(storage, self.watch, clock)
        self.joins: Final = Joins(storage, mesh, clock)
        self.trackers: Final = Trackers(storage, clock)
        self.reports: Final = Reports(storage)
        self.statistics: Final = Statistics()
        self.trust: Final = Trust()
        self.cases: Final = Cases(storage, self.settings, self, clock)
        self._limits = Limits()
        self._live: dict[str, _Live] = {}
        self._writer = Writer(storage, clock)
        self._housekeeping: asyncio.Task[None] | None = None
        self._parked: deque[Command] = deque()
        self._last_event = 0
        self._info: dict[str, Any] | None = None

    @classmethod
    async def open(cls, where: str | Path, *, clock: Clock = wall_clock) -> Books:
        """Opens the books in a data directory or at a database URL, upgrading their schema where needed.

        A new database is given its mesh here; its first account and keys come with `bootstrap`. Raises
        BooksError (a database of a newer meshnet, an unknown kind) or BooksUnavailable.
        """
        storage = await Storage.open(where)
        try:
            mesh = await storage.write(lambda connection: ensure_mesh(connection, clock()))
        except BaseException:
            await storage.close()
            raise
        return cls(storage, mesh, clock)

    async def bootstrap(self, *, renew: bool = False) -> Bootstrap | None:
        """Gives a new database its first account (without limit), keys and join token.

        None when it has some; with `renew` that account gets further ones, and the earlier ones stay valid.
        """
        secrets = Bootstrap(new_secret("mn-"), new_secret("mn-"), new_secret("mj-"))
        now = self.clock()

        def write(connection: Connection) -> Bootstrap | None:
            # Locking the mesh's row lets one of several trackers that start at once do this.
            connection.execute(select(schema.mesh.c.id).with_for_update())
            used = connection.execute(select(schema.accounts.c.id).limit(1)).first() is not None
            if used and not renew:
                return None
            if not used:
                insert_account(connection, FIRST_ACCOUNT, True, now)
            which = "new" if used else "first"
            insert_key(
                connection, FIRST_ACCOUNT, secrets.admin_key, now, name=f"{which} admin key", scope="admin"
            )
            insert_key(connection, FIRST_ACCOUNT, secrets.use_key, now, name=f"{which} key", scope="use")
            insert_join_token(
                connection, self.mesh, f"{which} join token", secrets.join_token, now, None, None
            )
            return secrets

        return await self.storage.write(write)

    async def start(self, url: str) -> None:
        """Registers this process as a tracker at `url` and starts its housekeeping.

        Needed before `reserve`.
        """
        await self.trackers.register(url)
        self._housekeeping = asyncio.create_task(self._keep_house(), name="books-housekeeping")

    async def close(self) -> None:
        """Writes what is queued, gives up this tracker's place and closes the database."""
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._housekeeping
            self._housekeeping = None
        try:
            await self._try_parked()
            await self._writer.close()
            await self.keys.save_last_used()
            await self.trackers.end()
        except BooksUnavailable as error:
            log.warning("books closed without a word to the database", error=error.message)
        finally:
            await self.storage.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def authenticate(self, secret: str) -> KeyInfo | None:
        """The key that `secret` opens; None when there is none, or it has expired or was revoked."""
        return await self.keys.authenticate(secret)

    async def reserve(
        self,
        call_id: str,
        key: KeyInfo,
        model: str,
        prompt_tokens: int,
        max_tokens: int,
        now: int | None = None,
        *,
        counted: bool = False,
    ) -> Reservation | Refusal:
        """Accepts a call and sets aside the most that it can cost, or says why not.

        `max_tokens` is the most output tokens of all choices together. The same call may be reserved again (a
        retry): it keeps its reservation. `counted` says that it was refused before, for a larger amount, and
        counts as no further request of its key. Whoever was given a Reservation ends it with exactly one of
        `settle`, `hold` or `release`; if this process dies, another tracker, or its next start, releases it.
        Raises BooksUnavailable when the database cannot take it.
        """
        now = self.clock() if now is None else now
        if not 0 <= prompt_tokens <= MAX_TOKENS or not 0 <= max_tokens <= MAX_TOKENS:
            raise ValueError(
                f"prompt_tokens {prompt_tokens} and max_tokens {max_tokens} lie in 0..{MAX_TOKENS}"
            )
        live = self._live.get(call_id)
        if live is not None:
            return await _reserved_already(live, key, model)
        need = prompt_tokens + max_tokens
        refusal = _not_allowed(key, model, now)
        if refusal is not None:
            return refusal
        if len(self._live) >= MAX_LIVE:
            return Refusal("books_busy", f"{MAX_LIVE} calls are in flight already", 503, "server_error", 1)
        await self.watch.ensure()
        price = (await self.prices.current()).at(model, now)
        share = int(await self.settings.get(MESH_SHARE, 0))
        # Nothing waits from here to where the call is entered: of two that race only one gets through.
        if (live := self._live.get(call_id)) is not None:
            return await _reserved_already(live, key, model)
        refusal = self._too_fast(key, need, now, counted=counted)
        if refusal is not None:
            return refusal
        amount = charge(price, prompt_tokens, max_tokens)
        call = Call(
            call_id,
            key.account_id,
            key.id,
            self.trackers.id,
            model,
            price.input,
            price.output,
            share,
            amount,
            now,
        )
        live = self._live[call_id] = _Live(call, key, need)
        if not price.free:
            live.written = asyncio.get_running_loop().create_future()
            refusal = await self._set_aside(live)
            if refusal is not None:
                self._limits.give_back(key.id, need)
                return refusal
        return Reservation(call_id, key.account_id, key.id, model, amount, price, now)

    async def _set_aside(self, live: _Live) -> Refusal | None:
        call, key = live.call, live.key
        assert live.written is not None
        if self._housekeeping is None:
            raise RuntimeError("call Books.start() before reserve: without it no crash would be noticed")
        try:
            command = Reserve(call, key.monthly_budget, key.total_budget)
            # On SQLite a power cut that loses the reservation has ended the call, too: see storage.py.
            answer = await self._writer.submit(command, durable=self.storage.kind != "sqlite")
        except BaseException:
            # Whether it was written is not known (cancelled, or the connection broke): give it back if it
            # was.
            del self._live[call.id]
            live.written.cancel()
            self._park(Release(call.id, "not accepted"))
            raise
        refusal = answer if isinstance(answer, Refusal) else None
        if refusal is not None:
            del self._live[call.id]
        live.written.set_result(refusal)
        return refusal

    def _too_fast(self, key: KeyInfo, need: int, now: int, *, counted: bool) -> Refusal | None:
        limited = self._limits.admit(
            key.id, key.requests_per_minute, key.tokens_per_minute, need, now, counted=counted
        )
        if limited is None:
            return None
        return Refusal(
            "rate_limit_exceeded",
            f"key {key.name!r} has reached its limit of {limited.value} {limited.limit.replace('_', ' ')}; "
            f"try again in {limited.retry_after} s",
            429,
            "rate_limit_error",
            limited.retry_after,
        )

    async def settle(self, call_id: str, usage: Usage, outcome: Outcome = "complete") -> Settlement:
        """Ends a call by its measured usage and charges it once; the rest of its reservation is free again.

        Charged is at most what was reserved. A call that failed, or produced no token, costs nothing. Returns
        when the charge is on disk; for a free call at once. A second delivery answers as the call stands
        (`repeated`). Raises BooksError for an unknown call, and BooksUnavailable when the database cannot be
        reached: the settlement is then kept in memory and written when it can be.
        """
        _plausible(usage)
        live = self._live.pop(call_id, None)
        if live is None:
            return await self._finish(Settle(call_id, usage, outcome))
        self._limits.give_back(live.key.id, live.tokens - usage.prompt_tokens - usage.output_tokens)
        if not live.call.price.free:
            return await self._finish(Settle(call_id, usage, outcome))
        return self._record(Settle(call_id, usage, outcome, live.call))

    async def release(self, call_id: str, reason: str) -> Settlement:
        """Ends an open or held call without a charge. A call that ended already stays as it is."""
        live = self._live.pop(call_id, None)
        if live is None:
            return await self._finish(Release(call_id, reason))
        self._limits.give_back(live.key.id, live.tokens)
        if not live.call.price.free:
            return await self._finish(Release(call_id, reason))
        return self._record(Release(call_id, reason, live.call))

    async def hold(self, call_id: str, usage: Usage, outcome: Outcome = "complete") -> Settlement:
        """Puts a suspect call aside: what it reserved stays reserved until `confirm` or `release`."""
        _plausible(usage)
        live = self._live.pop(call_id, None)
        if live is None:
            return await self._finish(Hold(call_id, usage, outcome))
        self._limits.give_back(live.key.id, live.tokens - usage.prompt_tokens - usage.output_tokens)
        return await self._finish(Hold(call_id, usage, outcome, live.call if live.call.price.free else None))

    async def confirm(self, call_id: str) -> Settlement:
        """Charges a held call by the usage it was held with."""
        return await self._finish(Confirm(call_id))

    async def refund(self, call_id: str, why: str) -> Settlement:
        """Gives a settled call's charge back, from those who earned it; a held or open call is released."""
        return await self._finish(Refund(call_id, why))

    async def recover(self, now: int | None = None) -> int:
        """Releases what the calls of lost trackers had reserved; returns how many calls that were.

        Housekeeping does this by itself. A tracker is lost when it ended, or has not beaten for LEASE_MS.
        """
        lost = await self.trackers.lost(self.clock() if now is None else now)
        if not lost:
            return 0
        calls = schema.calls
        rows = await self.storage.read(
            lambda connection: connection.execute(
                select(calls.c.id, calls.c.tracker)
                .where(calls.c.tracker.in_(lost), calls.c.status.in_(["open", "held"]))
                .order_by(calls.c.id)
            ).all()
        )
        answers = await asyncio.gather(
            *(
                self._writer.submit(Release(call_id, "its tracker was lost", lost_tracker=tracker))
                for call_id, tracker in rows
            )
        )
        released = sum(
            isinstance(a, Settlement) and a.status == "released" and not a.repeated for a in answers
        )
        if released:
            log.info("reservations of lost trackers released", calls=released, trackers=lost)
        return released

    def record(self, sample: CallSample) -> str | None:
        """Takes a finished call into the statistics; returns why its samples do not count, if so."""
        reason = self.statistics.record(sample)
        if reason is None:
            self.trust.mark({stage.node_id for stage in sample.stages}, "good", sample.at)
        return reason

    async def open_case(self, case: Case) -> None:
        """Opens a suspect's case (after `hold`) or an audit's.

        A suspect ending costs its nodes trust at once.
        """
        await self.cases.open(case)
        await self._read_events()

    async def advance(self, call_id: str, event: CaseEvent) -> Case:
        """Takes a suspect or audited call one step further: its money, its samples and its nodes' trust."""
        self._apply(await self.cases.advance(call_id, event))
        await self._read_events()
        return await self.cases.get(call_id)

    def _apply(self, effects: Iterable[CaseEffect]) -> None:
        for effect in effects:
            match effect:
                case Exclude(call_id, reason):
                    self.statistics.exclude(call_id, reason)
                case Admit(call_id):
                    self.statistics.admit(call_id)
                case _:
                    pass

    async def _read_events(self) -> None:
        """Marks nodes as the events say, other trackers' and those of before a restart included."""
        since = self.clock() - EVENTS_MS
        while events := await self.cases.events(since=since, after=self._last_event):
            for event in events:
                # Checked again after the wait: two that read at once must not both take an event.
                if event.id > self._last_event:
                    self._last_event = event.id
                    self.trust.apply(event)

    async def tidy(self, now: int) -> None:
        """Gives back reservations that nobody will end any more. Housekeeping does this by itself.

        Cases and held calls whose time is over, and open calls of this tracker that it does not know
        (whatever lost them): no reservation outlives `check_ms` after its call.
        """
        for effects in (await self.cases.expire(now)).values():
            self._apply(effects)
        await self._read_events()
        check_ms = (await self.cases.rules()).check_ms
        calls, mine = schema.calls.c, self.trackers.id
        late = and_(calls.status == "held", calls.accepted_at <= now - check_ms)
        unknown = and_(calls.status == "open", calls.tracker == mine, calls.accepted_at <= now - FORGOTTEN_MS)
        rows = await self.storage.read(
            lambda connection: connection.execute(
                select(calls.id, calls.status)
                .where(or_(late, unknown), _without_open_case(calls.id))
                .limit(PAGE)
            ).all()
        )
        parked = {command.call_id for command in self._parked if not isinstance(command, Reserve)}
        for call_id, status in rows:
            if call_id not in parked and call_id not in self._live:
                log.warning("a reservation that nobody ended was given back", call_id=call_id, status=status)
                await self._writer.submit(Release(call_id, "nobody ended it"))

    def publish(self, info: dict[str, Any]) -> None:
        """Sets what this tracker's next beat tells its peers (JSON, at most 1 MiB)."""
        self._info = info

    async def flush(self) -> None:
        """Returns when all records given so far are in the database."""
        await self._writer.flush()

    async def _finish(self, command: Settle | Hold | Confirm | Release | Refund) -> Settlement:
        try:
            answer = await self._writer.submit(command)
        except (BooksUnavailable, asyncio.CancelledError) as error:
            if isinstance(error, BooksUnavailable) and not isinstance(command, Refund):
                self._park(command)
            raise
        if not isinstance(answer, Settlement):
            raise BooksError(
                f"the books know no call {command.call_id!r}",
                code="unknown_call",
                status=404,
                param="call_id",
            )
        return answer

    def _record(self, command: Settle | Release) -> Settlement:
        """Ends a free call: the answer needs no database, and its record follows."""
        answer = decide(State(), command, self.clock()).answer
        assert isinstance(answer, Settlement)
        try:
            self._writer.post(command)
        except BooksUnavailable:
            self._park(command)
        return answer

    def _park(self, command: Command) -> None:
        """Keeps a command that could not be written for housekeeping to try again.

        Bounded, the oldest goes.
        """
        if len(self._parked) >= MAX_PARKED:
            lost = self._parked.popleft()
            log.error("books command lost", command=type(lost).__name__)
        self._parked.append(command)

    async def _keep_house(self) -> None:
        beaten = saved = 0
        healthy = True
        while True:
            now = self.clock()
            try:
                await self.watch.poll()
                if not 0 <= now - beaten < BEAT_MS:
                    beaten = now
                    info, self._info = self._info, None
                    await self.trackers.beat(info)
                    await self.recover(now)
                    await self._try_parked()
                    await self._read_events()
                if not 0 <= now - saved < SAVE_MS:
                    saved = now
                    await self.keys.save_last_used()
                    await self.tidy(now)
                healthy = True
            except Exception as error:
                if healthy:
                    log.error("books housekeeping failed; trying on", error=str(error))
                healthy = False
            await asyncio.sleep(POLL_MS / 1000)

    async def _try_parked(self) -> None:
        while self._parked:
            command = self._parked.popleft()
            try:
                await self._writer.submit(command)
            except BooksUnavailable:
                self._parked.appendleft(command)
                return
            except Exception as error:
                log.error("books command lost", command=type(command).__name__, error=str(error))


def _plausible(usage: Usage) -> None:
    """Raises ValueError for a usage that would not fit the database or the arithmetic."""
    counts = [usage.prompt_tokens, usage.output_tokens]
    for item in usage.work:
        counts += (item.layers, item.prefill_tokens, item.decode_tokens)
    if min(counts) < 0 or max(counts) > MAX_TOKENS:
        raise ValueError(f"usage {usage} has a count outside 0..{MAX_TOKENS}")


def _without_open_case(call_id: ColumnElement[str]) -> ColumnElement[bool]:
    """True for a call without an open case: one with a case is ended by that."""
    suspects = schema.suspects.c
    return ~exists().where(suspects.call_id == call_id, suspects.closed_at.is_(None))


def _not_allowed(key: KeyInfo, model: str, now: int) -> Refusal | None:
    if key.revoked_at is not None:
        return Refusal("key_revoked", f"key {key.name!r} was revoked", 401, "authentication_error")
    if key.expires_at is not None and key.expires_at <= now:
        return Refusal("key_expired", f"key {key.name!r} has expired", 401, "authentication_error")
    if not key.may_use(model):
        assert key.models is not None
        allowed = ", ".join(key.models) or "none"
        return Refusal(
            "model_not_allowed",
            f"key {key.name!r} may not use model {model!r}; it may use: {allowed}",
            403,
            "permission_error",
            param="model",
        )
    return None


async def _reserved_already(live: _Live, key: KeyInfo, model: str) -> Reservation | Refusal:
    call = live.call
    if (call.key_id, call.model) != (key.id, model):
        return duplicate(call.id)
    if live.written is not None:
        refusal = await asyncio.shield(live.written)
        if refusal is not None:
            return refusal
    return Reservation(
        call.id,
        call.account_id,
        call.key_id,
        call.model,
        call.reserved,
        call.price,
        call.accepted_at,
        repeated=True,
    )
