"""The room that a running call holds: waits for it in turn, and finds substitutes for what it loses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from meshnet.routing import RoutingRequest, Stage
from meshnet.tracker.jobs import Chosen, Job, NoPlace
from meshnet.tracker.live import LiveCall
from meshnet.tracker.placement import Placement
from meshnet.tracker.recorder import Recorder
from meshnet.tracker.reservations import Need
from meshnet.tracker.settings import TrackerSettings
from meshnet.tracker.signing import Ready

POSITION_S = 1.0
"""How often a waiting call's position is looked at."""


class Order(msgspec.Struct, frozen=True):
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
    cached_tokens: Mapping[str, int] = {}
    """Tokens of the prompt that nodes probably hold from an earlier turn."""
    turn: tuple[bytes, ...] = ()
    """Hashes of the conversation's prefixes (prefixes.py)."""
    ready: Ready | None = None
    """A ticket that was signed ahead for this call's id (signing.py)."""

    def __repr__(self) -> str:
        """Without the request, which holds the prompt, and without the ticket."""
        return f"Order(call_id={self.call_id!r}, model={self.model!r}, key={self.key!r})"


@dataclass(slots=True)
class Seat:
    """`chosen` is the route that is held; `numerics` the class of every node that took part."""

    order: Order
    live: LiveCall
    placement: Placement
    recorder: Recorder
    settings: TrackerSettings
    model: str
    chosen: Chosen | None = None
    numerics: dict[str, str] = field(default_factory=dict)

    def _job(self, without: frozenset[str], *, urgent: bool) -> Job:
        order = self.order
        positions = order.prompt_tokens + order.max_tokens
        views = self.placement.views(self.model)
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
            cached_tokens=order.cached_tokens if not urgent else {},
        )

    async def find(
        self,
        without: frozenset[str],
        *,
        urgent: bool,
        waits: Callable[[], None],
        keep_alive: Callable[[str], Awaitable[None]],
    ) -> Chosen:
        """Waits in turn for a route of the whole model. Raises NoPlace.

        `waits` is called once when there is no room at once, `keep_alive` now and then with the position.
        What the call held before (`urgent`: it runs, and lost its route) is given back first; it goes to the
        front of the queue. A mesh that is only busy loses no call.
        """
        if urgent:
            self.placement.release(self.order.call_id)
        loop = asyncio.get_running_loop()
        longest = self.settings.queue_wait_s
        begun = kept_alive = loop.time()
        future = self.placement.submit(self._job(without, urgent=urgent))
        if not future.done():
            waits()
        while not future.done():
            self.recorder.queued(self.live, self.placement.position(self.order.call_id))
            left = begun + longest - loop.time()
            if left <= 0:
                self.placement.release(self.order.call_id)
                raise NoPlace(503, "queue_timeout", f"no room within {longest:g} s; the mesh is busy")
            await asyncio.wait({future}, timeout=min(left, self.settings.keepalive_s, POSITION_S))
            if not future.done() and loop.time() - kept_alive >= self.settings.keepalive_s:
                kept_alive = loop.time()
                await keep_alive(f"position {self.live.queue_position}")
        return future.result()

    def substitutes(
        self, failed: frozenset[str], without: frozenset[str], culprit: str, *, ask_only: bool = False
    ) -> Chosen:
        """A route with others in the place of the failed nodes. Raises NoPlace."""
        assert self.chosen is not None
        return self.placement.repair(
            self._job(without, urgent=True),
            self.chosen.stages,
            failed,
            self.numerics.get(culprit, ""),
            self.chosen.view.engine_version,
            ask_only=ask_only,
        )

    def take(self, chosen: Chosen) -> bool:
        """Goes on with another route; True when some layer now runs in another numerics class than it did."""
        before, self.chosen = self.chosen, chosen
        changed = False
        if before is not None:
            old = {layer: self.numerics[s.node_id] for s in before.stages for layer in _layers(s)}
            new = {layer: chosen.view.numerics[s.node_id] for s in chosen.stages for layer in _layers(s)}
            changed = any(new.get(layer) != numerics for layer, numerics in old.items())
        self.numerics.update({s.node_id: chosen.view.numerics[s.node_id] for s in chosen.stages})
        return changed

    def give_up(self) -> None:
        """Gives everything back. Safe to call twice."""
        self.placement.release(self.order.call_id)


def _layers(stage: Stage) -> range:
    return range(stage.start_layer, stage.end_layer + 1)
