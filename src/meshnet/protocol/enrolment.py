"""How a node gets its certificate: one request over HTTP, in which neither side shows its secret.

Both sides know a secret: the join token, or later the node's credential. The request and the answer carry
MACs by it, so that the tracker knows whom it lets in, the node knows that the certificate and the authority
come from the tracker that the secret is of, and whoever sits in between learns nothing that is of use.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

import msgspec

PATH = "/api/enroll"
MAX_BYTES = 32 << 10

By = Literal["token", "credential"]


class EnrolRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`csr`: PEM. `key_id` says which token, without telling anything of it."""

    node_id: str
    by: By
    key_id: str
    csr: str
    nonce: str
    mac: str = ""

    def sealed(self, key: str) -> EnrolRequest:
        return msgspec.structs.replace(self, mac=self._mac(key))

    def proves(self, key: str) -> bool:
        """True when it was sealed with this key."""
        return hmac.compare_digest(self._mac(key).encode(), self.mac.encode("utf-8", "surrogatepass"))

    def _mac(self, key: str) -> str:
        return _mac(key, "meshnet enrolment 1", self.node_id, self.by, self.key_id, self.csr, self.nonce)


class EnrolAnswer(msgspec.Struct, frozen=True):
    """Certificate and authority, PEM."""

    certificate: str
    ca: str
    mac: str = ""

    def sealed(self, key: str, nonce: str) -> EnrolAnswer:
        return msgspec.structs.replace(self, mac=self._mac(key, nonce))

    def proves(self, key: str, nonce: str) -> bool:
        """True when whoever answered knows the key, and answers the request with this nonce."""
        return hmac.compare_digest(self._mac(key, nonce).encode(), self.mac.encode("utf-8", "surrogatepass"))

    def _mac(self, key: str, nonce: str) -> str:
        return _mac(key, "meshnet enrolled 1", nonce, self.certificate, self.ca)


def proof_key(secret: str, mesh_id: str) -> str:
    """What both sides make MACs with; a tracker keeps no more than this of a join token."""
    return hashlib.sha256(f"{mesh_id}\0{secret}".encode("utf-8", "surrogatepass")).hexdigest()


def key_id(key: str) -> str:
    """Tells proof keys apart, without giving one away."""
    return hashlib.sha256(f"meshnet key id 1\0{key}".encode()).hexdigest()[:16]


def _mac(key: str, *fields: str) -> str:
    body = b"".join(
        len(data).to_bytes(4, "big") + data
        for data in (field.encode("utf-8", "surrogatepass") for field in fields)
    )
    return hmac.digest(key.encode(), body, hashlib.sha256).hex()
