"""Steps on their way through a node: in from upstream, through the engine, on to the next stage or, sampled,
to the head. Runs on the event loop; sessions are opened and closed in `stages`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from meshnet.engine.base import Sampled, Tokens
from meshnet.node.batching import Policy
from meshnet.node.deadlines import decode_deadline, prefill_deadline
from meshnet.node.executor import Executor, Outcome, Work
from meshnet.node.health import WorkerState
from meshnet.node.links import PeerLost
from meshnet.node.ring import Kept, SentRing
from meshnet.node.sessions import Outlet, Session, check_step, read_hidden, weight_to_wire, write_hidden
from meshnet.protocol import dataplane_pb2 as pb

CHUNK_ROWS = 256
"""Rows of the prefill chunk behind which a step may have to wait."""

NO_STEP = -1
"""In place of a sequence: rows that no step brought just now."""

TakeResult = Callable[[str, Sequence[pb.Token], Sequence[pb.StageTime]], None]
FailSession = Callable[[Session, str, str], None]


@dataclass(slots=True)
class _Passing:
    """What has to be remembered of a step while the engine runs it."""

    session: Session
    sequence: int
    sample: int
    tokens: tuple[int, ...]
    replay: bool
    upstream: list[pb.StageTime] = field(default_factory=list)

    @property
    def drafts(self) -> tuple[int, ...]:
        """Tokens that were guessed: all behind the first row after which is sampled."""
        return self.tokens[len(self.tokens) - self.sample + 1 :] if self.sample > 1 else ()


class Flow:
    """One per node. `take_result` gets what this node's own calls are waiting for, `fail` ends a session."""

    def __init__(
        self,
        node_id: str,
        ring: SentRing,
        state: WorkerState,
        take_result: TakeResult,
        fail: FailSession,
        policy: Policy,
    ) -> None:
        self.ring = ring
        self._node_id = node_id
        self._state = state
        self._take_result = take_result
        self._fail = fail
        self.executor = Executor(self._deliver, policy)

    # ---------------------------------------------------------------- in

    def accept(self, session: Session, step: pb.Step) -> Work | None:
        """The work for a step from a peer; None for one that was done before. Raises Refused."""
        if step.sequence < session.sequence:
            self._answer_again(session, step)
            return None
        check_step(session, step)
        hidden = read_hidden(step, session.shard.info.n_embd, session.dtype)
        if session.outlet is not None:
            # It proves that the token of the last sampled step arrived at the head.
            self._answered(session, session.outlet, session.outlet.sampled)
        tokens = tuple(step.tokens)
        position, replay = step.position, step.replay
        if tokens:
            session.note_tokens(position, tokens)
        passing = _Passing(session, session.sequence, step.sample, tokens, replay, list(step.upstream))
        return self._work(session, position, len(hidden), passing, replay or step.prefill, hidden=hidden)

    def feed(
        self, session: Session, position: int, tokens: Tokens, *, sample: int, prefill: bool, replay: bool
    ) -> None:
        """Runs tokens on this head's own stage."""
        ids = tuple(tokens.tolist())
        session.note_tokens(position, ids)
        passing = _Passing(session, session.sequence, sample, ids, replay)
        work = self._work(session, position, len(ids), passing, prefill or replay, tokens=tokens)
        self.executor.submit([work])

    def _work(
        self,
        session: Session,
        position: int,
        rows: int,
        passing: _Passing,
        prefill: bool,
        *,
        tokens: Tokens | None = None,
        hidden: np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None = None,
    ) -> Work:
        session.sequence += 1
        session.accepted = position + rows
        session.drafted |= bool(passing.drafts)
        return Work(
            engine=session.shard.engine,
            lane=session.lane,
            session=session.number,
            slot=session.slot,
            key=session.key,
            stages=len(session.ticket.stages),
            position=position,
            prefill=prefill,
            tokens=tokens,
            hidden=hidden,
            sample=passing.sample if session.is_tail else 0,
            drafts=passing.drafts if session.is_tail else (),
            context=passing,
        )

    def answered_by_token(self, session: Session, position: int) -> None:
        """The session's token at `position` came to this head: the step that gave it is done below."""
        outlet = session.outlet
        if outlet is not None:
            upto = [sequence for sequence, first in outlet.asked if first <= position]
            self._answered(session, outlet, max(upto, default=0))

    def _answered(self, session: Session, outlet: Outlet, upto: int) -> None:
        """All steps below `upto` are done on the next stage."""
        if upto <= outlet.answered:
            return
        outlet.answered = upto
        while outlet.asked and outlet.asked[0][0] <= upto:
            outlet.asked.popleft()
        outlet.link.answered((session.id, outlet.stage), upto)
        self._send_waiting(session, outlet)

    def _answer_again(self, session: Session, step: pb.Step) -> None:
        """A step that was done before: its tokens, where they are still kept, go to the head once more."""
        first = step.position + step.rows - step.sample + 1
        again = [token for token in session.kept if first <= token.position <= step.position + step.rows]
        if again:
            self.send_result(session, again, [])

    # ---------------------------------------------------------------- out

    def _deliver(self, outcomes: list[Outcome]) -> None:
        """What others wait for leaves first; figures are taken down while they compute."""
        ran: list[tuple[Outcome, Session, Kept | None]] = []
        for outcome in outcomes:
            passing: _Passing = outcome.work.context
            session = passing.session
            if session.closed:
                continue
            if outcome.result is None:
                self._fail(session, outcome.code, outcome.error)
                continue
            work = outcome.work
            session.computed = work.position + work.rows
            times = [*passing.upstream, *self._times(outcome, session, passing.sample)]
            kept: Kept | None = None
            if outcome.result.hidden is not None:
                hidden = outcome.result.hidden
                kept = Kept(work.position, hidden, passing.sample, work.prefill, passing.tokens)
                self._forward(session, passing, kept, times)
            else:
                self._sampled(session, passing, outcome.result.sampled, times)
            ran.append((outcome, session, kept))
        for _, session, _ in ran:
            link = session.outlet.link if session.outlet is not None else session.results
            if link is not None:
                link.flush()
        self.executor.flush()
        self._state.note_batch(outcomes)
        for outcome, session, kept in ran:
            if kept is not None and not session.closed:
                self.ring.add(session.number, kept)
            session.wake()
            self._state.note_step(outcome, session)

    def _times(self, outcome: Outcome, session: Session, sample: int) -> list[pb.StageTime]:
        """This stage's line for the step; of steps without a sample, no result tells, so they add up."""
        line = session.untold or pb.StageTime(node_id=self._node_id)
        line.compute_ms += outcome.compute_ms
        line.queue_ms += outcome.queue_ms
        line.steps += 1
        line.rows += outcome.work.rows
        session.untold = None if sample else line
        if not sample:
            return []
        line.sent_unix_ms = time.time() * 1000
        line.batch = outcome.batch
        line.link_ms = self._state.link_ms(next_node(session))
        return [line]

    def _forward(self, session: Session, passing: _Passing, kept: Kept, times: list[pb.StageTime]) -> None:
        outlet = session.outlet
        if outlet is None or not self.pass_on(session, outlet, kept, times, passing.replay, passing.sequence):
            self._passed(session, passing.sequence, passing.sample)

    def pass_on(
        self,
        session: Session,
        outlet: Outlet,
        kept: Kept,
        times: list[pb.StageTime],
        replay: bool,
        sequence: int = NO_STEP,
    ) -> bool:
        """Sends a step's rows below, those that are not there yet, as soon as they may be sent; False where
        all are there. `sequence` is that of the step that brought them, which counts as passed on then."""
        first = max(kept.position, outlet.forward_from)
        if first >= kept.end:
            return False
        skip = first - kept.position
        step = pb.Step(
            session=session.id,
            stage=outlet.stage,
            position=first,
            rows=kept.end - first,
            dtype=outlet.dtype,
            data=write_hidden(kept.hidden[skip:], outlet.dtype),
            sample=min(kept.sample, kept.end - first),
            tokens=kept.tokens[skip:],
            prefill=kept.prefill,
            replay=replay,
            upstream=times,
        )
        outlet.waiting.append((step, sequence))
        self._send_waiting(session, outlet)
        return True

    def _send_waiting(self, session: Session, outlet: Outlet) -> None:
        while outlet.waiting and outlet.may_send:
            step, received = outlet.waiting.popleft()
            step.sequence = outlet.sequence
            outlet.sequence += 1
            if step.sample:
                outlet.sampled = outlet.sequence
                outlet.asked.append((outlet.sequence, step.position + step.rows - step.sample + 1))
            if step.prefill or step.replay:
                deadline = prefill_deadline(max(step.rows, CHUNK_ROWS), outlet.row_ms)
            else:
                deadline = decode_deadline(outlet.decode_ms, outlet.row_ms * CHUNK_ROWS)
            with contextlib.suppress(PeerLost):  # every session on that link was told already
                outlet.link.step(step, deadline)
            if received != NO_STEP:
                self._passed(session, received, step.sample)

    def credited(self, session: Session, credit: pb.Credit) -> None:
        """The next stage has done all below `credit.upto`."""
        outlet = session.outlet
        if outlet is not None and credit.upto <= outlet.sequence:
            self._answered(session, outlet, credit.upto)

    def _passed(self, session: Session, sequence: int, sample: int) -> None:
        """A step is computed and sent on: its place is free again."""
        session.done = max(session.done, sequence + 1)
        if not sample:
            session.upstream.credit(session)

    def _sampled(
        self, session: Session, passing: _Passing, sampled: Sequence[Sampled], times: list[pb.StageTime]
    ) -> None:
        self._passed(session, passing.sequence, passing.sample)
        if not sampled:
            return
        tokens = [
            pb.Token(
                position=token.position,
                token=token.token,
                logprob=token.logprob or 0.0,
                top=[pb.Alternative(token=t, logprob=p) for t, p in token.top],
                end=token.end,
                weight=weight_to_wire(token.weight),
            )
            for token in sampled
        ]
        session.kept.extend(tokens)
        self.send_result(session, tokens, times)

    def send_result(
        self, session: Session, tokens: Sequence[pb.Token], times: Sequence[pb.StageTime]
    ) -> None:
        """Sends sampled tokens to the head."""
        if session.results is None:
            self._take_result(session.id, tokens, times)
            return
        message = pb.Result(session=session.id, tokens=tokens, stages=times)
        with contextlib.suppress(PeerLost):  # the session was told already
            session.results.result(message, decode_deadline(0.0, 0.0))


def next_node(session: Session) -> str:
    """Where a session's results go from this stage: the next node, from the tail the head."""
    stages = session.ticket.stages
    return stages[(session.stage + 1) % len(stages)].node_id
