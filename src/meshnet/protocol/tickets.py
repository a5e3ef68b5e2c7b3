"""Tickets: what lets a session be opened on a node. Signed by the tracker (Ed25519), checked by nodes.

A ticket names the call, the model's fingerprint and the whole route; it is worthless for any other
route, mesh or time. Form: base64url(JSON payload) + "." + base64url(signature).
"""

from __future__ import annotations

import base64
import binascii

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from meshnet.protocol.calls import RouteStage

MAX_TICKET_CHARS = 64 * 1024


class TicketError(Exception):
    """The ticket is refused; the message says why."""


class Ticket(msgspec.Struct, frozen=True):
    """`expires_ms`: unix milliseconds; sessions opened before may go on."""

    mesh_id: str
    call_id: str
    epoch: int
    model: str
    fingerprint: str
    stages: tuple[RouteStage, ...]
    expires_ms: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Ticket).decode


def sign_ticket(ticket: Ticket, key: Ed25519PrivateKey) -> str:
    """The ticket as a string for headers and messages."""
    return seal_signed(_encode(ticket), key)


def verify_ticket(text: str, key: Ed25519PublicKey, *, mesh_id: str, now_ms: int) -> Ticket:
    """Raises TicketError unless the ticket was signed by `key` for this mesh and has not expired."""
    try:
        ticket = _decode(open_signed(text, key))
    except msgspec.DecodeError as error:
        raise TicketError(f"ticket cannot be read: {error}") from error
    if ticket.mesh_id != mesh_id:
        raise TicketError(f"ticket is for mesh {ticket.mesh_id}, this node belongs to {mesh_id}")
    if ticket.expires_ms <= now_ms:
        raise TicketError("ticket has expired; ask the tracker for a new route")
    return ticket


def seal_signed(payload: bytes, key: Ed25519PrivateKey) -> str:
    """A payload with its signature, fit for headers."""
    return f"{_b64(payload)}.{_b64(key.sign(payload))}"


def open_signed(text: str, key: Ed25519PublicKey) -> bytes:
    """The payload of what `seal_signed` made. Raises TicketError unless `key` signed it."""
    if len(text) > MAX_TICKET_CHARS:
        raise TicketError(f"ticket is longer than {MAX_TICKET_CHARS} characters")
    body, dot, signature = text.partition(".")
    if not dot:
        raise TicketError("ticket is not of the form payload.signature")
    try:
        payload, sig = _unb64(body), _unb64(signature)
    except (binascii.Error, ValueError) as error:
        raise TicketError("ticket is not base64url") from error
    try:
        key.verify(sig, payload)
    except InvalidSignature as error:
        raise TicketError("ticket was not signed by this mesh's tracker") from error
    return payload


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
