"""Opens and closes sessions: the chain of a route, forks, prefixes, and what a new attempt takes over.

A stage opens the next one itself and answers when all below it is open, so that an answer to the head means
that the whole route stands, the tail's way back to the head included. After a loss, or on a kept prefix, the
stages may hold different numbers of positions. Each settles that with the stage below it alone: rows that are
there already are not sent again; rows that are missing there are sent from what was kept; where they were not
kept, the stage itself goes back and says so upstream.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from meshnet.engine.base import EngineError, SamplingParams
from meshnet.node.batching import Costs, Lane, Policy
from meshnet.node.deadlines import open_deadline
from meshnet.node.flow import CHUNK_ROWS, Flow
from meshnet.node.health import WorkerState, lane_costs, step_ms
from meshnet.node.links import Links, PeerLost
from meshnet.node.prefixes import LEAST_POSITIONS, Idle, Prefixes, Spans, common_prefix
from meshnet.node.ring import SentRing, merge
from meshnet.node.sessions import (
    CREDITS,
    Outlet,
    Refused,
    Session,
    Shard,
    Upstream,
    check_open,
    parse_session,
    sampling_from_wire,
)
from meshnet.protocol import dataplane_pb2 as pb
from meshnet.protocol.calls import NO_WAY_BACK
from meshnet.protocol.tickets import Ticket

PARK_S = 30.0
"""A session whose route broke waits this long for another attempt."""
PARK_GRACE_S = 5.0
"""A parked session older than this gives its slot to a new call that needs one."""
FORK_S = 120.0
MOST_WINDOW = 16

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Opening:
    """What the head is told when a session is open."""

    session: Session
    position: int
    """Positions that need not be fed again."""
    replay_rows: int
    spans: Spans


class _Gone:
    """The upstream of a session whose stream broke."""

    node_id = ""

    def credit(self, session: Session) -> None:
        pass

    def lost(self, session: Session, node_id: str, code: str, message: str) -> None:
        pass


class _Below:
    """Hears of a session on the link to its next stage."""

    def __init__(self, stages: Stages, session: Session) -> None:
        self._stages, self._session = stages, session

    def on_credit(self, credit: pb.Credit) -> None:
        self._stages.flow.credited(self._session, credit)

    def on_lost(self, node_id: str, code: str, message: str) -> None:
        self._stages.broke(self._session, node_id, code, message)


class _ToHead(_Below):
    """The same on the tail's link to the head: if that breaks, this node cannot serve the route."""

    def on_lost(self, node_id: str, code: str, message: str) -> None:
        self._stages.broke(self._session, self._stages.node_id, _way_back(code), f"the tail {message}")


def _way_back(code: str) -> str:
    """What a tail says when its link to the head failed with `code`."""
    return NO_WAY_BACK if code in ("unreachable", "deadline") else code


class Stages:
    """All sessions of a node. Event loop only."""

    def __init__(
        self,
        node_id: str,
        links: Links,
        verify: Callable[[str], Ticket],
        *,
        ring: SentRing | None = None,
        policy: Policy = Policy(),  # noqa: B008 - frozen
        link_dtype: Callable[[str], str] = lambda _: "f32",
    ) -> None:
        self.node_id = node_id
        self.shards: list[Shard] = []
        self.sessions: dict[tuple[str, int], Session] = {}
        self.draining = False
        self.state = WorkerState(node_id, lambda: self.shards, self._lane_costs)
        self.take_result: Callable[[str, Sequence[pb.Token], Sequence[pb.StageTime]], None] = lambda *_: None
        """Where tokens go that the tail of a route sampled for a call of this head."""
        self.flow = Flow(
            node_id,
            ring or SentRing(),
            self.state,
            lambda *result: self.take_result(*result),
            self._fail,
            policy,
        )
        self.executor = self.flow.executor
        self.state.plane_load = lambda: float(self.executor.load().waiting)
        self.prefixes = Prefixes()
        self._links = links
        self._verify = verify
        self._link_dtype = link_dtype
        self._numbers = itertools.count(1)
        self._seeded: set[Lane] = set()

    # ---------------------------------------------------------------- open

    async def open(self, message: pb.Open, upstream: Upstream) -> pb.Opened:
        """Opens a session for a peer; what is wrong stands in the answer."""
        answer = pb.Opened(session=message.session, stage=message.stage, node_id=self.node_id)
        try:
            opening = await self.begin(message, upstream)
        except Refused as refused:
            answer.error_code, answer.error = refused.code, refused.message
        except PeerLost as lost:
            answer.node_id, answer.error_code, answer.error = lost.node_id, lost.code, lost.message
        else:
            session = opening.session
            log.info(
                "session opened",
                call_id=session.call_id,
                session=session.id,
                start_layer=message.start_layer,
                end_layer=message.end_layer,
                upstream=upstream.node_id,
            )
            answer.position, answer.replay_rows = opening.position, opening.replay_rows
            answer.decode_ms, answer.row_ms = self._times(session)
        return answer

    async def begin(self, message: pb.Open, upstream: Upstream, spans: Spans = ()) -> Opening:
        """Opens a session here and on all stages below. Raises Refused, and PeerLost for a stage below."""
        ticket = self._verify(message.ticket)
        shard = check_open(message, ticket, self.node_id, self.shards)
        parse_session(message.session)
        if self.executor.full:
            raise Refused("busy", f"too much waits for the engine of node {self.node_id}")
        if (message.session, message.stage) in self.sessions:
            raise Refused("duplicate", f"session {message.session} is open already")
        session, spans = await self._place(message, ticket, shard, upstream)
        try:
            self._seed_lane(session)
            position, replay_rows = await self._connect(session, message)
        except (Refused, PeerLost, asyncio.CancelledError):
            self.discard(session)
            raise
        finally:
            self._end_left(session)
        if session.closed:
            self._close_below(session, keep_prefix=False)
            raise Refused("closed", f"session {session.id} was closed while it was opened")
        session.ready = True
        return Opening(session, position, replay_rows, _until(spans, position))

    async def _place(
        self, message: pb.Open, ticket: Ticket, shard: Shard, upstream: Upstream
    ) -> tuple[Session, Spans]:
        """The session with its slot, holding what it can go on from, in the table."""
        call_id, epoch, choice = parse_session(message.session)
        sampling = None
        if message.stage == len(ticket.stages) - 1:
            sampling = sampling_from_wire(message.sampling)
        session = Session(
            number=next(self._numbers),
            id=message.session,
            call_id=call_id,
            epoch=epoch,
            choice=choice,
            stage=message.stage,
            ticket=ticket,
            ticket_text=message.ticket,
            shard=shard,
            slot=-1,
            start=message.start_layer,
            end=message.end_layer,
            max_positions=message.max_positions,
            dtype=message.dtype or "f32",
            key=message.prefix_key,
            sampling=sampling,
            upstream=upstream,
            window=min(message.credits or CREDITS, MOST_WINDOW),
        )
        session.note_tokens(0, message.tokens)
        self.sessions[session.name] = session
        spans: Spans = ()
        try:
            if message.attach:
                self._drop_superseded(session)
            older = self._older(session) if message.attach else None
            if older is not None and await self._take_over(session, older):
                pass
            elif message.fork_of:
                await self._fork(session, message)
            else:
                self._may_begin(session)
                spans = await self._start(session, message)
        except EngineError as error:
            self.discard(session)
            raise Refused(error.code, str(error)) from error
        except (Refused, asyncio.CancelledError):
            self.discard(session)
            raise
        return session, spans

    def _may_begin(self, session: Session) -> None:
        """While a node or shard drains it takes only what belongs to calls that it already runs."""
        if not self.draining and session.shard.accepts:
            return
        if any(other.call_id == session.call_id and other is not session for other in self.sessions.values()):
            return
        raise Refused("draining", f"node {self.node_id} is draining and takes no new calls")

    def _drop_superseded(self, session: Session) -> None:
        """Ends what an earlier attempt holds on layers that the new route does not run here: it may need the
        slots, and nobody else will ever go on with them."""
        wanted = {(s.start_layer, s.end_layer) for s in session.ticket.stages if s.node_id == self.node_id}
        for other in list(self.sessions.values()):
            same = (other.call_id, other.choice) == (session.call_id, session.choice)
            if same and other.epoch < session.epoch and (other.start, other.end) not in wanted:
                self.discard(other)

    def _older(self, session: Session) -> Session | None:
        """The session of an earlier attempt at the same choice on the same layers."""
        found = [
            other
            for other in self.sessions.values()
            if (other.call_id, other.choice) == (session.call_id, session.choice)
            and (other.start, other.end) == (session.start, session.end)
            and other.shard is session.shard
            and other.epoch < session.epoch
            and other.slot >= 0
        ]
        return max(found, key=lambda other: other.epoch, default=None)

    async def _take_over(self, session: Session, older: Session) -> bool:
        """Gives the slot and everything kept of an earlier attempt to the new one; False if it ended
        meanwhile."""
        older.upstream = _Gone()
        self._part(older)
        session.left = older.left
        self.executor.remove([older.number])
        # Afterwards the outcome of what runs now is delivered: kept, and sent nowhere.
        await self.executor.call(lambda: None)
        if older.closed:
            return False
        older.closed = True
        self.sessions.pop(older.name, None)
        session.number, session.slot = older.number, older.slot
        session.kept = older.kept
        session.computed = session.accepted = older.computed
        if not session.tokens:
            session.tokens = older.tokens
            return True
        if older.drafted:
            await self._forget_drafts(session, older)
        return True

    async def _forget_drafts(self, session: Session, older: Session) -> None:
        """Goes back to what the head knows to be the text: an earlier attempt ran guesses behind it."""
        ran = np.asarray(older.tokens[: older.computed], dtype=np.int32)
        held = common_prefix(ran, np.asarray(session.tokens, dtype=np.int32))
        if held == len(ran):
            return
        await self._go_back(session, held)

    async def _go_back(self, session: Session, position: int) -> None:
        """Forgets what was computed from `position` on, or from where the engine can go back to before it."""
        engine, slot = session.shard.engine, session.slot
        try:
            reached = await self.executor.call(lambda: engine.rollback(slot, position))
        except EngineError as error:
            raise Refused("engine", str(error)) from error
        session.computed = session.accepted = reached
        self.flow.ring.truncate(session.number, reached)

    async def _fork(self, session: Session, message: pb.Open) -> None:
        """Makes the session a copy of its call's first choice, which rests at the fork's position."""
        source = self.sessions.get((message.fork_of, message.stage))
        if source is None or source.call_id != session.call_id or source.slot < 0:
            raise Refused("fork", f"there is no session {message.fork_of[:80]} of the same call to fork")
        position = message.fork_position
        if source.computed < position:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            source.waiters.append((position, future))
            try:
                await asyncio.wait_for(future, FORK_S)
            except TimeoutError:
                raise Refused("fork", f"{message.fork_of} did not reach position {position}") from None
        session.slot = self._slot(session.shard, message)
        engine, slot, sampling = session.shard.engine, session.slot, session.sampling

        def fork() -> int:
            engine.fork(source.slot, slot, sampling)
            return engine.rollback(slot, position) if position < engine.position(slot) else position

        session.computed = session.accepted = await self.executor.call(fork)
        if session.computed != position:
            raise Refused("fork", f"{message.fork_of} cannot be copied at position {position}")
        self.flow.ring.share(source.number, session.number, position)
        if not len(session.tokens):
            session.note_tokens(0, source.tokens[:position])

    async def _start(self, session: Session, message: pb.Open) -> Spans:
        """A fresh slot, or one with the longest prefix that the account left here, the same on all stages."""
        engine, shard = session.shard.engine, session.shard
        sampling, known = session.sampling, np.asarray(session.tokens, dtype=np.int32)
        found = None
        if message.reuse_position:
            most = min(message.reuse_position, len(known))
            found = self.prefixes.take(
                shard.number,
                session.start,
                session.end,
                session.key,
                known,
                most,
                rows=shard.info.replay_rows,
                source=message.reuse_of,
            )
        # Stages go on from what one and the same session left, or from nothing: else the head would not know
        # how their positions were computed, and could not have them computed again to the same bits.
        message.reuse_position = 0
        if found is not None:
            idle, length = found
            shard.idle -= 1
            session.slot = idle.slot

            def go_on() -> int:
                reached = engine.rollback(idle.slot, length) if length < len(idle.tokens) else length
                if sampling is not None:
                    engine.resample(idle.slot, sampling)
                return reached

            session.computed = session.accepted = await self.executor.call(go_on)
            message.reuse_position, message.reuse_of = session.computed, idle.source
        else:
            session.slot = self._slot(shard, message)
            slot, start, end = session.slot, session.start, session.end
            await self.executor.call(lambda: engine.open(slot, start, end, sampling))
        self._tell_sampler(session, sampling)
        return _until(found[0].spans, session.computed) if found is not None else ()

    def _tell_sampler(self, session: Session, sampling: SamplingParams | None) -> None:
        """Lets a fresh sampler know the tokens that an earlier attempt generated."""
        if sampling is None or len(session.tokens) <= sampling.prompt_tokens:
            return
        engine, slot, prompt = session.shard.engine, session.slot, sampling.prompt_tokens
        generated = np.asarray(session.tokens[prompt:], dtype=np.int32)
        self.executor.post(lambda: engine.replay_tokens(slot, generated, prompt))

    def _slot(self, shard: Shard, message: pb.Open) -> int:
        """A free slot; else that of the prefix left longest ago; else that of a call long parked."""
        slot = shard.take_slot(message.slot_hint - 1 if message.slot_hint else None)
        if slot is not None:
            return slot
        idle = self.prefixes.evict(shard.number)
        if idle is not None:
            shard.idle -= 1
            return idle.slot
        now = time.monotonic()
        for session in list(self.sessions.values()):
            parked = session.parked_at
            if session.shard is shard and parked is not None and now - parked > PARK_GRACE_S:
                self.discard(session)
                slot = shard.take_slot()
                if slot is not None:
                    return slot
        raise Refused("busy", f"all {shard.info.n_slots} slots of node {self.node_id} are in use")

    async def _connect(self, session: Session, message: pb.Open) -> tuple[int, int]:
        """Opens what is below and settles who goes on from where: (position, rows sent again)."""
        stages = session.ticket.stages
        if session.is_tail:
            await self._connect_head(session)
            if message.attach and session.kept:
                self.flow.send_result(session, list(session.kept), [])
            return session.computed, 0
        following = stages[session.stage + 1]
        link = self._links.get(following.node_id, following.grpc_address)
        dtype = self._link_dtype(following.node_id)
        below = pb.Open()
        below.CopyFrom(message)
        below.stage = session.stage + 1
        below.start_layer, below.end_layer = following.start_layer, following.end_layer
        below.n_embd, below.dtype = session.shard.info.n_embd, dtype
        below.slot_hint, below.credits = session.slot + 1, CREDITS
        deadline = open_deadline(len(stages) - session.stage, self._times(session)[1] * CHUNK_ROWS)
        opened = await link.open(below, _Below(self, session), deadline)
        if opened.error_code:
            raise PeerLost(opened.node_id or following.node_id, opened.error_code, opened.error)
        # An earlier attempt may have brought a stage some steps further than the head has told of.
        most = len(session.tokens) + CREDITS if message.attach else session.computed
        if opened.position > most:
            link.close(pb.Close(session=session.id, stage=below.stage))
            reason = (
                f"{following.node_id} says that it holds {opened.position} positions; {most} are possible"
            )
            raise PeerLost(following.node_id, "refused", reason)
        outlet = Outlet(
            link=link,
            stage=session.stage + 1,
            dtype=dtype,
            decode_ms=opened.decode_ms,
            row_ms=opened.row_ms,
            forward_from=opened.position,
        )
        session.outlet = outlet
        rows = opened.replay_rows + await self._settle(session, outlet, opened.position)
        return session.computed, rows

    async def _settle(self, session: Session, outlet: Outlet, below: int) -> int:
        """Sends again what the stage below lacks, or goes back to what it has."""
        own = session.computed
        if below >= own:
            return 0
        ring = self.flow.ring
        if ring.covers(session.number, below, own):
            for kept in merge(ring.since(session.number, below), session.shard.info.replay_rows):
                self.flow.pass_on(session, outlet, kept, [], True)
            return own - below
        await self._go_back(session, below)
        return 0

    async def _connect_head(self, session: Session) -> None:
        """Makes sure that the tail's tokens will reach the head. Raises PeerLost with this node at fault."""
        head = session.ticket.stages[0]
        if head.node_id == self.node_id:
            return
        link = self._links.get(head.node_id, head.grpc_address)
        stage = len(session.ticket.stages)
        request = pb.Open(session=session.id, stage=stage, ticket=session.ticket_text)
        try:
            opened = await link.open(request, _ToHead(self, session), open_deadline(1, 0.0))
        except PeerLost as lost:
            raise PeerLost(self.node_id, _way_back(lost.code), f"the tail {lost.message}") from lost
        if opened.error_code:
            raise PeerLost(self.node_id, opened.error_code, opened.error)
        session.results = link

    # ---------------------------------------------------------------- close

    def close(self, name: tuple[str, int], keep_prefix: bool, spans: Spans = ()) -> None:
        """Ends a session here and below; with `keep_prefix` its state stays to be gone on from."""
        session = self.sessions.get(name)
        if session is None:
            return
        if session.choice == 0:
            self.state.counters.served += 1
        self.discard(session, keep_prefix=keep_prefix, spans=spans)

    def close_call(self, call_id: str, before_epoch: int = 0) -> None:
        """Frees whatever a call still holds here: of attempts before this one, or (0) of all."""
        for session in list(self.sessions.values()):
            of_call = session.call_id == call_id or session.call_id.startswith(f"{call_id}.")
            if of_call and (not before_epoch or session.epoch < before_epoch):
                session.upstream.lost(session, self.node_id, "closed", "the tracker ended the call")
                self.discard(session)

    def discard(self, session: Session, *, keep_prefix: bool = False, spans: Spans = ()) -> None:
        """Forgets a session: its slot, what waits of it, what was kept, and the stages below."""
        if session.closed:
            return
        session.closed = True
        self.sessions.pop(session.name, None)
        session.fail_waiters()
        keep_prefix = keep_prefix and not session.pending
        self._close_below(session, keep_prefix)
        self.flow.ring.drop(session.number)
        if session.slot < 0:
            return
        self.executor.remove([session.number])
        shard = session.shard
        if keep_prefix and LEAST_POSITIONS <= session.computed <= len(session.tokens):
            tokens = np.asarray(session.tokens[: session.computed], dtype=np.int32)
            self.prefixes.put(
                Idle(
                    shard.number,
                    session.slot,
                    session.start,
                    session.end,
                    session.key,
                    tokens,
                    _until(spans, session.computed),
                    session.id,
                )
            )
            shard.idle += 1
            return
        self._free(shard, session.slot)

    def _free(self, shard: Shard, slot: int) -> None:
        self.executor.post(lambda: shard.engine.close(slot))
        shard.give_slot(slot)

    def _close_below(self, session: Session, keep_prefix: bool) -> None:
        self._end_left(session)
        outlet = session.outlet
        self._leave(session)
        if outlet is not None:
            outlet.link.close(pb.Close(session=session.id, stage=outlet.stage, keep_prefix=keep_prefix))

    def _part(self, session: Session) -> None:
        """Leaves what is below, which another attempt may take over; whoever ends the session ends that,
        too."""
        if session.outlet is not None:
            session.left = session.outlet.link, pb.Close(session=session.id, stage=session.outlet.stage)
        self._leave(session)

    def _end_left(self, session: Session) -> None:
        """Stages below that the new route passes by are told; of those it goes through, none knows the old
        session any more."""
        left, session.left = session.left, None
        if left is not None:
            left[0].close(left[1])

    def _leave(self, session: Session) -> None:
        """Stops listening on the links of a session."""
        outlet, session.outlet = session.outlet, None
        if outlet is not None:
            outlet.link.leave((session.id, outlet.stage))
        results, session.results = session.results, None
        if results is not None:
            results.leave((session.id, len(session.ticket.stages)))

    # ---------------------------------------------------------------- what breaks

    def _fail(self, session: Session, code: str, message: str) -> None:
        """A session cannot go on here, by this node's or its sender's fault."""
        self.state.counters.failed += session.choice == 0
        log.warning("session failed", call_id=session.call_id, session=session.id, code=code, reason=message)
        session.upstream.lost(session, self.node_id, code, message)
        self.discard(session)

    def refuse_step(self, session: Session, refused: Refused) -> None:
        """A peer sent a step that cannot be the session's."""
        self._fail(session, refused.code, refused.message)

    def broke(self, session: Session, node_id: str, code: str, message: str) -> None:
        """Something below is lost. The session keeps what it has, for another attempt to take over."""
        if session.closed:
            return
        log.warning(
            "route broke", call_id=session.call_id, session=session.id, at=node_id, code=code, reason=message
        )
        self._part(session)
        session.fail_waiters()
        self.park(session)
        session.upstream.lost(session, node_id, code, message)

    def park(self, session: Session) -> None:
        """From now on the session waits for another attempt, for a while."""
        if session.parked_at is None:
            session.parked_at = time.monotonic()

    def upstream_gone(self, upstream: Upstream) -> None:
        """A stream broke: its sessions wait for another attempt."""
        gone = _Gone()
        for session in self.sessions.values():
            if session.upstream is upstream:
                session.upstream = gone
                self.park(session)

    def sweep(self, now: float) -> None:
        """Ends sessions that no other attempt took over."""
        for session in list(self.sessions.values()):
            if session.parked_at is not None and now - session.parked_at > PARK_S:
                log.info("session given up", call_id=session.call_id, session=session.id)
                self.discard(session)

    def spare_slot(self, shard: Shard) -> int | None:
        """A free slot, not taken; an idle prefix gives way for it. None where calls use all of them."""
        slot = shard.spare_slot()
        if slot is not None:
            return slot
        idle = self.prefixes.evict(shard.number)
        if idle is None:
            return None
        shard.idle -= 1
        self._free(shard, idle.slot)
        return idle.slot

    def drop_prefixes(self, shard: Shard) -> None:
        """Frees the slots of a shard's idle prefixes."""
        for idle in self.prefixes.drop(shard.number):
            shard.idle -= 1
            self._free(shard, idle.slot)

    # ---------------------------------------------------------------- figures

    def _lane_costs(self, lane: Lane) -> Costs | None:
        return self.executor.costs(lane)

    def _seed_lane(self, session: Session) -> None:
        if session.lane not in self._seeded:
            self._seeded.add(session.lane)
            shard = session.shard
            self.executor.seed(session.lane, lane_costs(shard.info, shard.test, session.start, session.end))

    def _times(self, session: Session) -> tuple[float, float]:
        """(milliseconds of a decode step, of a row of prefill) on a session's layers."""
        test = self.state.live_test(session.shard)
        layers = session.end - session.start + 1
        return (
            step_ms(session.shard.info, test, session.start, session.end),
            layers * test.prefill_ms_per_token_layer,
        )


def _until(spans: Spans, position: int) -> Spans:
    """The spans below a position; the one that it cuts is cut."""
    return tuple((first, min(end, position)) for first, end in spans if first < position)
