"""Keys of a mesh's members (P-256), the node id that follows from one, and the names in certificates."""

from __future__ import annotations

import hashlib
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

TRACKER_NAME = "tracker.meshnet"
"""In the certificate of every tracker of a mesh."""


class CertificateError(Exception):
    """A certificate or key that cannot be used; the message says why."""


def new_key() -> str:
    """A private key (P-256) as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def load_key(pem: str) -> ec.EllipticCurvePrivateKey:
    """Raises CertificateError."""
    try:
        key = load_pem_private_key(pem.encode(), None)
    except (ValueError, TypeError) as error:
        raise CertificateError(f"the private key cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError("the private key is of another kind than P-256")
    return key


def public_bytes(key: Any) -> bytes:
    """A public key as DER."""
    found: bytes = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return found


def id_of(public_key: bytes) -> str:
    """The node id that belongs to a public key (DER): nobody can claim it without the key."""
    return "node-" + hashlib.sha256(public_key).hexdigest()[:24]


def name_of(node_id: str) -> str:
    """The DNS name in the certificate of a node; ids may hold what DNS names may not."""
    return hashlib.sha256(node_id.encode("utf-8", "surrogatepass")).hexdigest()[:40] + ".node.meshnet"
