"""Passes: what lets a node read a model's weights from the tracker or from another node.

Signed by the tracker (Ed25519) like a ticket, but never good for one: a pass names a fingerprint and the node
that it was given to, opens no session, and a ticket reads no weights.
"""

from __future__ import annotations

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from meshnet.protocol.tickets import TicketError, open_signed, seal_signed

PASS_MS = 24 * 3_600_000
"""How long a pass holds: a fetch over a slow line may take a day, and is then asked for anew."""
PASS_HEADER = "x-meshnet-weights"  # noqa: S105 - a name


class WeightsPass(msgspec.Struct, frozen=True, tag="weights"):
    """`expires_ms`: unix milliseconds."""

    mesh_id: str
    fingerprint: str
    node_id: str
    expires_ms: int


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(WeightsPass).decode


def sign_pass(given: WeightsPass, key: Ed25519PrivateKey) -> str:
    """The pass as a string for a header."""
    return seal_signed(_encode(given), key)


def verify_pass(
    text: str, key: Ed25519PublicKey, *, mesh_id: str, fingerprint: str, now_ms: int
) -> WeightsPass:
    """Raises TicketError unless the pass was signed by `key` for these weights and has not expired."""
    try:
        found = _decode(open_signed(text, key))
    except msgspec.DecodeError as error:
        raise TicketError(f"pass cannot be read: {error}") from error
    if found.mesh_id != mesh_id:
        raise TicketError(f"pass is for mesh {found.mesh_id}, this is mesh {mesh_id}")
    if found.fingerprint != fingerprint:
        raise TicketError("pass is for another model's weights")
    if found.expires_ms <= now_ms:
        raise TicketError("pass has expired; the tracker gives a new one with its next directive")
    return found
