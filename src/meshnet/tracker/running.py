"""One running call: carries out what its state machine asks for, with real sockets and clocks."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from meshnet.protocol.calls import (
    AnyEvent,
    CallError,
    ChoiceEnd,
    Done,
    GenerateCall,
    LostNode,
    Opened,
    Prefill,
    Reroute,
    Rerouted,
    Stages,
    StageTimes,
    TokenEvent,
)
from meshnet.protocol.errors import ApiError
from meshnet.routing import RoutingRequest, Stage
from meshnet.tracker import calls
from meshnet.tracker.heads import HeadError, Heads, HeadStream
from meshnet.tracker.live import LiveCall
from meshnet.tracker.placement import Chosen, Job, NoPlace, Placement
from meshnet.tracker.planning import View
from meshnet.tracker.recorder import Recorder
from meshnet.tracker.reservations import Need
from meshnet.tracker.roster import Roster
from meshnet.tracker.settings import TrackerSettings
from meshnet.tracker.sinks import Sink

REPAIR_PAUSE_S = 0.05
MARGIN_S = 2.0
"""Beyond the deadline of a node's own: the head is to report a wedged peer before it is blamed itself."""

log = structlog.get_logger("meshnet.calls")


@dataclass(frozen=True, slots=True)
class Order:
    """An accepted call: what is to be run, for whom, within which limits."""

    call_id: str
    kind: str
    model: str
    key: str
    request: dict[str, Any]
    n: int
    seed: int
    max_tokens: int
    prompt_tokens: int
    """As counted, or as estimated before any node has seen the prompt."""
    prefix_key: str
    forced: tuple[str, ...] = ()
    fallback: str | None = None
    reuse_prefix: bool = True


@dataclass(slots=True)
class Result:
    """What came of a call, for the books, the statistics and the checks."""

    end: calls.End
    prompt_tokens: int
    ids: list[list[int]]
    ends: dict[int, ChoiceEnd]
    work: dict[tuple[int, str, int, int], StageTimes]
    """Latest sums by (attempt, node, layers): an attempt begins with each new head."""
    stages: tuple[Stage, ...]
    view: View | None
    reroutes: int
    model: str


class Surroundings(Protocol):
    """What a running call needs of the tracker."""

    settings: TrackerSettings
    roster: Roster
    placement: Placement
    heads: Heads
    recorder: Recorder

    def ticket(self, order: Order, model: str, epoch: int, chosen: Chosen) -> str: ...

    async def settle(self, run: Run, result: Result) -> None:
        """Writes the end into the books, before the client sees it."""


@dataclass(slots=True)
class Run:
    """Drives one call in the task that calls `go`."""

    tracker: Surroundings
    order: Order
    live: LiveCall
    sink: Sink
    state: calls.State
    model: str
    ids: list[list[int]] = field(default_factory=list)
    ends: dict[int, ChoiceEnd] = field(default_factory=dict)
    work: dict[tuple[int, str, int, int], StageTimes] = field(default_factory=dict)
    chosen: Chosen | None = None
    stream: HeadStream | None = None
    attempt: int = 0
    lost_why: str = ""
    numerics: dict[str, str] = field(default_factory=dict)
    _task: asyncio.Task[Any] | None = None
    _scope: asyncio.Timeout | None = None
    _interrupt: calls.Cancelled | None = None
    _head_gone: str = ""
    _finishing: bool = False
    _heard_at: float = 0.0

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
        """The mesh lost a node. Only the head's loss is acted on at once: it reports the others itself."""
        if node_id == self.state.head and not self._finishing:
            self._head_gone = reason
            if self._scope is not None and not self._scope.expired():
                self._scope.reschedule(asyncio.get_running_loop().time())

    # ------------------------------------------------------------ the loop

    async def go(self) -> Result:
        """Runs the call to its end. Only a cancellation from outside `cancel` is raised."""
        self._task = asyncio.current_task()
        settings = self.tracker.settings
        self.ids = [[] for _ in range(self.order.n)]
        limit = asyncio.get_running_loop().call_later(
            settings.call_limit_s,
            self.cancel,
            calls.Cancelled("call_limit", f"a call may take {settings.call_limit_s:g} s", failed_with=504),
        )
        try:
            try:
                end = await self._drive()
            except asyncio.CancelledError:
                interrupted = self._interrupt is not None
                why = self._interrupt or calls.Cancelled(
                    "shutdown", "the tracker shuts down", failed_with=503
                )
                end = self._take(why)
                if interrupted and self._task is not None:
                    self._task.uncancel()
                result = await self._finish(end)
                if not interrupted:
                    raise
                return result
            except Exception as error:
                log.exception("a call ran into a fault of the tracker", call_id=self.order.call_id)
                end = self._take(
                    calls.Cancelled(
                        "internal_error",
                        f"the tracker ran into a fault: {type(error).__name__}",
                        failed_with=500,
                    )
                )
            return await self._finish(end)
        finally:
            limit.cancel()
            self._let_go()

    async def _drive(self) -> calls.End:
        pending: deque[calls.Effect] = deque([calls.Place(frozenset())])
        while True:
            effect = pending.popleft()
            if isinstance(effect, calls.End):
                return effect
            event = await self._carry_out(effect)
            if event is not None:
                pending.extend(self._step(event))

    def _step(self, event: calls.Event) -> tuple[calls.Effect, ...]:
        self.state, effects = calls.step(self.state, event)
        self.live.phase = self.state.phase
        return effects

    def _take(self, event: calls.Cancelled) -> calls.End:
        for effect in self._step(event):
            if isinstance(effect, calls.End):
                return effect
        return calls.End("failed", 500, event.code, event.message)

    async def _carry_out(self, effect: calls.Effect) -> calls.Event | None:
        match effect:
            case calls.Place():
                return await self._place(effect.without)
            case calls.Repair():
                return await self._repair(effect.without)
            case calls.Open():
                return await self._open()
            case calls.Reroute():
                return await self._reroute()
            case calls.UseFallback():
                return await self._use_fallback()
            case calls.End():
                return None

    # ------------------------------------------------------------ routes

    def _job(self, without: frozenset[str], *, urgent: bool) -> Job:
        order = self.order
        positions = order.prompt_tokens + order.max_tokens
        views = self.tracker.placement.views(self.model)
        if views:
            positions = min(positions, min(view.n_ctx for view in views))
        return Job(
            call_id=order.call_id,
            key=order.key,
            model=self.model,
            need=Need(order.n, order.n * positions),
            request=RoutingRequest(None, order.prompt_tokens, max(1, order.max_tokens)),
            excluded=dict.fromkeys(without, "failed this call"),
            forced=order.forced if not urgent else (),
            urgent=urgent,
        )

    async def _place(self, without: frozenset[str]) -> calls.Event:
        """A route for the whole model, waited for in turn."""
        placement, settings = self.tracker.placement, self.tracker.settings
        before, self.stream = self.stream, None
        if before is not None:
            before.close()
        urgent = self.state.repairing
        lost, failed = self.chosen, self.state.head
        if urgent:
            # What the call held on the failed route is given back; it goes to the front of the queue.
            placement.release(self.order.call_id)
        loop = asyncio.get_running_loop()
        longest = settings.park_s if urgent else settings.queue_wait_s
        deadline = loop.time() + longest
        future = placement.submit(self._job(without, urgent=urgent))
        if not future.done() and not urgent:
            self._step(calls.Queued())
        while not future.done():
            position = placement.position(self.order.call_id)
            self.tracker.recorder.queued(self.live, position)
            left = deadline - loop.time()
            if left <= 0:
                placement.release(self.order.call_id)
                message = f"no room within {longest:.0f} s; the mesh is busy"
                return calls.NoPlace(503, "queue_timeout", message)
            await asyncio.wait({future}, timeout=min(left, settings.keepalive_s, 1.0))
            if not future.done():
                await self._keep_alive("queued", f"position {position}")
        try:
            chosen = future.result()
        except NoPlace as error:
            return calls.NoPlace(error.status, error.code, error.message)
        self._chose(chosen, lost if urgent else None, failed)
        return calls.Placed(tuple(stage.node_id for stage in chosen.stages))

    async def _repair(self, failed: frozenset[str]) -> calls.Event:
        """Substitutes for failed nodes; the head goes on where it stays the head."""
        placement, settings = self.tracker.placement, self.tracker.settings
        assert self.chosen is not None
        lost = self.chosen
        culprit = next(s.node_id for s in lost.stages if s.node_id in failed)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + settings.park_s
        job = self._job(failed, urgent=True)
        while True:
            try:
                chosen = placement.repair(
                    job,
                    lost.stages,
                    failed,
                    self.numerics.get(culprit, ""),
                    lost.view.engine_version,
                )
                break
            except NoPlace as error:
                if not error.retry_after or loop.time() >= deadline:
                    # No substitute beside this head: perhaps another head has a whole route.
                    return await self._place(failed)
            await asyncio.sleep(REPAIR_PAUSE_S)
            if self._head_gone:
                return calls.HeadFailed("lost", self._head_gone)
        same = chosen.stages[0].node_id == lost.stages[0].node_id
        self._chose(chosen, lost, culprit)
        return calls.Placed(tuple(stage.node_id for stage in chosen.stages), same_head=same)

    def _chose(self, chosen: Chosen, before: Chosen | None, failed: str) -> None:
        if before is not None:
            if self._numerics_differ(before, chosen):
                self.live.numerics_changed = True
            self.live.reroutes += 1
        self.chosen = chosen
        self.live.stages = chosen.stages
        self.live.stage_times = ()
        self.numerics.update({s.node_id: chosen.view.numerics[s.node_id] for s in chosen.stages})
        self.sink.route(self.tracker.recorder.route(chosen.stages))
        if before is not None:
            why = self.lost_why or "it failed"
            self.tracker.recorder.rerouted(self.live, before.stages, failed, why, chosen.reason)
        else:
            self.tracker.recorder.route_selected(self.live, chosen.reason, dict(chosen.view.addresses))

    def _numerics_differ(self, before: Chosen, after: Chosen) -> bool:
        """True when some layer now runs in another numerics class than it did."""
        old = {layer: self.numerics[s.node_id] for s in before.stages for layer in _layers(s)}
        new = {layer: after.view.numerics[s.node_id] for s in after.stages for layer in _layers(s)}
        return any(new.get(layer) != numerics for layer, numerics in old.items())

    async def _use_fallback(self) -> calls.Event:
        fallback = self.order.fallback
        assert fallback is not None
        self.model = fallback
        self.live.model = fallback
        self.live.degraded = True
        self.live.note("degraded", model=fallback)
        self.sink.use_model(fallback)
        self.ids = [[] for _ in range(self.order.n)]
        self.ends.clear()
        self.chosen = None
        return await self._place(frozenset())

    # ------------------------------------------------------------ the head

    async def _open(self) -> calls.Event:
        assert self.chosen is not None
        order, chosen = self.order, self.chosen
        self.attempt += 1
        self._head_gone = ""
        node = self.tracker.roster.state.nodes.get(chosen.stages[0].node_id)
        if node is None or not node.connected:
            return self._head_failed("lost", node.lost_reason if node is not None else "it left the mesh")
        request = GenerateCall(
            call_id=order.call_id,
            epoch=self.state.epoch,
            kind=order.kind,
            model=self.model,
            request=order.request,
            ticket=self.tracker.ticket(order, self.model, self.state.epoch, chosen),
            seed=order.seed,
            max_tokens=order.max_tokens,
            prefix_key=order.prefix_key,
            resume=tuple(tuple(ids) for ids in self.ids) if any(self.ids) else (),
            reuse_prefix=order.reuse_prefix,
            ended=tuple(sorted(self.ends)),
        )
        try:
            async with asyncio.timeout(self.tracker.settings.first_event_s) as self._scope:
                self.stream = await self.tracker.heads.open(node.http_url, request)
        except TimeoutError:
            return self._silent(self.tracker.settings.first_event_s)
        except HeadError as error:
            return self._refusal(error)
        finally:
            self._scope = None
        self._step(calls.Connected())
        self.tracker.recorder.connected(self.live)
        return await self._consume()

    async def _reroute(self) -> calls.Event:
        assert self.chosen is not None
        order, chosen = self.order, self.chosen
        node = self.tracker.roster.state.nodes.get(chosen.stages[0].node_id)
        if node is None or not node.connected:
            return self._head_failed("lost", "it left the mesh")
        request = Reroute(
            epoch=self.state.epoch,
            ticket=self.tracker.ticket(order, self.model, self.state.epoch, chosen),
            failed=tuple(sorted(self.state.excluded)),
        )
        try:
            async with asyncio.timeout(self.tracker.settings.first_event_s) as self._scope:
                await self.tracker.heads.reroute(node.http_url, order.call_id, request)
        except TimeoutError:
            return self._silent(self.tracker.settings.first_event_s)
        except HeadError as error:
            return self._head_failed(error.code, error.message)
        finally:
            self._scope = None
        return await self._consume()

    async def _consume(self) -> calls.Event:
        """Reads the head's events until something happens that the state machine decides on."""
        assert self.stream is not None
        loop = asyncio.get_running_loop()
        keepalive_s = self.tracker.settings.keepalive_s
        self._heard_at = loop.time()
        while True:
            quiet = self._patience() - (loop.time() - self._heard_at)
            quiet = quiet if self.sink.started else min(quiet, keepalive_s)
            try:
                async with asyncio.timeout(quiet) as self._scope:
                    events = await self.stream.read()
            except TimeoutError:
                if self._head_gone or loop.time() - self._heard_at >= self._patience():
                    return self._silent(self._patience())
                await self._keep_alive("prefill", f"{self.live.prefill_done}/{self.live.prompt_tokens}")
                continue
            except HeadError as error:
                return self._head_failed(error.code, self._head_gone or error.message)
            finally:
                self._scope = None
            if not events:
                return self._head_failed("unreachable", "it ended its stream before the call's end")
            fate = self._absorb(events)
            if fate is not None:
                events = events[: fate[0]]
            if events:
                await self._emit(events)
            if fate is not None:
                return fate[1]
            self._heard_at = loop.time()

    def _absorb(self, events: Sequence[AnyEvent]) -> tuple[int, calls.Event] | None:
        """Counts what came; (index, event) where something must be decided."""
        live = self.live
        now = time.monotonic()
        fresh = 0
        for index, event in enumerate(events):
            if type(event) is TokenEvent:
                if not 0 <= event.c < self.order.n:
                    return index, self._head_failed("bad_event", f"it sent tokens of a choice {event.c}")
                self.ids[event.c].extend(event.ids)
                fresh += len(event.ids)
            elif isinstance(event, ChoiceEnd):
                if not 0 <= event.c < self.order.n:
                    return index, self._head_failed("bad_event", f"it ended a choice {event.c}")
                self.ends[event.c] = event
            elif isinstance(event, Done):
                self._count(fresh, now)
                if len(self.ends) < self.order.n:
                    return index, self._head_failed("bad_event", "it was done before every choice had ended")
                return index, calls.Finished()
            else:
                decision = self._other(event)
                if decision is not None:
                    self._count(fresh, now)
                    return index, decision
        self._count(fresh, now)
        live.phase = self.state.phase
        return None

    def _count(self, fresh: int, now: float) -> None:
        live = self.live
        if fresh:
            if live.first_token_at is None:
                live.first_token_at = now
                self.tracker.recorder.first_token(live)
            elif live.last_token_at is not None:
                self.tracker.recorder.metrics.gap.labels(live.model).observe(
                    (now - live.last_token_at) / fresh
                )
            live.output_tokens += fresh
            live.last_token_at = now
            if self.state.phase != "generating" or self.state.repairing:
                self._step(calls.TokensCame(self.sink.shows))
                self.tracker.recorder.changed(live)
        self.tracker.recorder.progress(live, now)

    def _other(self, event: AnyEvent) -> calls.Event | None:
        """Events that come seldom."""
        live = self.live
        match event:
            case Opened():
                live.prompt_tokens = event.prompt_tokens
                live.reused_tokens = max(live.reused_tokens, event.reused_tokens)
                if self.state.phase == "connected":
                    self._step(calls.PrefillBegan())
            case Prefill():
                live.prefill_done = event.done
                if event.total > live.prompt_tokens and not any(self.ids):
                    live.prompt_tokens = event.total
            case Stages():
                live.stage_times = event.stages
                for times in event.stages:
                    self.work[self.attempt, times.node_id, times.start_layer, times.end_layer] = times
            case Rerouted():
                live.note("resumed", replayed_rows=event.replayed_rows, ms=round(event.ms, 1))
            case LostNode():
                self.lost_why = event.message or event.code
                live.note("lost", node_id=event.node_id, code=event.code, message=event.message)
                return calls.NodeLost(event.node_id, event.code, event.message)
            case CallError():
                return self._refusal(HeadError(event.status, event.code, event.message, event.param))
            case _:
                pass
        return None

    async def _emit(self, events: Sequence[AnyEvent]) -> None:
        """To the client; one who does not read for too long is cut off."""
        await self._deliver(self.sink.send(events))

    async def _keep_alive(self, phase: str, detail: str) -> None:
        await self._deliver(self.sink.keep_alive(phase, detail))

    async def _deliver(self, sending: Awaitable[None]) -> None:
        stalled = self.tracker.settings.stalled_reader_s
        try:
            async with asyncio.timeout(stalled):
                await sending
        except TimeoutError:
            self._interrupt = calls.Cancelled(
                "stalled_reader", f"the client read nothing for {stalled:.0f} s"
            )
            raise asyncio.CancelledError from None

    def _patience(self) -> float:
        """Seconds that the head may be silent: longer while it works on the prompt."""
        settings = self.tracker.settings
        if self.live.first_token_at is not None and not self.state.repairing:
            return settings.decode_deadline_s + MARGIN_S
        assert self.chosen is not None
        per_token = sum(
            self.chosen.view.times[stage.node_id].prefill_ms_per_token_layer * stage.layers
            for stage in self.chosen.stages
            if stage.node_id in self.chosen.view.times
        )
        rows = max(self.order.prompt_tokens, self.live.prompt_tokens) + self.live.output_tokens
        return settings.first_event_s + MARGIN_S + 4 * per_token * rows / 1000

    def _silent(self, seconds: float) -> calls.Event:
        if self._head_gone:
            return self._head_failed("lost", self._head_gone)
        return self._head_failed("deadline", f"nothing came from it for {seconds:.1f} s")

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
        live = self.live
        if end.outcome == "complete" and self.stream is not None:
            self.stream.finish()
            self.stream = None
        self._let_go()
        live.phase = self.state.phase
        if end.outcome == "complete":
            reasons = {self.ends[choice].reason for choice in self.ends}
            live.finish_reason = reasons.pop() if len(reasons) == 1 else "mixed"
        result = Result(
            end=end,
            prompt_tokens=live.prompt_tokens,
            ids=self.ids,
            ends=self.ends,
            work=self.work,
            stages=live.stages,
            view=self.chosen.view if self.chosen is not None else None,
            reroutes=live.reroutes,
            model=self.model,
        )
        self.tracker.recorder.progress(live, time.monotonic(), force=live.output_tokens > 0)
        self.tracker.recorder.ended(live, end)
        await self.tracker.settle(self, result)
        if end.outcome == "complete":
            done = Done(live.prompt_tokens, live.output_tokens, live.reused_tokens)
            await self._last_words(self.sink.send([done]))
        elif end.code != "client_gone":
            retry = self.tracker.placement.retry_after() if end.status in (429, 503) else None
            await self._last_words(self.sink.fail(as_error(end, retry)))
        return result

    async def _last_words(self, sending: Awaitable[None]) -> None:
        """The client may be gone or stuck by now; that changes nothing any more."""
        try:
            async with asyncio.timeout(self.tracker.settings.stalled_reader_s):
                await sending
        except (TimeoutError, OSError):
            log.info("the end of a call could not be delivered", call_id=self.order.call_id)

    def _let_go(self) -> None:
        """Frees slots, room and the way to the head. Safe to call twice."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None
        self.tracker.placement.release(self.order.call_id)


def _layers(stage: Stage) -> range:
    return range(stage.start_layer, stage.end_layer + 1)


def as_error(end: calls.End, retry_after: int | None) -> ApiError:
    """A call's end in OpenAI's error shape."""
    if end.status < 500:
        kind = "rate_limit_error" if end.status == 429 else "invalid_request_error"
    else:
        kind = "server_error"
    return ApiError(
        end.status, end.message, type=kind, code=end.code, param=end.param, retry_after=retry_after
    )
