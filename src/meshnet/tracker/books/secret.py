"""Secrets that are shown once and kept as a hash.

An API key or join token has 192 random bits. A slow, salted password hash protects secrets that people choose
and that can be guessed; these cannot, so one SHA-256 is enough, and it is fast enough for every request.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final, Literal

RANDOM_BYTES: Final = 24
"""32 url-safe characters."""

Prefix = Literal["mn-", "mj-"]


def new_secret(prefix: Prefix) -> str:
    """A new secret: the prefix and 32 url-safe random characters."""
    return prefix + secrets.token_urlsafe(RANDOM_BYTES)


def digest(secret: str, bound_to: str = "") -> str:
    """SHA-256 in hex. `bound_to` (a mesh id) makes the hash worthless in another mesh's database.

    Of a join token it is what nodes prove to know when they enrol (protocol/enrolment.py: proof_key).
    """
    return hashlib.sha256(f"{bound_to}\0{secret}".encode("utf-8", "surrogatepass")).hexdigest()


def same(left: str, right: str) -> bool:
    """Compares two digests in constant time."""
    return hmac.compare_digest(left, right)
