"""Tickets for routes, some of them signed ahead.

A signature costs as much as everything else between a request and its way to the head. Most calls of a model
take the route that the last one took, so for models in use a few tickets with new call ids lie ready for that
route. A call that takes another route has its ticket signed on the spot.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from meshnet.protocol.calls import RouteStage
from meshnet.protocol.tickets import Ticket, sign_ticket
from meshnet.tracker.jobs import Chosen
from meshnet.tracker.planning import route_stages

TICKET_MS = 600_000
AHEAD = 4
"""Tickets that lie ready for one model."""
AHEAD_DELAY_S = 0.02
"""They are signed so much later than the call that took one is sent."""
AHEAD_MS = 60_000
"""A ticket that has lain for longer is not given out: its call should have its time."""
MAX_MODELS = 256

draw = random.Random(random.SystemRandom().getrandbits(256)).getrandbits
"""Ids and seeds must differ, not be secret; asking the kernel for each costs more than all else here."""


Route = tuple[str, str, tuple[RouteStage, ...]]
"""Model, its fingerprint, stages."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A signed ticket for the first attempt of a call that is still to come."""

    call_id: str
    route: Route
    signed_ms: int
    text: str


class Signer:
    """Signs for one mesh. Used inside a running event loop."""

    def __init__(self, mesh_id: str, secret: bytes, clock: Callable[[], int]) -> None:
        self._mesh_id = mesh_id
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self._clock = clock
        self._ready: dict[str, deque[Ready]] = {}
        self._taken: dict[str, Route] = {}

    @property
    def public_key(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    def begin(self, model: str) -> tuple[str, Ready | None]:
        """The id of a new call, and the ticket that lies ready for it, if one does."""
        lying = self._ready.get(model)
        while lying:
            ready = lying.popleft()
            if 0 <= self._clock() - ready.signed_ms < AHEAD_MS:
                return ready.call_id, ready
        return new_call_id(), None

    def first(self, call_id: str, model: str, chosen: Chosen, ready: Ready | None) -> str:
        """The ticket for a call's first attempt: the one that lay ready, if it is for the same route."""
        route = _route(model, chosen)
        if not self._taken:
            asyncio.get_running_loop().call_later(AHEAD_DELAY_S, self._sign_ahead)
        self._taken[model] = route
        if ready is None:
            return self._sign(call_id, 0, route)
        if ready.route != route:
            self._ready.pop(model, None)
            return self._sign(call_id, 0, route)
        return ready.text

    def sign(self, call_id: str, model: str, epoch: int, chosen: Chosen) -> str:
        """A ticket for one route, good for opening sessions within TICKET_MS."""
        return self._sign(call_id, epoch, _route(model, chosen))

    def _sign(self, call_id: str, epoch: int, route: Route) -> str:
        model, fingerprint, stages = route
        expires_ms = self._clock() + TICKET_MS
        ticket = Ticket(self._mesh_id, call_id, epoch, model, fingerprint, stages, expires_ms)
        return sign_ticket(ticket, self._key)

    def _sign_ahead(self) -> None:
        taken, self._taken = self._taken, {}
        if len(self._ready) > MAX_MODELS:
            self._ready.clear()
        for model, route in taken.items():
            lying = self._ready.setdefault(model, deque())
            while len(lying) < AHEAD:
                call_id = new_call_id()
                lying.append(Ready(call_id, route, self._clock(), self._sign(call_id, 0, route)))


def new_call_id() -> str:
    return f"call-{draw(96):024x}"


def _route(model: str, chosen: Chosen) -> Route:
    return model, chosen.view.fingerprint, route_stages(chosen.stages, chosen.view.addresses)
