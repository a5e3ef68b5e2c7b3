"""Tickets that are signed ahead: used for the same route only, each for one call, and not for ever."""

from __future__ import annotations

import asyncio
import secrets

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from meshnet.protocol.tickets import Ticket, verify_ticket
from meshnet.routing import Stage
from meshnet.tracker import signing
from meshnet.tracker.jobs import Chosen
from meshnet.tracker.planning import View
from meshnet.tracker.signing import Signer


def chosen(*nodes: str) -> Chosen:
    stages = tuple(Stage(node, 10 * k, 10 * k + 9) for k, node in enumerate(nodes))
    addresses = {node: f"{node}:1" for node in nodes}
    view = View("m", "f" * 64, "e", 10 * len(nodes), 8, 64, (), {}, {}, {}, addresses, frozenset(nodes))
    return Chosen(stages, view, "because")


class Clock:
    ms = 1_000_000

    def __call__(self) -> int:
        return self.ms


def read(signer: Signer, text: str, clock: Clock) -> Ticket:
    key = Ed25519PublicKey.from_public_bytes(signer.public_key)
    return verify_ticket(text, key, mesh_id="mesh", now_ms=clock())


async def taken(signer: Signer, route: Chosen) -> tuple[str, signing.Ready | None, str]:
    """A call on a route, and the time in which tickets for the next ones are signed."""
    call_id, ready = signer.begin("m")
    text = signer.first(call_id, "m", route, ready)
    while signer._taken:
        await asyncio.sleep(0.005)
    return call_id, ready, text


async def test_tickets_lie_ready_for_the_route_that_was_taken_last() -> None:
    clock = Clock()
    signer = Signer("mesh", secrets.token_bytes(32), clock)
    seen = set()
    for k in range(10):
        call_id, ready, text = await taken(signer, chosen("a", "b"))
        seen.add(call_id)
        assert (ready is not None) == (k > 0)
        assert ready is None or text == ready.text
        ticket = read(signer, text, clock)
        assert (ticket.call_id, ticket.epoch, [s.node_id for s in ticket.stages]) == (call_id, 0, ["a", "b"])
    assert len(seen) == 10


async def test_another_route_gets_a_ticket_of_its_own() -> None:
    clock = Clock()
    signer = Signer("mesh", secrets.token_bytes(32), clock)
    await taken(signer, chosen("a", "b"))
    call_id, ready, text = await taken(signer, chosen("c"))
    assert ready is not None
    ticket = read(signer, text, clock)
    assert (ticket.call_id, [s.node_id for s in ticket.stages]) == (call_id, ["c"])
    call_id, ready, text = await taken(signer, chosen("c"))
    assert ready is not None
    assert text == ready.text
    assert [s.node_id for s in read(signer, text, clock).stages] == ["c"]


async def test_a_ticket_that_has_lain_for_long_is_signed_anew() -> None:
    clock = Clock()
    signer = Signer("mesh", secrets.token_bytes(32), clock)
    await taken(signer, chosen("a"))
    clock.ms += signing.AHEAD_MS
    call_id, ready, text = await taken(signer, chosen("a"))
    assert ready is None
    ticket = read(signer, text, clock)
    assert (ticket.call_id, ticket.expires_ms) == (call_id, clock() + signing.TICKET_MS)
