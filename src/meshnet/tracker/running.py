"""One running call: carries out what its state machine asks for, with real sockets and clocks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from meshnet.protocol.calls import AnyEvent, CallError, Done, GenerateCall, LostNode, Reroute
from meshnet.tracker import calls
from meshnet.tracker.attempt import Attempt, Disturbed, Silent
from meshnet.tracker.client import Client, StalledReader
from meshnet.tracker.gathering import BadEvent, Gathered
from meshnet.tracker.heads import HeadError, Heads
from meshnet.tracker.jobs import Chosen, NoPlace
from meshnet.tracker.live import LiveCall
from meshnet.tracker.patience import begun
from meshnet.tracker.placement import Placement
from meshnet.tracker.recorder import Recorder
from meshnet.tracker.results import Result, as_error
from meshnet.tracker.roster import Roster
from meshnet.tracker.seat import Order, Seat
from meshnet.tracker.settings import TrackerSettings
from meshnet.tracker.signing import Signer

REPAIR_PAUSE_S = 0.05
BUSY_PAUSE_S = 0.25
AGAIN_PAUSE_S = 0.5
FOREVER_S = 1e9

log = structlog.get_logger("meshnet.calls")


class Surroundings(Protocol):
    """What a running call needs of the tracker."""

    settings: TrackerSettings
    roster: Roster
    placement: Placement
    heads: Heads
    recorder: Recorder
    signer: Signer

    async def settle(self, run: Run, result: Result) -> None:
        """Writes the end into the books, before the client sees it."""


@dataclass(slots=True)
class Run:
    """Drives one call in the task that calls `go`."""

    tracker: Surroundings
    order: Order
    live: LiveCall
    client: Client
    state: calls.State
    seat: Seat
    gathered: Gathered
    attempt: Attempt | None = None
    lost_why: str = ""
    _task: asyncio.Task[Any] | None = None
    _interrupt: calls.Cancelled | None = None
    _gone: dict[str, str] = field(default_factory=dict)
    _finishing: bool = False
    _limit: asyncio.TimerHandle | None = None
    _untold: Chosen | None = None

    # ------------------------------------------------------------ from outside

    def cancel(self, why: calls.Cancelled) -> bool:
        """Ends the call now. False when it has ended already, or is about to."""
        if self._finishing or self._interrupt is not None or self.state.ended:
            return False
        self._interrupt = why
        if self._task is not None:
            self._task.cancel()
        return True

    def node_gone(self, node_id: str, reason: str) -> None:
        """The mesh lost a node of the route, perhaps before the head has noticed."""
        if node_id in self.state.nodes and not self._finishing:
            self._gone[node_id] = reason
            if self.attempt is not None:
                self.attempt.disturb()

    # ------------------------------------------------------------ the loop

    async def go(self) -> Result:
        """Runs the call to its end. Only a cancellation from outside `cancel` is raised."""
        self._task = asyncio.current_task()
        structlog.contextvars.bind_contextvars(call_id=self.order.call_id)
        try:
            try:
                end = await self._drive()
            except StalledReader as stalled:
                end = self._end(calls.Cancelled("stalled_reader", str(stalled)))
            except asyncio.CancelledError:
                return await self._interrupted()
            except Exception as error:
                log.exception("a call ran into a fault of the tracker", call_id=self.order.call_id)
                message = f"the tracker ran into a fault: {type(error).__name__}"
                end = self._end(calls.Cancelled("internal_error", message, failed_with=500))
            return await self._finish(end)
        finally:
            if self._limit is not None:
                self._limit.cancel()
            self._let_go()

    def _limit_time(self) -> None:
        """For the first time that the call waits for something; until then it takes no time worth a timer."""
        if self._limit is None:
            seconds = self.tracker.settings.call_limit_s
            too_long = calls.Cancelled("call_limit", f"a call may take {seconds:g} s", failed_with=504)
            self._limit = asyncio.get_running_loop().call_later(seconds, self.cancel, too_long)

    async def _interrupted(self) -> Result:
        wanted = self._interrupt is not None
        shutdown = calls.Cancelled("shutdown", "the tracker shuts down", failed_with=503)
        end = self._end(self._interrupt or shutdown)
        if wanted and self._task is not None:
            self._task.uncancel()
        result = await self._finish(end)
        if not wanted:
            raise asyncio.CancelledError
        return result

    async def _drive(self) -> calls.End:
        pending: deque[calls.Effect] = deque([calls.Place(frozenset())])
        while True:
            effect = pending.popleft()
            if isinstance(effect, calls.End):
                return effect
            pending.extend(self._step(await self._carry_out(effect)))

    def _step(self, event: calls.Event) -> tuple[calls.Effect, ...]:
        self.state, effects = calls.step(self.state, event)
        self.live.phase = self.state.phase
        return effects

    def _end(self, event: calls.Cancelled) -> calls.End:
        found = [effect for effect in self._step(event) if isinstance(effect, calls.End)]
        return found[0] if found else calls.End("failed", 500, event.code, event.message)

    async def _carry_out(self, effect: calls.Effect) -> calls.Event:
        match effect:
            case calls.Place():
                if effect.again:
                    await asyncio.sleep(AGAIN_PAUSE_S)
                return await self._place(effect.without, effect.avoid)
            case calls.Repair():
                return await self._repair(effect)
            case calls.GoOn():
                return await self._consume()
            case calls.Open():
                return await self._open()
            case calls.Reroute():
                return await self._reroute()
            case calls.UseFallback():
                return await self._use_fallback()
            case calls.End():
                raise AssertionError("the end is not carried out")

    # ------------------------------------------------------------ routes

    async def _place(self, without: frozenset[str], avoid: frozenset[str] = frozenset()) -> calls.Event:
        """A route for the whole model. `avoid` is passed over first, then waited for."""
        self._drop_attempt()
        failed = self.state.head
        try:
            try:
                chosen = await self._find(without | avoid)
            except NoPlace as error:
                if not avoid or error.code != "no_route":
                    raise
                await asyncio.sleep(BUSY_PAUSE_S)
                chosen = await self._find(without)
        except NoPlace as error:
            return calls.NoPlace(error.status, error.code, error.message)
        self._chose(chosen, failed if self.state.repairing else "")
        return calls.Placed(tuple(stage.node_id for stage in chosen.stages))

    async def _find(self, without: frozenset[str]) -> Chosen:
        urgent = self.state.repairing

        def waits() -> None:
            self._limit_time()
            if not urgent:
                self._step(calls.Queued())

        async def keep_alive(position: str) -> None:
            await self.client.keep_alive("queued", position)

        return await self.seat.find(without, urgent=urgent, waits=waits, keep_alive=keep_alive)

    async def _repair(self, wanted: calls.Repair) -> calls.Event:
        """Substitutes for lost nodes; the head goes on where it stays the head."""
        lost = self.seat.chosen
        assert lost is not None
        culprit = next(s.node_id for s in lost.stages if s.node_id in wanted.lost)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.tracker.settings.park_s
        avoid = wanted.avoid
        while True:
            try:
                chosen = self.seat.substitutes(wanted.lost, wanted.without | avoid, culprit)
                break
            except NoPlace as error:
                if (not error.retry_after and not avoid) or loop.time() >= deadline:
                    # No substitute beside this head: perhaps another head has a whole route.
                    return await self._place(wanted.without)
            await asyncio.sleep(BUSY_PAUSE_S if avoid else REPAIR_PAUSE_S)
            avoid = frozenset()
            if self.state.head in self._gone:
                return self._head_failed("lost", self._gone.pop(self.state.head))
        same = chosen.stages[0].node_id == lost.stages[0].node_id
        self._chose(chosen, culprit)
        return calls.Placed(tuple(stage.node_id for stage in chosen.stages), same_head=same)

    def _chose(self, chosen: Chosen, failed: str) -> None:
        """`failed` names the node whose loss made another route necessary; empty for the first one."""
        recorder, live = self.tracker.recorder, self.live
        before = self.seat.chosen
        if self.seat.take(chosen):
            live.numerics_changed = True
        self._gone.clear()
        live.stages = chosen.stages
        live.stage_times = ()
        if failed and before is not None:
            self.client.sink.route(recorder.route(chosen.stages))
            live.reroutes += 1
            recorder.rerouted(live, before.stages, failed, self.lost_why or "it failed", chosen.reason)
            # Whoever is passed by may be alive, and cut off from those who would tell it so.
            passed = {s.node_id for s in before.stages} - {s.node_id for s in chosen.stages}
            self.tracker.roster.end_call(passed, self.order.call_id, self.state.epoch + 1)
        else:
            self._untold = chosen

    def _tell_route(self) -> None:
        """Tells of a first route."""
        chosen, self._untold = self._untold, None
        if chosen is not None:
            recorder = self.tracker.recorder
            self.client.sink.route(recorder.route(chosen.stages))
            recorder.route_selected(self.live, chosen.reason, dict(chosen.view.addresses))

    async def _use_fallback(self) -> calls.Event:
        fallback = self.order.fallback
        assert fallback is not None
        self.seat.model = self.live.model = fallback
        self.seat.chosen = None
        self.live.degraded = True
        self.live.note("degraded", model=fallback)
        self.client.sink.use_model(fallback)
        self.gathered.forget()
        return await self._place(frozenset())

    # ------------------------------------------------------------ the head

    def _sign(self) -> str:
        assert self.seat.chosen is not None
        call_id, model, chosen = self.order.call_id, self.seat.model, self.seat.chosen
        if self.state.epoch == 0:
            return self.tracker.signer.first(call_id, model, chosen, self.order.ready)
        return self.tracker.signer.sign(call_id, model, self.state.epoch, chosen)

    async def _open(self) -> calls.Event:
        order, gathered = self.order, self.gathered
        gathered.attempt += 1
        node = self.tracker.roster.state.nodes.get(self.state.head)
        if node is None or not node.connected:
            self._tell_route()
            return self._head_failed("lost", "it left the mesh")
        self.attempt = Attempt(self.tracker.heads, node.way)
        request = GenerateCall(
            call_id=order.call_id,
            epoch=self.state.epoch,
            kind=order.kind,
            model=self.seat.model,
            request=order.request,
            ticket=self._sign(),
            seed=order.seed,
            max_tokens=order.max_tokens,
            prefix_key=order.prefix_key,
            resume=gathered.resume(),
            ended=tuple(sorted(gathered.ends)),
            spans=gathered.spans,
        )
        try:
            try:
                opening = begun(self.attempt.open(request, self.tracker.settings.first_event_s))
            finally:
                # The head has the request: now is time for what that need not wait for.
                self._limit_time()
                self._tell_route()
                self.client.sink.prepare()
            await opening
        except (Silent, Disturbed, HeadError) as error:
            return self._attempt_failed(error)
        self._step(calls.Connected())
        self.tracker.recorder.connected(self.live)
        return await self._consume()

    async def _reroute(self) -> calls.Event:
        assert self.attempt is not None
        request = Reroute(
            epoch=self.state.epoch, ticket=self._sign(), failed=tuple(sorted(self.state.excluded))
        )
        try:
            await self.attempt.reroute(self.order.call_id, request, self.tracker.settings.first_event_s)
        except (Silent, Disturbed) as error:
            return self._attempt_failed(error)
        except HeadError as error:
            return self._head_failed(error.code, error.message)
        return await self._consume()

    async def _consume(self) -> calls.Event:
        """Reads the head's events until something happens that the state machine decides on."""
        attempt = self.attempt
        assert attempt is not None
        keepalive_s, silence_s = self.tracker.settings.keepalive_s, self.tracker.settings.head_silence_s
        clock = asyncio.get_running_loop().time
        tell_at = clock() + keepalive_s
        while True:
            at_most_s = FOREVER_S
            if not self.client.sink.started:
                at_most_s = tell_at - clock()
                if at_most_s <= 0:
                    progress = f"{self.live.prefill_done}/{self.live.prompt_tokens}"
                    await self.client.keep_alive("prefill", progress)
                    tell_at, at_most_s = clock() + keepalive_s, keepalive_s
            try:
                events = await attempt.read(silence_s, at_most_s)
            except Disturbed:
                decision = self._lost_in_mesh()
                if decision is not None:
                    return decision
                continue
            except (Silent, HeadError) as error:
                return self._attempt_failed(error)
            if not events:
                if events is not None:
                    attempt.heard()
                continue
            try:
                counted, fresh, final = self.gathered.take(events, self.live)
            except BadEvent as error:
                return self._head_failed("bad_event", str(error))
            # The client first; what is told of the call can wait for that.
            unsent = self.client.begin(events[:counted]) if counted else None
            self._count(fresh)
            if unsent is not None:
                await unsent
            if final is not None:
                return self._decide(final)
            attempt.heard()

    def _attempt_failed(self, error: Silent | Disturbed | HeadError) -> calls.Event:
        head = self.state.head
        if head in self._gone:
            return self._head_failed("lost", self._gone.pop(head))
        match error:
            case Silent():
                return self._head_failed("deadline", str(error))
            case Disturbed():
                return self._head_failed("lost", "a node of the route was lost while it was opened")
            case HeadError():
                return self._refusal(error)

    def _lost_in_mesh(self) -> calls.Event | None:
        """What to do about nodes that the mesh has lost: a head is left, others only if replaceable."""
        head = self.state.head
        if head in self._gone:
            return self._head_failed("lost", self._gone.pop(head))
        if not self._gone:
            return None
        node_id, reason = self._gone.popitem()
        try:
            failed = self.state.excluded | {node_id}
            self.seat.substitutes(frozenset({node_id}), failed, node_id, ask_only=True)
        except NoPlace:
            # It may be the tracker alone that lost it: while the head says nothing, the call goes on.
            return None
        return self._node_lost(node_id, "lost", reason)

    def _count(self, fresh: int) -> None:
        live, recorder = self.live, self.tracker.recorder
        now = time.monotonic()
        if fresh:
            if live.first_token_at is None:
                live.first_token_at = now
                recorder.first_token(live)
            elif live.last_token_at is not None:
                recorder.gap(live, (now - live.last_token_at) / fresh)
            live.output_tokens += fresh
            live.last_token_at = now
            if self.state.phase != "generating" or self.state.repairing:
                self._step(calls.TokensCame(self.client.sink.shows))
                recorder.changed(live)
        elif self.state.phase == "connected" and live.prompt_tokens:
            self._step(calls.PrefillBegan())
            recorder.changed(live)
        recorder.progress(live, now)

    def _decide(self, final: AnyEvent) -> calls.Event:
        match final:
            case Done():
                return calls.Finished()
            case LostNode():
                return self._node_lost(final.node_id, final.code, final.message)
            case CallError():
                return self._refusal(HeadError(final.status, final.code, final.message, final.param))
            case _:
                raise AssertionError(final)

    def _node_lost(self, node_id: str, code: str, message: str) -> calls.Event:
        if node_id in self.state.nodes:
            self.lost_why = message or code
            self.live.note("lost", node_id=node_id, code=code, message=message)
        return calls.NodeLost(node_id, code, message)

    def _head_failed(self, code: str, message: str) -> calls.Event:
        self.lost_why = message
        self.live.note("lost", node_id=self.state.head, code=code, message=message)
        return calls.HeadFailed(code, message)

    def _refusal(self, error: HeadError) -> calls.Event:
        """The request's fault (4xx), or the node's."""
        if error.status in (400, 413, 422):
            return calls.Refused(400, error.code, error.message, error.param)
        return self._head_failed(error.code, error.message)

    # ------------------------------------------------------------ the end

    async def _finish(self, end: calls.End) -> Result:
        """Gives everything back, settles, then lets the client see the end."""
        self._finishing = True
        live, recorder = self.live, self.tracker.recorder
        if end.outcome == "complete" and self.attempt is not None:
            self.attempt.finish()
        self._let_go()
        if end.outcome != "complete" or live.reroutes:
            self.tracker.roster.end_call(self.seat.numerics, self.order.call_id)
        live.phase = self.state.phase
        if end.outcome == "complete":
            reasons = {ended.reason for ended in self.gathered.ends.values()}
            live.finish_reason = reasons.pop() if len(reasons) == 1 else "mixed"
        result = Result(end, self.seat.model, self.gathered, self.seat.chosen, self.seat.numerics)
        recorder.progress(live, time.monotonic(), force=live.output_tokens > 0)
        recorder.ended(live, end)
        await self.tracker.settle(self, result)
        if end.outcome == "complete":
            done = Done(live.prompt_tokens, live.output_tokens, live.reused_tokens)
            await self.client.last([done])
        elif end.code != "client_gone":
            retry = self.tracker.placement.retry_after() if end.status in (429, 503) else None
            await self.client.fail(as_error(end, retry))
        return result

    def _drop_attempt(self) -> None:
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.close()

    def _let_go(self) -> None:
        """Frees slots, room and the way to the head. Safe to call twice."""
        self._drop_attempt()
        self.seat.give_up()
