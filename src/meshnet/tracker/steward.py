"""Keeps models placed: looks at what is asked for and what nodes hold, and tells nodes what to do."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import msgspec
import structlog

from meshnet.models.errors import ModelError
from meshnet.protocol.errors import ApiError
from meshnet.tracker.allocation import Asked, Decision, Load, Unload, decide
from meshnet.tracker.books.records import BooksError
from meshnet.tracker.catalogue import borders
from meshnet.tracker.library import Library
from meshnet.tracker.members import Node
from meshnet.tracker.roster import Roster
from meshnet.tracker.shelf import Shelf
from meshnet.tracker.signals import Say, TellLoad, TellUnload
from meshnet.tracker.weighing import known_links
from meshnet.tracker.wishes import Wish, Wishes

LOOK_S = 5.0
"""How often it looks when nothing has happened."""
SETTLE_S = 0.05
"""What comes together is looked at together: machines are often started at the same time."""
GRACE_S = 5.0
"""A node that was lost is waited for so long before others take its layers: it comes back with them."""
AFTER_UNLOAD_S = 2.5
"""Two heartbeats and a little: until a node's free memory is told anew."""
RETRY_S = 30.0
"""A node that could not load a model is not asked again for so long."""
ANSWER_S = 300.0
"""A node that neither answers nor announces what it was told to load for so long is told again."""
MAX_SOURCES = 8
MAX_LED = 256
MAX_TAKEN = 8
"""Models that are read at the same time."""

log = structlog.get_logger("meshnet.steward")


@dataclass(frozen=True, slots=True)
class _Job:
    """A directive that a node carries out; `load` is None for an unload."""

    node_id: str
    connection: int
    number: int
    at: float
    """When it was sent, by the roster's clock."""
    load: Load | None
    unload: Unload | None = None


@dataclass(slots=True)
class _Taking:
    """A model that is being made known: bytes read of all, or why it failed."""

    done: int = 0
    total: int = 0
    error: str = ""
    model_id: str = ""
    task: asyncio.Task[Any] | None = None


class Steward:
    """One per tracker; moves the nodes that are on its streams."""

    def __init__(
        self,
        roster: Roster,
        shelf: Shelf,
        wishes: Wishes,
        library: Library,
        now_ms: Callable[[], int],
        others: Callable[[], Sequence[str]] = tuple,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`others`: addresses of the mesh's other trackers. `changed` is called when what `view` shows may
        have changed."""
        self._roster = roster
        self._shelf = shelf
        self._wishes = wishes
        self._library = library
        self._now_ms = now_ms
        self._others = others
        self._changed = changed
        self._wake = asyncio.Event()
        self._wished = asyncio.Event()
        self._numbers = count(1)
        self._jobs: dict[str, _Job] = {}
        self._failed: dict[tuple[str, str], tuple[float, str]] = {}
        self._unknown: dict[str, float] = {}
        self._unloaded_at = -AFTER_UNLOAD_S
        self._again: set[str] = set()
        self._taking: dict[str, _Taking] = {}
        self._led: dict[str, str] = {}
        """What was asked for, and the id of the model that it led to."""
        self._looked: tuple[Any, float] = (None, 0.0)
        self._decision = Decision((), (), {})
        self._said: dict[str, str] = {}
        self._evicted: dict[str, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        roster.on_change(self._node_changed)
        roster.on_answer(self._answered)
        wishes.on_change(self._wake.set)
        wishes.on_change(self._wished.set)

    def start(self) -> None:
        self._spawn(self._run(), "steward")
        self._spawn(self._restore(), "library")

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Any, name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ------------------------------------------------------------ what people ask for

    def load(self, what: str) -> str:
        """Has a model made known and placed; returns the name under which `view` shows how far it is."""
        known = self._shelf.find(what)
        name = known.model_id if known is not None else what
        taking = self._taking.get(name)
        if taking is None or taking.error:
            for old in [key for key, each in self._taking.items() if each.error][:-MAX_LED]:
                del self._taking[old]
            if sum(not each.error for each in self._taking.values()) >= MAX_TAKEN:
                raise ApiError(
                    429,
                    f"{MAX_TAKEN} models are being read; wait for one or unload it",
                    code="busy",
                    retry_after=5,
                )
            self._decision = replace(
                self._decision, waiting={k: v for k, v in self._decision.waiting.items() if k != name}
            )
            taking = self._taking[name] = _Taking()
            taking.task = self._spawn(self._take(name), "take")
        return name

    def forget(self, what: str) -> bool:
        """Ends the reading of a model, or forgets that it failed; False where there is neither."""
        taking = self._taking.pop(what, None)
        if taking is not None and taking.task is not None:
            taking.task.cancel()
        return taking is not None

    async def _take(self, what: str) -> None:
        taking = self._taking[what]

        def report(done: int, total: int) -> None:
            taking.done, taking.total = done, total

        try:
            wish = await self._wish(what, report)
            taking.model_id = wish.model_id
            self._evicted.pop(wish.model_id, None)
            self._failed = {key: value for key, value in self._failed.items() if key[1] != wish.model_id}
            await self._wishes.load(wish)
        except (ModelError, ApiError, BooksError, OSError, ValueError) as error:
            taking.error = error.message if isinstance(error, ApiError) else str(error)
            self._say("model not loaded", f"model {what} cannot be loaded: {taking.error}", "warning")
            return
        self._taking.pop(what, None)
        self._led[what] = wish.model_id
        while len(self._led) > MAX_LED:
            del self._led[next(iter(self._led))]
        self._say("model asked for", f"model {wish.model_id} is to be served")
        self._wake.set()

    async def _wish(self, what: str, report: Callable[[int, int], None]) -> Wish:
        """Raises ModelError."""
        held = self._shelf.find(what)
        kept = self._wishes.kept.models.get(what.lower())
        if kept is not None and self._library.model(kept.fingerprint) is not None:
            return msgspec.structs.replace(kept, asked_ms=self._now_ms())
        if held is not None and any(held.model_id == s.model for n in self._nodes() for s in n.shards):
            await self._library.learn(held.fingerprint, self._bases(held.fingerprint, ""))
            source = kept.source if kept is not None else ""
            files = kept.files if kept is not None else ()
            return Wish(held.model_id, source, held.fingerprint, self._now_ms(), files)
        taken = await self._library.take(kept.source if kept is not None and kept.source else what, report)
        model_id = next(
            (m.model_id for m in self._shelf.models().values() if m.fingerprint == taken.fingerprint),
            taken.model_id,
        )
        for alias in taken.aliases:
            if alias not in self._wishes.kept.aliases:
                await self._wishes.set_alias(alias, model_id)
        return Wish(model_id, what, taken.fingerprint, self._now_ms(), taken.files)

    async def unload(self, model_id: str) -> None:
        """Has a model let go of by all nodes that are moved. Raises ApiError."""
        self.forget(model_id)
        self._evicted.pop(model_id, None)
        await self._wishes.unload(model_id)
        self._say("model let go", f"model {model_id} is not to be served any more")
        self._wake.set()

    def replace(self, model_id: str) -> None:
        """Has a model placed anew, though nothing is missing."""
        self._again.add(model_id)
        self._wake.set()

    async def _restore(self) -> None:
        """What was asked for in an earlier run, or at another tracker, is known here."""
        while True:
            self._wished.clear()
            for wish in list(self._wishes.kept.models.values()):
                if not wish.source:
                    continue
                bases = [*self._others(), *self._bases(wish.fingerprint, "")]
                try:
                    await self._library.restore(wish.source, wish.fingerprint, wish.files, bases)
                except (ModelError, OSError, ValueError) as error:
                    log.warning("a model is not known here", model=wish.model_id, reason=str(error))
            self._wake.set()
            await self._wished.wait()

    # ------------------------------------------------------------ looking

    def _node_changed(self, node_id: str, node: Node | None) -> None:
        job = self._jobs.get(node_id)
        if job is not None and (node is None or node.connection != job.connection):
            # Whatever came of it, the node says with what it announces.
            del self._jobs[node_id]
        self._wake.set()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            await asyncio.sleep(SETTLE_S)
            self._wake.clear()
            try:
                await self._look()
            except Exception:
                # One bad look must not end all placing.
                log.exception("placing failed")

    async def _look(self) -> None:
        models = await self._models()
        now = self._roster.clock()
        self._forget_jobs(now)
        self._failed = {key: value for key, value in self._failed.items() if value[0] > now}
        if now - self._unloaded_at < AFTER_UNLOAD_S or self._missed(now):
            return
        pending = {job.node_id: job.load for job in self._jobs.values() if job.load is not None}
        nodes = self._nodes()
        known = [each.model_id for each in models]
        seen = ([_gist(node, now) for node in nodes], known, pending, set(self._failed), self._wishes.kept)
        if seen == self._looked[0] and not self._again and now - self._looked[1] < LOOK_S:
            return
        self._looked = (seen, now)
        again = frozenset(self._again)
        # Of many nodes it takes a while, in which calls go on.
        decision = await asyncio.to_thread(
            decide,
            nodes,
            models,
            known_links(self._roster.state.links),
            now,
            off=self._wishes.kept.off,
            pending=pending,
            failed=set(self._failed),
            again=again,
        )
        self._again -= again
        self._decision = replace(decision, why={**self._decision.why, **decision.why})
        self._tell(decision)
        # What a node lets go of may still look held: nothing else goes until that is done.
        if not any(job.unload is not None for job in self._jobs.values()):
            for unload in decision.unloads:
                self._send_unload(unload)
        for load in decision.loads:
            self._send_load(load)
        self._changed()

    def _forget_jobs(self, now: float) -> None:
        """Directives whose answer was lost on the way: what the node announces tells as much."""
        for node_id, job in list(self._jobs.items()):
            node, move = self._roster.state.nodes.get(node_id), job.load or job.unload
            shards = node.shards if node is not None else ()
            here = [
                shard
                for shard in shards
                if move is not None
                and (shard.model, shard.start_layer, shard.end_layer)
                == (move.model_id, move.first, move.last)
            ]
            done = any(shard.state == "ready" for shard in here) if job.load is not None else not here
            if done or (not here and now - job.at > ANSWER_S):
                del self._jobs[node_id]
                self._unloaded_at = now if job.load is None else self._unloaded_at

    def _missed(self, now: float) -> bool:
        """Whether a node was lost so lately that it may be back in a moment."""
        return any(
            not node.connected and node.shards and now - node.lost_at < GRACE_S
            for node in self._roster.state.nodes.values()
        )

    def _nodes(self) -> list[Node]:
        return [node for node in self._roster.state.nodes.values() if node.connected]

    async def _models(self) -> list[Asked]:
        """What is asked for and what nodes brought, as far as its description is known."""
        kept = self._wishes.kept
        wanted = {wish.model_id: wish.fingerprint for wish in kept.models.values()}
        # What nodes brought themselves matters where there is somebody to place it on.
        guests = any(node.placement_wanted and node.connection is not None for node in self._nodes())
        for node in self._nodes() if guests else ():
            for shard in node.shards:
                if shard.model not in kept.off:
                    wanted.setdefault(shard.model, shard.fingerprint)
        clock, now_ms = self._roster.clock(), self._now_ms()
        if len(self._unknown) > MAX_LED:
            self._unknown.clear()
        found = []
        for model_id, fingerprint in wanted.items():
            file = self._library.model(fingerprint)
            if file is None and self._unknown.get(fingerprint, 0.0) <= clock:
                try:
                    bases = [*self._bases(fingerprint, ""), *self._others()]
                    file = await self._library.learn(fingerprint, bases)
                except ModelError as error:
                    self._unknown[fingerprint] = clock + RETRY_S
                    log.info("a model's description is not known yet", model=model_id, reason=str(error))
            if file is not None:
                wish = kept.models.get(model_id)
                # Below 0 where that was before the clock began: when this machine was started.
                asked = -math.inf if wish is None else clock - (now_ms - wish.asked_ms) / 1000
                used = self._shelf.used_at.get(model_id, -math.inf)
                found.append(Asked(model_id, fingerprint, file, asked, used))
        return found

    def _bases(self, fingerprint: str, but: str) -> list[str]:
        """The nodes that have bytes of a model on their disk, in an order of `but`'s own."""
        holding = [
            node.http_url
            for node in self._nodes()
            if node.node_id != but
            and any(s.fingerprint == fingerprint and s.state in ("ready", "draining") for s in node.shards)
        ]
        turn = hash(but) % len(holding) if holding else 0
        return (holding[turn:] + holding[:turn])[:MAX_SOURCES]

    # ------------------------------------------------------------ moving

    def _send_load(self, load: Load) -> None:
        node = self._roster.state.nodes.get(load.node_id)
        if node is None or node.connection is None or load.node_id in self._jobs:
            return
        kept = self._wishes.kept
        wish = kept.models.get(load.model_id)
        fingerprint = wish.fingerprint if wish is not None else self._fingerprint(load.model_id)
        names = {name for name, to in kept.aliases.items() if to == load.model_id}
        model = self._shelf.models().get(load.model_id)
        names.update(model.card.aliases if model is not None else ())
        job = _Job(load.node_id, node.connection, next(self._numbers), self._roster.clock(), load)
        self._jobs[load.node_id] = job
        self._evicted.pop(load.model_id, None)
        self._roster.tell(
            TellLoad(
                connection=node.connection,
                job=job.number,
                model=load.model_id,
                fingerprint=fingerprint,
                first=load.first,
                last=load.last,
                cuts=tuple(
                    cut for cut in borders(self._nodes(), load.model_id) if load.first < cut <= load.last
                ),
                sources=(*self._bases(fingerprint, load.node_id), "/", *self._others()[:MAX_SOURCES]),
                files=wish.files if wish is not None else (),
                weights_pass=self._library.pass_for(load.node_id, fingerprint),
                aliases=tuple(sorted(names)),
            )
        )
        layers = f"layers {load.first}-{load.last} of {load.model_id}"
        self._say("placing", f"placing {layers} on {node.name}", node_id=node.node_id)

    def _send_unload(self, unload: Unload) -> None:
        node = self._roster.state.nodes.get(unload.node_id)
        if node is None or node.connection is None:
            return
        running = self._jobs.get(unload.node_id)
        if running is not None and (running.load is None or running.load.model_id != unload.model_id):
            return  # a load that is not wanted any more is broken off, anything else comes first
        now = self._roster.clock()
        job = _Job(unload.node_id, node.connection, next(self._numbers), now, None, unload)
        self._jobs[unload.node_id] = job
        self._roster.tell(TellUnload(node.connection, job.number, unload.model_id, unload.first, unload.last))
        layers = f"layers {unload.first}-{unload.last} of {unload.model_id}"
        self._say("letting go", f"{node.name} lets go of {layers}: {unload.why}", node_id=node.node_id)
        if unload.evicts and unload.model_id not in self._evicted:
            self._evicted[unload.model_id] = unload.why
            self._say("model unloaded", f"model {unload.model_id} is unloaded: {unload.why}", "warning")

    def _fingerprint(self, model_id: str) -> str:
        model = self._shelf.models().get(model_id)
        return "" if model is None else model.fingerprint

    def _answered(self, node_id: str, number: int, error: str) -> None:
        job = self._jobs.get(node_id)
        if job is None or job.number != number:
            return
        del self._jobs[node_id]
        if job.load is None:
            self._unloaded_at = self._roster.clock()
            asyncio.get_running_loop().call_later(AFTER_UNLOAD_S + 0.1, self._wake.set)
        elif error:
            self._failed[node_id, job.load.model_id] = (self._roster.clock() + RETRY_S, error)
            asyncio.get_running_loop().call_later(RETRY_S + 0.1, self._wake.set)
            layers = f"layers {job.load.first}-{job.load.last} of {job.load.model_id}"
            name = self._roster.name_of(node_id)
            self._say("placing failed", f"{name} cannot load {layers}: {error}", "warning", node_id)
        self._wake.set()

    def _tell(self, decision: Decision) -> None:
        """Says why, once for each reason."""
        told = {model_id: " ".join(lines) for model_id, lines in decision.why.items()}
        told |= {model_id: f"waits: {text}" for model_id, text in decision.waiting.items()}
        acted = {load.model_id for load in decision.loads} | {each.model_id for each in decision.unloads}
        acted |= decision.waiting.keys()
        for model_id, text in told.items():
            if model_id in acted and self._said.get(model_id) != text:
                self._said[model_id] = text
                self._say("placement", f"placement of {model_id}: {text}")

    def _say(self, event: str, line: str, level: str = "info", node_id: str = "") -> None:
        self._roster.say(Say(event, node_id, line, level))

    # ------------------------------------------------------------ showing

    def view(self) -> dict[str, Any]:
        """`{"models", "moves"}`: each model's state and why, and what nodes are told to do now."""
        kept = self._wishes.kept
        held = self._shelf.models()
        names = dict.fromkeys([*kept.models, *held])
        models = [self._model_view(model_id) for model_id in sorted(names)]
        models += [
            {
                "id": what,
                "state": "failed" if taking.error else "reading",
                "asked": True,
                "progress": taking.done / taking.total if taking.total else 0.0,
                "reason": taking.error or None,
                "why": [],
            }
            for what, taking in sorted(self._taking.items())
            if what not in names
        ]
        moves = [_move_view(job, self._roster.name_of(job.node_id)) for job in self._jobs.values()]
        return {"models": models, "moves": moves, "names": dict(self._led)}

    def _model_view(self, model_id: str) -> dict[str, Any]:
        kept, model = self._wishes.kept, self._shelf.models().get(model_id)
        taking = self._taking.get(model_id)
        waiting = self._decision.waiting.get(model_id, "")
        loading = [s for n in self._nodes() for s in n.shards if s.model == model_id and s.state == "loading"]
        failed = [
            f"{self._roster.name_of(node)}: {text}"
            for (node, name), (_, text) in self._failed.items()
            if name == model_id
        ]
        state, reason = "placing", ""
        if model is not None and model.complete:
            state = "ready"
        elif model_id in kept.off:
            state, reason = "off", "it was unloaded"
        elif taking is not None:
            state, reason = ("failed", taking.error) if taking.error else ("reading", "")
        elif model_id in self._evicted:
            state, reason = "evicted", self._evicted[model_id]
        elif loading:
            state = "loading"
        elif waiting:
            state, reason = "waiting", waiting
        elif model is not None and model_id not in kept.models:
            state, reason = "incomplete", "nodes hold a part of its layers"
        progress = sum(s.progress for s in loading) / len(loading) if loading else float(state == "ready")
        return {
            "id": model_id,
            "state": state,
            "asked": model_id in kept.models,
            "progress": progress,
            "reason": "; ".join(filter(None, [reason, *failed])) or None,
            "why": list(self._decision.why.get(model_id, ())),
        }


def _gist(node: Node, now: float) -> tuple[Any, ...]:
    """What of a node a decision hangs on, but for how much memory is free."""
    shards = tuple(
        (s.model, s.start_layer, s.end_layer, s.state, s.usable, s.memory_bytes) for s in node.shards
    )
    return node.node_id, node.connection, node.routable(now), shards


def _move_view(job: _Job, name: str) -> Mapping[str, Any]:
    move = job.load or job.unload
    assert move is not None
    return {
        "node": name,
        "action": "load" if job.load is not None else "unload",
        "model": move.model_id,
        "layers": [move.first, move.last],
    }
