"""Checks tickets against the tracker's key, once it is known."""

from __future__ import annotations

import time
from collections import OrderedDict

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from meshnet.node.sessions import Refused
from meshnet.protocol.passes import verify_pass
from meshnet.protocol.tickets import Ticket, TicketError, verify_ticket

KEPT = 512


class Verifier:
    """Remembers the last tickets: the choices of a call, and its parts, come with the same one."""

    def __init__(self) -> None:
        self.mesh_id = ""
        self._key: Ed25519PublicKey | None = None
        self._seen: OrderedDict[str, Ticket] = OrderedDict()

    def use(self, mesh_id: str, key: Ed25519PublicKey) -> None:
        """The mesh this node belongs to, and its tracker's key."""
        self.mesh_id, self._key = mesh_id, key
        self._seen.clear()

    def verify(self, text: str) -> Ticket:
        """The ticket. Raises Refused."""
        if self._key is None:
            raise Refused("ticket", "this node has not joined a mesh yet")
        now_ms = int(time.time() * 1000)
        known = self._seen.get(text)
        if known is not None and known.expires_ms > now_ms:
            return known
        try:
            ticket = verify_ticket(text, self._key, mesh_id=self.mesh_id, now_ms=now_ms)
        except TicketError as error:
            raise Refused("ticket", str(error)) from error
        self._seen[text] = ticket
        while len(self._seen) > KEPT:
            self._seen.popitem(last=False)
        return ticket

    def check_pass(self, text: str, fingerprint: str) -> None:
        """Raises Refused unless this is a pass for these weights."""
        if self._key is None:
            raise Refused("ticket", "this node has not joined a mesh yet")
        try:
            verify_pass(
                text,
                self._key,
                mesh_id=self.mesh_id,
                fingerprint=fingerprint,
                now_ms=int(time.time() * 1000),
            )
        except TicketError as error:
            raise Refused("ticket", str(error)) from error
