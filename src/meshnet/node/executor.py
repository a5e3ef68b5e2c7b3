"""The engine thread: runs what `batching` decides, one batch at a time, for all shards of a node.

Everything that touches an engine happens on this one thread. The event loop hands over work and gets
outcomes back by callback; between two batches the thread runs the control calls (open, fork, close, load)
that wait. Several shards share the thread because they share the cores.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from meshnet.engine.base import Engine, EngineError, Hidden, Step, StepResult, Tokens
from meshnet.node.batching import (
    Arrived,
    Batch,
    Costs,
    Event,
    Finished,
    Item,
    Lane,
    Measured,
    Pipeline,
    Policy,
    Removed,
    State,
    apply,
    choose,
    held_until,
)

T = TypeVar("T")
HANDOVER_S = 0.002
"""How long the event loop waits at most for an idle engine thread to take what is handed to it."""
LULL_S = 0.0005
"""How long an engine thread with nothing more to run leaves Python to the event loop after a batch: what the
batch gave has to leave first."""
MAX_INBOX = 4096
"""Messages that may wait for the engine thread; beyond them peers open and probe nothing more. Steps are
bounded by the credits of sessions, and those by slots."""


@dataclass(slots=True)
class Work:
    """One step of one session: what to run, and whose it is. `context` comes back with the outcome."""

    engine: Engine
    lane: Lane
    session: int
    slot: int
    key: str
    stages: int
    position: int
    prefill: bool
    tokens: Tokens | None = None
    hidden: Hidden | None = None
    sample: int = 0
    drafts: tuple[int, ...] = ()
    context: Any = None
    arrived: float = field(default_factory=time.monotonic)

    @property
    def rows(self) -> int:
        rows = self.tokens if self.tokens is not None else self.hidden
        return 0 if rows is None else int(rows.shape[0])


@dataclass(slots=True)
class Outcome:
    """What became of one work. Exactly one of `result` and `error` is set."""

    work: Work
    result: StepResult | None
    error: str
    compute_ms: float
    """Of the engine call that ran it, whole."""
    queue_ms: float
    batch: int
    """Steps in that call."""
    code: str = ""
    """The error's (`EngineError.code`)."""


@dataclass(frozen=True, slots=True)
class Load:
    """A snapshot for heartbeats."""

    waiting: int
    oldest_ms: float
    """Age of the oldest step that waits or runs; 0 without one."""
    steps: int
    """Completed since boot."""
    queue_ms: float
    """Estimated time until a new decode step would start."""


class Executor:
    """Owns the engine thread. All methods are for the event loop's thread."""

    def __init__(self, deliver: Callable[[list[Outcome]], None], policy: Policy) -> None:
        self._deliver = deliver
        self._policy = policy
        self._inbox: queue.SimpleQueue[Callable[[], Event | None] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._state = State()
        self._works: dict[int, Work] = {}
        self._fresh: list[Work] = []
        self.alone = False
        self._number = self._bundle = 0
        self._steps = 0
        self._running_since: float | None = None
        self._idle = False
        self._begun = threading.Lock()
        self._ahead: Callable[[], Event | None] | None = _NOTHING

    def start(self) -> None:
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread.is_alive()

    @property
    def full(self) -> bool:
        """Whether so much waits for the thread that peers should not add to it."""
        return self._inbox.qsize() >= MAX_INBOX

    def stop(self) -> None:
        """Ends the thread after what it runs now; what waits is dropped."""
        self._inbox.put(None)

    def join(self, timeout: float) -> bool:
        """Waits for the thread's end; False when it is still in the engine."""
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(self, works: Sequence[Work]) -> None:
        """Queues steps; each session's run in this order. The engine sees them when `flush` is called, at the
        latest in the loop's next turn: what comes together must be seen together to run together. With
        `alone` set nothing else comes with them."""
        if not self._fresh and not self.alone:
            self._loop.call_soon(self.flush)
        self._fresh.extend(works)
        if self.alone:
            self.flush()

    def flush(self) -> None:
        """Hands over what was submitted. An idle engine is let begin before anything else is done here: the
        thread cannot run Python while this one does, and what waits for tokens waits for the engine."""
        if self._fresh:
            works, self._fresh = self._fresh, []
            idle = self._idle
            self._begun.acquire(blocking=False)
            self._inbox.put(lambda: self._arrive(works))
            if idle:
                self._begun.acquire(timeout=HANDOVER_S)

    def _begin(self) -> None:
        """Lets `flush` go on."""
        with contextlib.suppress(RuntimeError):  # nobody waits
            self._begun.release()

    def remove(self, sessions: Iterable[int]) -> None:
        """Drops what waits of these sessions; no outcome comes for it."""
        self.flush()
        gone = frozenset(sessions)
        self._inbox.put(lambda: self._remove(gone))

    def seed(self, lane: Lane, costs: Costs) -> None:
        """What the self-test said of a lane."""
        self._inbox.put(lambda: Measured(lane, costs=costs))

    def observe(self, lane: Lane, pipeline: Pipeline) -> None:
        """What results said of the other stages of a lane's routes."""
        self._inbox.put(lambda: Measured(lane, pipeline=pipeline))

    async def call(self, function: Callable[[], T]) -> T:
        """Runs `function` on the engine thread between two batches, after what was submitted before was
        queued; raises what it raises."""
        self.flush()
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                value = function()
            except BaseException as error:
                self._post(_fail, future, error)
            else:
                self._post(_succeed, future, value)

        self._inbox.put(run)
        return await future

    def post(self, function: Callable[[], object]) -> None:
        """Like `call` for what cannot fail and nobody waits for."""
        self.flush()

        def run() -> None:
            with contextlib.suppress(EngineError):
                function()

        self._inbox.put(run)

    def load(self) -> Load:
        """Reads without a lock: figures for people and planners, each consistent by itself."""
        state, since, now = self._state, self._running_since, time.monotonic()
        ages = [now - item.arrived for item in state.waiting[:1]]
        if state.running is not None and since is not None:
            ages += [now - item.arrived for item in state.running.items]
        wait_ms = 0.0
        if state.running is not None and since is not None:
            wait_ms = max(_expected_ms(state, state.running) - (now - since) * 1000, 0.0)
        chunk = next((item for item in state.waiting if item.prefill), None)
        if chunk is not None:
            wait_ms += state.costs.get(chunk.lane, Costs()).row_ms * chunk.rows
        return Load(len(state.waiting), max(ages, default=0.0) * 1000, self._steps, wait_ms)

    def costs(self, lane: Lane) -> Costs | None:
        """As measured and moved so far."""
        return self._state.costs.get(lane)

    # ---------------------------------------------------------------- engine thread

    def _post(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function, *arguments)

    def _arrive(self, works: Sequence[Work]) -> Arrived:
        items = []
        self._bundle += 1
        for work in works:
            self._number += 1
            self._works[self._number] = work
            items.append(
                Item(
                    number=self._number,
                    lane=work.lane,
                    session=work.session,
                    slot=work.slot,
                    key=work.key,
                    rows=work.rows,
                    prefill=work.prefill,
                    stages=work.stages,
                    arrived=work.arrived,
                    bundle=self._bundle,
                )
            )
        return Arrived(tuple(items))

    def _remove(self, gone: frozenset[int]) -> Removed:
        for item in self._state.waiting:
            if item.session in gone:
                self._works.pop(item.number, None)
        return Removed(gone)

    def _run(self) -> None:
        wait: float | None = None
        while True:
            while (message := self._next(wait)) is not _NOTHING:
                if message is None:
                    return
                event = message()
                if event is not None:
                    self._state = apply(self._state, event, time.monotonic())
                wait = 0.0
            self._state, batch = choose(self._state, time.monotonic(), self._policy)
            self._begin()
            wait = self._pause() if batch is None else 0.0
            if batch is not None:
                self._execute(batch)

    def _pause(self) -> float | None:
        """How long to wait for the next message when nothing is to be started; None: until it comes."""
        until = held_until(self._state) if self._state.waiting else None
        return None if until is None else max(until - time.monotonic(), 0.001)

    def _next(self, wait: float | None) -> Callable[[], Event | None] | None:
        if self._ahead is not _NOTHING:
            ahead, self._ahead = self._ahead, _NOTHING
            return ahead
        self._idle = wait != 0.0
        try:
            return self._inbox.get_nowait() if wait == 0.0 else self._inbox.get(timeout=wait)
        except queue.Empty:
            return _NOTHING
        finally:
            self._idle = False

    def _execute(self, batch: Batch) -> None:
        works = [self._works.pop(item.number) for item in batch.items]
        started = time.monotonic()
        self._running_since = started
        outcomes = _compute(works)
        ended = time.monotonic()
        self._running_since = None
        self._steps += len(works)
        ms = (ended - started) * 1000
        for outcome in outcomes:
            outcome.compute_ms = ms
            outcome.queue_ms = (started - outcome.work.arrived) * 1000
        clean = all(not outcome.error for outcome in outcomes)
        self._post(self._deliver, outcomes)
        if not self._state.waiting:
            self._ahead = self._next(LULL_S)
        self._state = apply(self._state, Finished(ms if clean else None), ended)


def _nothing() -> Event | None:
    return None


_NOTHING = _nothing
"""Stands for an empty inbox."""


def _compute(works: list[Work]) -> list[Outcome]:
    """One engine call. Where the engine refuses it, each step runs alone, so that only the culprit fails."""
    try:
        for work in works:
            _rewind(work)
        results = works[0].engine.run([_step(work) for work in works])
    except EngineError as error:
        if len(works) == 1:
            return [Outcome(works[0], None, str(error), 0.0, 0.0, 1, error.code)]
        return [outcome for work in works for outcome in _compute([work])]
    return [
        Outcome(work, result, "", 0.0, 0.0, len(works)) for work, result in zip(works, results, strict=True)
    ]


def _rewind(work: Work) -> None:
    """Takes the slot back to where the step begins, where it holds more."""
    engine = work.engine
    if work.position < engine.position(work.slot):
        reached = engine.rollback(work.slot, work.position)
        if reached != work.position:
            raise EngineError(f"this model cannot go back to position {work.position}, only to {reached}")


def _step(work: Work) -> Step:
    return Step(work.slot, work.position, work.tokens, work.hidden, work.sample, work.drafts)


def _expected_ms(state: State, batch: Batch) -> float:
    costs = state.costs.get(batch.items[0].lane, Costs())
    return costs.row_ms * batch.rows if batch.prefill else costs.decode_ms(batch.rows)


def _succeed(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
