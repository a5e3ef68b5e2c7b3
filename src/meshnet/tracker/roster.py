"""Owns the registry's state: feeds events in, carries effects out, tells the others what changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Protocol

import structlog

from meshnet.tracker.dialling import dial as dial_node
from meshnet.tracker.members import Node
from meshnet.tracker.registry import step
from meshnet.tracker.signals import (
    CloseStream,
    Dial,
    Dialled,
    Effect,
    Event,
    Gone,
    Probe,
    Probed,
    Rules,
    Say,
    State,
    Tell,
    TellClose,
    TellLoad,
    TellUnload,
    Tick,
)

TICK_S = 0.25
STALL_S = 1.0
"""A tick came late by so much: this process stood still, and reads first what came meanwhile."""

log = structlog.get_logger("meshnet.mesh")


class Line(Protocol):
    """A membership stream, as the roster uses it: nothing here waits."""

    def tell(self, effect: Tell) -> None: ...

    def close(self) -> None: ...


class Roster:
    """The mesh as it is now. Everything runs on one event loop; `feed` never waits."""

    def __init__(
        self,
        rules: Rules,
        *,
        probe: Callable[[Probe], asyncio.Future[str] | asyncio.Task[str]],
        dial: Callable[[Dial], Coroutine[Any, Any, tuple[tuple[str, str], ...]]] = dial_node,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = State(rules)
        self.version = 0
        """Raised with every change, so that whatever was derived from the state can be kept until then."""
        self.clock = clock
        self._probe = probe
        self._dial = dial
        self._dialling: set[asyncio.Task[None]] = set()
        self._lines: dict[int, Line] = {}
        self._changed: list[Callable[[str, Node | None], None]] = []
        self._gone: list[Callable[[str, str], None]] = []
        self._said: list[Callable[[Say], None]] = []
        self._answered: list[Callable[[str, int, str], None]] = []
        self._running: set[asyncio.Future[str]] = set()
        self._ticking: asyncio.Task[None] | None = None

    def on_change(self, listener: Callable[[str, Node | None], None]) -> None:
        """`listener(node_id, node)` after each change of a node; None when it is forgotten."""
        self._changed.append(listener)

    def on_gone(self, listener: Callable[[str, str], None]) -> None:
        """`listener(node_id, reason)` when running calls must leave a node."""
        self._gone.append(listener)

    def on_say(self, listener: Callable[[Say], None]) -> None:
        """`listener(say)` for each line that people should see."""
        self._said.append(listener)

    def on_answer(self, listener: Callable[[str, int, str], None]) -> None:
        """`listener(node_id, job, error)` when a node has carried out a load or an unload, or could not."""
        self._answered.append(listener)

    def answered(self, node_id: str, job: int, error: str) -> None:
        """A node's result of a load or an unload."""
        for listener in self._answered:
            listener(node_id, job, error)

    def say(self, said: Say) -> None:
        """A line for the console and the log that no event of a node has brought about."""
        self._carry_out(said)

    def tell(self, effect: TellLoad | TellUnload) -> None:
        """Sends a load or an unload to the node on that stream."""
        self._carry_out(effect)

    def start(self) -> None:
        self._ticking = asyncio.create_task(self._tick(), name="roster-tick")

    async def stop(self) -> None:
        """Ends probes and streams; nodes keep what they have and look for the next tracker."""
        tasks: list[asyncio.Future[str] | asyncio.Task[None]] = [*self._running, *self._dialling]
        if self._ticking is not None:
            tasks.append(self._ticking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for line in list(self._lines.values()):
            line.close()

    def attach(self, connection: int, line: Line) -> None:
        self._lines[connection] = line

    def detach(self, connection: int) -> None:
        self._lines.pop(connection, None)

    def feed(self, event: Event) -> None:
        """Applies one event; afterwards listeners have been told and messages are on their way."""
        before = self.state.nodes
        self.state, effects = step(self.state, event, self.clock())
        after = self.state.nodes
        if after is not before:
            self.version += 1
            for node_id, node in after.items():
                if before.get(node_id) is not node:
                    self._tell_changed(node_id, node)
            for node_id in before:
                if node_id not in after:
                    self._tell_changed(node_id, None)
        for effect in effects:
            self._carry_out(effect)

    def find(self, name: str) -> Node | None:
        """The node with this id, or else this name (ignoring case)."""
        node = self.state.nodes.get(name)
        if node is not None:
            return node
        wanted = name.lower()
        return next((node for node in self.state.nodes.values() if node.name.lower() == wanted), None)

    def end_call(self, node_ids: Iterable[str], call_id: str, before_epoch: int = 0) -> None:
        """Tells nodes that a call's attempts before `before_epoch` (0: all) are over, whatever they heard
        from their neighbours. A node that is not there now ends them by itself after a while."""
        for node_id in node_ids:
            node = self.state.nodes.get(node_id)
            if node is not None and node.connection is not None:
                self._carry_out(TellClose(node.connection, call_id, before_epoch))

    def name_of(self, node_id: str) -> str:
        node = self.state.nodes.get(node_id)
        return node.name if node is not None else node_id

    def _tell_changed(self, node_id: str, node: Node | None) -> None:
        for listener in self._changed:
            listener(node_id, node)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case CloseStream():
                line = self._lines.pop(effect.connection, None)
                if line is not None:
                    line.close()
            case Probe():
                task = asyncio.ensure_future(self._probe(effect))
                self._running.add(task)
                task.add_done_callback(partial(self._probed, effect))
            case Dial():
                dialling = asyncio.create_task(self._dialled(effect), name="dial")
                self._dialling.add(dialling)
                dialling.add_done_callback(self._dialling.discard)
            case Gone():
                for gone in self._gone:
                    gone(effect.node_id, effect.reason)
            case Say():
                log.log(_LEVELS[effect.level], effect.event, node_id=effect.node_id, line=effect.line)
                for said in self._said:
                    said(effect)
            case _:
                line = self._lines.get(effect.connection)
                if line is not None:
                    line.tell(effect)

    def _probed(self, asked: Probe, done: asyncio.Future[str]) -> None:
        self._running.discard(done)
        if done.cancelled():
            return
        failure = done.exception()
        error = f"{type(failure).__name__}: {failure}" if failure is not None else done.result()
        self.feed(Probed(asked.node_id, asked.boot_id, asked.model, error))

    async def _dialled(self, asked: Dial) -> None:
        self.feed(Dialled(asked.node_id, asked.connection, await self._dial(asked)))

    async def _tick(self) -> None:
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            if time.monotonic() - due > STALL_S:
                continue
            self.feed(Tick(time.time_ns() // 1_000_000))


_LEVELS = {"info": 20, "warning": 30, "error": 40}
