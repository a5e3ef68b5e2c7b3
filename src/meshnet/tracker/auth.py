"""Who asks: bearer keys, the dashboard's cookie, failed tries, and where a cookie's request comes from."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import struct
import time
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from meshnet.protocol.errors import ApiError
from meshnet.tracker.books.facade import Books
from meshnet.tracker.books.records import KeyInfo
from meshnet.tracker.tries import FailedTries

COOKIE = "meshnet_session"
MAX_KEY_CHARS = 256
_LABEL = b"meshnet dashboard session 1"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def header(scope: Any, name: bytes) -> str | None:
    """The first header of that (lower-case) name."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return None


def client_address(scope: Any) -> str:
    client = scope.get("client")
    return client[0] if client else "unknown"


class Sessions:
    """Cookies that carry a key, sealed with the mesh's secret: they hold at every tracker, across restarts.

    Each request opens the seal and authenticates the key anew, so that revoking the key ends its sessions.
    """

    def __init__(self, secret: bytes, lifetime_s: float) -> None:
        self._seal = AESGCM(hmac.digest(secret, _LABEL, hashlib.sha256))
        self._lifetime_s = lifetime_s

    def seal(self, key: str) -> str:
        nonce = os.urandom(12)
        expires = struct.pack(">Q", int(time.time() + self._lifetime_s))
        return base64.urlsafe_b64encode(
            nonce + self._seal.encrypt(nonce, expires + key.encode(), None)
        ).decode()

    def open(self, cookie: str) -> str | None:
        """The key in a cookie; None when it was not sealed here or has expired."""
        try:
            data = base64.urlsafe_b64decode(cookie)
            plain = self._seal.decrypt(data[:12], data[12:], None)
        except (binascii.Error, ValueError, InvalidTag):
            return None
        if len(plain) < 8 or struct.unpack(">Q", plain[:8])[0] < time.time():
            return None
        return plain[8:].decode()

    @property
    def lifetime_s(self) -> int:
        return int(self._lifetime_s)


class Authenticator:
    """Finds the key of a request. Raises ApiError: 401 without a good key, 429 after too many bad ones."""

    def __init__(self, books: Books, sessions: Sessions, tries: FailedTries) -> None:
        self._books = books
        self.sessions = sessions
        self._tries = tries

    async def key_of(self, scope: Any) -> KeyInfo:
        """The key of the Authorization header, or of the cookie (then the page it comes from counts, too)."""
        return await self.check(self.secret_of(scope), client_address(scope))

    def secret_of(self, scope: Any) -> str:
        """What the request shows as its key, good or not."""
        secret = bearer(scope)
        if secret is None:
            cookie = cookie_of(scope)
            if cookie is None:
                raise _unauthorized("no API key: send `Authorization: Bearer KEY`")
            check_origin(scope)
            secret = self.sessions.open(cookie)
            if secret is None:
                raise _unauthorized("the session has ended; sign in again")
        return secret

    async def check(self, secret: str, address: str) -> KeyInfo:
        wait = self._tries.wait_s(address)
        if wait:
            raise ApiError(
                429,
                f"too many failed keys from this address; try again in {wait} s",
                type="rate_limit_error",
                code="too_many_failed_keys",
                retry_after=wait,
            )
        key = await self._books.authenticate(secret) if 0 < len(secret) <= MAX_KEY_CHARS else None
        if key is None:
            self._tries.failed(address)
            raise _unauthorized("the API key is not known, has expired or was revoked")
        return key


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, type="authentication_error", code="invalid_api_key")


def bearer(scope: Any) -> str | None:
    value = header(scope, b"authorization")
    if value is None:
        return None
    kind, _, secret = value.partition(" ")
    if kind.lower() != "bearer":
        raise _unauthorized("the Authorization header must have the form `Bearer KEY`")
    return secret.strip()


def cookie_of(scope: Any) -> str | None:
    value = header(scope, b"cookie")
    for part in (value or "").split(";"):
        name, _, content = part.strip().partition("=")
        if name == COOKIE:
            return content
    return None


def check_origin(scope: Any) -> None:
    """A cookie may change state only from a page of this tracker. Raises ApiError (403)."""
    if scope["method"] in SAFE_METHODS:
        return
    origin = header(scope, b"origin")
    host = header(scope, b"host")
    if origin is not None:
        if host is not None and urlsplit(origin).netloc == host:
            return
    elif header(scope, b"sec-fetch-site") == "same-origin":
        return
    raise ApiError(
        403,
        "a cookie may be used from the tracker's own pages only; send an API key",
        type="permission_error",
        code="wrong_origin",
    )


def require_admin(key: KeyInfo) -> None:
    """Raises ApiError (403) for a key without the scope admin."""
    if key.scope != "admin":
        raise ApiError(
            403,
            f"key {key.name!r} has the scope {key.scope}; this needs an admin key",
            type="permission_error",
            code="admin_only",
        )


def cookie_header(value: str, max_age: int, secure: bool) -> tuple[bytes, bytes]:
    """Set-Cookie for the dashboard's session; an empty value with age 0 signs out."""
    parts: Iterable[str] = (
        f"{COOKIE}={value}",
        "Path=/",
        f"Max-Age={max_age}",
        "HttpOnly",
        "SameSite=Strict",
        *(("Secure",) if secure else ()),
    )
    return b"set-cookie", "; ".join(parts).encode()
