"""One call at its head: feeds the route, takes the tokens, says what happened, survives the loss of stages.

Tokens are taken as they come, without a detour: the next step must go out at once. Routes are the matter of
the call's task: it opens them, and when one breaks the call is parked, keeping what it has until the tracker
names another route or gives the call up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import structlog

from meshnet.engine.base import GrammarError, SamplingParams, Tokens
from meshnet.engine.tokenizer import Tokenizer
from meshnet.node.batching import MAX_DECODE_ROWS
from meshnet.node.drafts import MOST_DRAFTS, Lookup, Pace
from meshnet.node.drafts import Policy as Drafting
from meshnet.node.events import EventQueue
from meshnet.node.feeding import Piece, generated_spans, plan, prompt_spans
from meshnet.node.links import PeerLost
from meshnet.node.pipeline import PipelineMeter
from meshnet.node.prefixes import Spans
from meshnet.node.sessions import CREDITS, Refused, Session, parse_session, sampling_to_wire, session_id
from meshnet.node.stages import Opening, Stages
from meshnet.node.stagesums import StageSums
from meshnet.node.textout import TextOut
from meshnet.protocol import calls
from meshnet.protocol import dataplane_pb2 as pb
from meshnet.protocol.tickets import Ticket

REROUTE_S = 60.0
"""A parked call waits this long for a new route."""
BLAME_S = 0.05
"""When opening fails, the stage that saw the cause may be telling it on another session."""
MAX_NOTICES = 64
"""What waits for a call's task at most. Of a lost route it needs to hear once, whoever else tells it."""
STAGES_EVERY = 32
"""Tokens between two reports of stage times."""
REASONS = {"eos": "stop", "grammar": "stop", "stop_string": "stop", "limit": "length", "context": "length"}

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request comes to, once the model's template and tokenizer were at it. `sampling` is that of
    choice 0."""

    tokens: Tokens
    sampling: SamplingParams
    stops: tuple[str, ...]
    choices: int
    show_control: bool


class CallFailed(Exception):
    """The call ends with this error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.event = calls.CallError(status, code, message, type=kind)


@dataclass(frozen=True, slots=True)
class _Lost:
    epoch: int
    node_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class _Route:
    ticket: Ticket
    text: str


@dataclass(frozen=True, slots=True)
class _Ended:
    """Every choice has ended, or the call cannot go on (`_fault`): look."""


@dataclass(slots=True)
class _Choice:
    index: int
    out: TextOut
    generated: list[int] = field(default_factory=list)
    session: Session | None = None
    pieces: deque[Piece] = field(default_factory=deque)
    lookup: Lookup | None = None
    """What may come next, where drafts are possible."""
    pace: Pace = Pace()  # noqa: RUF009 - frozen
    fed_at: float = 0.0
    drafted: int = 0
    """Drafts that the last step fed had."""
    planned: bool = False
    """What takes its session to all its tokens is queued; tokens that come before only add to it."""
    ended: bool = False


class Call:
    """Made by `headcalls.HeadCalls`; `run` is the body of its task, `events` what it says."""

    def __init__(
        self,
        request: calls.GenerateCall,
        ticket: Ticket,
        prompt: Prompt,
        tokenizer: Tokenizer,
        stages: Stages,
        meter: PipelineMeter,
        *,
        call_id: str,
        n_ctx: int,
        drafting: Drafting = Drafting(),  # noqa: B008 - frozen
    ) -> None:
        self.call_id = call_id
        self.node_id = stages.node_id
        self.events = EventQueue()
        self.events.room = self._pump_all
        self.epoch = ticket.epoch
        self._request = request
        self._ticket, self._ticket_text = ticket, request.ticket
        self._prompt = prompt
        self._n_vocab = tokenizer.n_vocab
        self._stages = stages
        self._meter = meter
        self._drafting = drafting
        self._inbox: asyncio.Queue[_Ended | _Lost | _Route] = asyncio.Queue(MAX_NOTICES)
        self._fault = ""
        self._parked = False
        self._feeding = False
        room = n_ctx - len(prompt.tokens)
        self._most = min(request.max_tokens, room)
        self._limited_by = "limit" if request.max_tokens <= room else "context"
        self._max_positions = len(prompt.tokens) + self._most
        self._spans: Spans = ()
        self._sums = StageSums()
        self._reused = 0
        self._unreported = 0
        self._log = log.bind(call_id=call_id)
        self._choices = [
            _Choice(
                index,
                TextOut(tokenizer, prompt.stops, show_control=prompt.show_control),
                ended=index in request.ended or bool(request.check and index != request.check_choice),
            )
            for index in range(prompt.choices)
        ]

    # ---------------------------------------------------------------- from outside

    def reroute(self, ticket: Ticket, text: str) -> bool:
        """The tracker names a new route. False when too much waits that the call was told before."""
        return self._tell(_Route(ticket, text))

    def take_result(self, session: str, tokens: Sequence[pb.Token], times: Sequence[pb.StageTime]) -> None:
        """Tokens of one of the call's sessions, of whatever attempt: a draw is the same in all of them."""
        _, _, choice = parse_session(session)
        if choice >= len(self._choices):
            return
        held = self._choices[choice].session
        # A token of an earlier attempt, or one that is told again, answers none of the steps under way.
        if held is not None and held.id == session and tokens:
            self._stages.flow.answered_by_token(held, tokens[-1].position)
        self._take_tokens(self._choices[choice], tokens, times)

    def fault(self, error: str) -> None:
        """Something went wrong in this node while it handled the call's tokens."""
        self._fault = error
        self._tell(_Ended())

    def credit(self, session: Session) -> None:
        """The head's own stage has passed on a step: there is room for another."""
        choice = self._choices[session.choice]
        if choice.session is session:
            self._pump(choice)
            if session.choice == self._first().index and session.computed <= len(self._prompt.tokens):
                self._tell_prefill(session.computed)

    def lost(self, session: Session, node_id: str, code: str, message: str) -> None:
        """A session of the call cannot go on."""
        self._tell(_Lost(session.epoch, node_id, code, message))

    def _tell(self, message: _Ended | _Lost | _Route) -> bool:
        """Leaves a message for the task; False where too many wait already."""
        with contextlib.suppress(asyncio.QueueFull):
            self._inbox.put_nowait(message)
            return True
        return False

    # ---------------------------------------------------------------- the task

    async def run(self) -> None:
        """Runs the call to its end. Cancelling it frees everything on every stage."""
        try:
            await self._run()
        except CallFailed as failed:
            self.events.put(failed.event)
        finally:
            self._close_all()
            self.events.end()

    async def _run(self) -> None:
        self._take_resumed()
        await self._begin()
        while any(not choice.ended for choice in self._choices):
            try:
                async with asyncio.timeout(REROUTE_S if self._parked else None):
                    message = await self._inbox.get()
            except TimeoutError:
                raise CallFailed(503, "route_lost", "no other route was found in time") from None
            if self._fault:
                raise CallFailed(500, "internal", self._fault)
            if isinstance(message, _Route):
                await self._take_route(message)
            elif isinstance(message, _Lost) and message.epoch == self.epoch and not self._parked:
                self._park(message)
        output = sum(len(choice.generated) for choice in self._choices)
        self._tell_stages()
        self.events.put(calls.Done(len(self._prompt.tokens), output, self._reused))

    def _take_resumed(self) -> None:
        """Tokens that an earlier head has streamed count as generated; their text was shown."""
        for choice in self._choices:
            if choice.index < len(self._request.resume):
                for token in self._request.resume[choice.index]:
                    choice.generated.append(token)
                    choice.out.push(token)

    def _first(self) -> _Choice:
        return next((choice for choice in self._choices if not choice.ended), self._choices[0])

    def _live(self) -> list[_Choice]:
        return [choice for choice in self._choices if not choice.ended]

    async def _begin(self) -> None:
        """Opens the first route; several choices share the prompt's computation."""
        live = self._live()
        if not live:
            return
        prompt = len(self._prompt.tokens)
        resumed = self.epoch > 0 or any(choice.generated for choice in live)
        try:
            opening = await self._open(live[0], attach=resumed)
        except (Refused, PeerLost) as error:
            await self._could_not_open(error)
            return
        self._reused = opening.position if not resumed else 0
        self._tell_opened(opening.spans if not resumed else ())
        share = len(live) > 1 and not resumed
        self._plan(live[0], opening.position, replay=resumed, until=prompt - 1 if share else None)
        try:
            others = await asyncio.gather(
                *(self._open(c, attach=resumed, fork_of=live[0] if share else None) for c in live[1:])
            )
        except (Refused, PeerLost) as error:
            await self._could_not_open(error)
            return
        if share:
            self._plan(live[0], prompt - 1, replay=False)
        for choice, opened in zip(live[1:], others, strict=True):
            self._plan(choice, opened.position, replay=resumed)

    async def _open(self, choice: _Choice, *, attach: bool, fork_of: _Choice | None = None) -> Opening:
        stage = self._ticket.stages[0]
        prompt = self._prompt
        choice.planned, choice.drafted = False, 0
        message = pb.Open(
            session=session_id(self.call_id, self.epoch, choice.index),
            ticket=self._ticket_text,
            stage=0,
            fingerprint=self._ticket.fingerprint,
            start_layer=stage.start_layer,
            end_layer=stage.end_layer,
            max_positions=self._max_positions,
            sampling=sampling_to_wire(prompt.sampling),
            tokens=[*prompt.tokens.tolist(), *choice.generated],
            prefix_key=self._request.prefix_key,
            credits=CREDITS,
            attach=attach,
        )
        message.sampling.choice = choice.index
        message.sampling.check.extend(self._request.check)
        if fork_of is not None and fork_of.session is not None:
            message.fork_of, message.fork_position = fork_of.session.id, len(prompt.tokens) - 1
        elif self._request.reuse_prefix and not attach:
            message.reuse_position = len(prompt.tokens) - 1
        opening = await self._stages.begin(message, self)
        choice.session = opening.session
        return opening

    async def _could_not_open(self, error: Refused | PeerLost) -> None:
        """A route that does not stand is a lost one; what the head itself refuses is its own loss."""
        await asyncio.sleep(BLAME_S)
        node_id = error.node_id if isinstance(error, PeerLost) else self.node_id
        notice = _Lost(self.epoch, node_id, error.code, error.message)
        route: _Route | None = None
        while not self._inbox.empty():
            waiting = self._inbox.get_nowait()
            if isinstance(waiting, _Lost) and waiting.epoch == self.epoch:
                notice = waiting
            elif isinstance(waiting, _Route):
                route = waiting
        self._park(notice)
        if route is not None:  # the tracker knew of the loss before; it will not name it again
            self._tell(route)

    def _park(self, notice: _Lost) -> None:
        """Raises CallFailed where another route would say the same."""
        if notice.code == GrammarError.code and self._prompt.sampling.grammar:
            raise CallFailed(400, "grammar_failed", notice.message)
        self._parked = True
        for choice in self._choices:
            choice.pieces.clear()
        self._log.warning("route lost", at=notice.node_id, code=notice.code, reason=notice.message)
        self.events.put(calls.LostNode(notice.node_id, notice.code, notice.message))

    async def _take_route(self, route: _Route) -> None:
        """Opens the call's sessions on a new route; stages that are still there keep theirs."""
        started = time.monotonic()
        if route.ticket.epoch <= self.epoch:
            return
        before = [choice.session for choice in self._choices if choice.session is not None]
        self.epoch, self._ticket, self._ticket_text = route.ticket.epoch, route.ticket, route.text
        self._parked = True
        live = self._live()
        try:
            openings = await asyncio.gather(*(self._open(choice, attach=True) for choice in live))
        except (Refused, PeerLost) as error:
            await self._could_not_open(error)
            return
        finally:
            for session in before:  # those that were taken over are closed already
                if session.epoch < self.epoch:
                    self._stages.discard(session)
        self._parked = False
        self._tell_opened(())
        rows = 0
        for choice, opening in zip(live, openings, strict=True):
            known = len(self._prompt.tokens) + len(choice.generated)
            rows += opening.replay_rows + known - opening.position
            self._plan(choice, opening.position, replay=True)
        self.events.put(calls.Rerouted(self.epoch, rows, (time.monotonic() - started) * 1000))

    # ---------------------------------------------------------------- feeding

    def _plan(self, choice: _Choice, position: int, *, replay: bool, until: int | None = None) -> None:
        """Queues what takes a choice from `position` to all its tokens, or to `until`."""
        assert choice.session is not None
        if choice.ended:  # by tokens that came while its session was opened
            self._stages.discard(choice.session)
            return
        choice.planned = True
        prompt = len(self._prompt.tokens)
        known = prompt + len(choice.generated)
        rows = choice.session.shard.info.replay_rows
        pieces = plan(self._spans, prompt, known, position, rows, replay=replay)
        choice.pieces.extend(piece for piece in pieces if until is None or piece.end <= until)
        self._pump(choice)

    def _pump(self, choice: _Choice) -> None:
        """Feeds what may be fed. Feeding can bring credit at once, so it must not nest."""
        session = choice.session
        if session is None or self._feeding or self.events.full:
            return
        self._feeding = True
        try:
            while choice.pieces and not session.closed and session.pending < session.window:
                piece = choice.pieces.popleft()
                choice.drafted, choice.fed_at = len(piece.drafts), time.monotonic()
                self._stages.flow.feed(
                    session,
                    piece.start,
                    self._tokens(choice, piece),
                    sample=int(piece.sample) + len(piece.drafts),
                    prefill=piece.prefill,
                    replay=piece.replay,
                )
        finally:
            self._feeding = False

    def _pump_all(self) -> None:
        for choice in self._choices:
            self._pump(choice)

    def _tokens(self, choice: _Choice, piece: Piece) -> Tokens:
        prompt = self._prompt.tokens
        if piece.end <= len(prompt):
            return prompt[piece.start : piece.end]
        generated = choice.generated[max(piece.start - len(prompt), 0) : piece.end - len(prompt)]
        own = np.asarray([*generated, *piece.drafts], np.int32)
        return own if piece.start >= len(prompt) else np.concatenate([prompt[piece.start :], own])

    # ---------------------------------------------------------------- tokens

    def _take_tokens(
        self, choice: _Choice, tokens: Sequence[pb.Token], times: Sequence[pb.StageTime]
    ) -> None:
        came, fed_at, drafted = time.monotonic(), choice.fed_at, choice.drafted
        for number, token in enumerate(tokens, 1):
            if choice.ended or token.position != len(self._prompt.tokens) + len(choice.generated):
                continue  # a repeated result
            if not 0 <= token.token < self._n_vocab:
                tail = self._ticket.stages[-1].node_id
                reason = f"the tail sampled token {token.token}, which is not in the vocabulary"
                self._tell(_Lost(self.epoch, tail, "bad_step", reason))
                return
            if self._request.check:
                self._take_weight(choice, token)
            else:
                self._take_token(choice, token, last=number == len(tokens))
        if choice.session is None or not times:
            return
        self._sums.add(times, self._ticket.stages, drafted=drafted > 0)
        wall_ms = (came - fed_at) * 1000
        # The next step, which was fed just now, leaves before the figures are looked at.
        asyncio.get_running_loop().call_soon(
            self._note_times, choice, choice.session, times, wall_ms, 1 + drafted
        )

    def _note_times(
        self, choice: _Choice, session: Session, times: Sequence[pb.StageTime], wall_ms: float, rows: int
    ) -> None:
        self._note_pace(choice, session, times, wall_ms, rows)
        pipeline = self._meter.note(session.lane, times, self._stages.executor.costs)
        if pipeline is not None:
            self._stages.executor.observe(session.lane, pipeline)

    def _take_weight(self, choice: _Choice, token: pb.Token) -> None:
        """The next token of the answer that is checked; it stands whatever was drawn."""
        check, weight = self._request.check, token.weight
        if not token.HasField("weight"):
            tail = self._ticket.stages[-1].node_id
            self._tell(_Lost(self.epoch, tail, "bad_step", "the tail weighs no tokens"))
            return
        given = check[len(choice.generated)]
        choice.generated.append(given)
        row = calls.WeighedToken(given, weight.logit, weight.max_logit, token.token, weight.kept)
        self.events.put(calls.Weighed((row,)))
        if len(choice.generated) < len(check):
            self._plan_next(choice)
            return
        choice.ended = True
        assert choice.session is not None
        self._stages.discard(choice.session)
        self._tell(_Ended())

    def _plan_next(self, choice: _Choice, drafts: tuple[int, ...] = ()) -> None:
        """Feeds the newest token, unless what takes the session up to it is still to be planned."""
        if choice.planned and not self._parked:
            known = len(self._prompt.tokens) + len(choice.generated)
            choice.pieces.append(Piece(known - 1, known, False, False, True, drafts))
            self._pump(choice)

    def _guess(self, choice: _Choice) -> tuple[int, ...]:
        """Drafts for what follows the newest token, where the links make them pay."""
        session, pace = choice.session, choice.pace
        if session is None or not pace.scale or session.shard.info.recurrent:
            return ()
        costs = self._stages.executor.costs(session.lane)
        if costs is None or not self._drafting.far(pace, costs.decode_ms):
            return ()
        if choice.lookup is None:
            choice.lookup = Lookup([*self._prompt.tokens.tolist(), *choice.generated])
        room = min(MOST_DRAFTS, self._most - len(choice.generated) - 1, MAX_DECODE_ROWS // pace.batch - 1)
        drafts = choice.lookup.draft(room)
        return drafts[: self._drafting.length(pace, costs.decode_ms, len(drafts))]

    def _note_pace(
        self, choice: _Choice, session: Session, times: Sequence[pb.StageTime], wall_ms: float, rows: int
    ) -> None:
        """What a step of one token, or of that and its drafts, took on its way round."""
        costs = self._stages.executor.costs(session.lane)
        if costs is None or any(line.steps != 1 or line.rows != rows for line in times):
            return
        compute = sum(line.compute_ms for line in times)
        trip = wall_ms - compute - sum(line.queue_ms for line in times)
        batch = max(1, *(line.batch for line in times))
        choice.pace = choice.pace.after(trip, compute, batch, costs.decode_ms(times[0].batch * rows))

    def _take_token(self, choice: _Choice, token: pb.Token, *, last: bool) -> None:
        """One token of a result; the last is fed, the others were fed as drafts where the step had any."""
        if token.end:
            self._end(choice, "grammar" if self._prompt.sampling.grammar else "eos", token.token)
            return
        choice.generated.append(token.token)
        # Only a stop string needs the text before the next step may leave.
        shown = choice.out.push(token.token) if self._prompt.stops else None
        if choice.lookup is not None and (hit := choice.lookup.push(token.token)) is not None:
            choice.pace = choice.pace.guessed(hit)
        stopped = shown is not None and shown.stopped
        ended = stopped or len(choice.generated) >= self._most
        if not ended and (last or not choice.drafted):
            self._plan_next(choice, self._guess(choice) if last else ())
        shown = shown or choice.out.push(token.token)
        wanted = self._prompt.sampling.logprobs >= 0
        lp = (choice.out.logprob(token),) if wanted else ()
        self.events.put(calls.TokenEvent(choice.index, (token.token,), shown.text, lp))
        self._unreported += 1
        if self._unreported >= STAGES_EVERY:
            self._tell_stages()
        if ended:
            self._end(choice, "stop_string" if stopped else self._limited_by)

    def _end(self, choice: _Choice, by: str, token: int = -1) -> None:
        choice.ended = True
        choice.pieces.clear()
        session = choice.session
        if session is not None:
            keep = choice.index == 0 and self._request.reuse_prefix
            self._stages.close(session.name, keep, self._session_spans(session))
        text = "" if by == "stop_string" else choice.out.flush()
        self.events.put(calls.ChoiceEnd(choice.index, REASONS[by], by, text, token))
        if not self._live():
            self._tell(_Ended())

    def _session_spans(self, session: Session) -> Spans:
        prompt, rows = len(self._prompt.tokens), session.shard.info.replay_rows
        return (*self._spans, *generated_spans(prompt, session.computed, rows))

    def _close_all(self) -> None:
        for choice in self._choices:
            if choice.session is not None:
                self._stages.discard(choice.session)

    # ---------------------------------------------------------------- telling

    def _tell_opened(self, reused: Spans) -> None:
        """Settles how the prompt is cut, once, and says so."""
        if self._spans:
            return
        prompt = len(self._prompt.tokens)
        self._spans = self._request.spans or prompt_spans(
            reused, self._reused, prompt, self._request.prompt_chunk, last_alone=len(self._choices) > 1
        )
        self.events.put(calls.Opened(prompt, self._reused, self._spans))

    def _tell_prefill(self, done: int) -> None:
        self.events.put(calls.Prefill(done, len(self._prompt.tokens)))

    def _tell_stages(self) -> None:
        self._unreported = 0
        self.events.put(self._sums.event())
