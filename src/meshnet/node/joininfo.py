"""Finding a tracker: what it says to everybody about itself and its mesh."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

from meshnet.protocol.addresses import bracketed, loopback

INFO_S = 3.0
MAX_INFO_BYTES = 64 << 10
MAX_TRACKERS = 16
SCHEMES = ("http://", "https://")


class JoinFailed(Exception):
    """The tracker will not have this node, or is not to be waited for; the message names the remedy."""


class TrackerGone(Exception):
    """The tracker cannot be reached, or its stream broke; worth trying again."""


@dataclass(frozen=True, slots=True)
class JoinInfo:
    """What a tracker's `/api/join-info` says."""

    mesh_id: str
    grpc_address: str
    trackers: tuple[str, ...] = ()
    """Addresses of all trackers of the mesh: where one is gone, another takes the node."""
    tls: bool = False
    ca: str = ""
    """Fingerprint of the mesh's authority. Anybody can say this: it counts only where it is proven."""


def connection_to(
    tracker: str, timeout_s: float
) -> tuple[urllib.parse.SplitResult, http.client.HTTPConnection]:
    """A connection, not yet made, to a tracker's HTTP port, and its address. Raises JoinFailed."""
    url = urllib.parse.urlsplit(tracker if "//" in tracker else f"http://{tracker}")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise JoinFailed(f"--tracker {tracker!r} is not an address of the form http://HOST:PORT")
    try:
        if url.scheme == "https":
            # Whose certificate it is does not matter here: what is said over it proves itself (enrolment.py).
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return url, http.client.HTTPSConnection(
                url.hostname, url.port or 443, timeout=timeout_s, context=context
            )
        return url, http.client.HTTPConnection(url.hostname, url.port or 8080, timeout=timeout_s)
    except ValueError as error:
        raise JoinFailed(f"--tracker {tracker!r}: {error}") from error


def ask(
    tracker: str,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    headers: Mapping[str, str],
    timeout_s: float,
    limit: int,
) -> tuple[urllib.parse.SplitResult, int, bytes]:
    """A tracker's address, and the status and the first `limit` bytes of what it answers. Blocks.

    Raises TrackerGone and JoinFailed.
    """
    url, connection = connection_to(tracker, timeout_s)
    try:
        connection.request(method, url.path.rstrip("/") + path, body, dict(headers))
        answer = connection.getresponse()
        return url, answer.status, answer.read(limit)
    except (OSError, http.client.HTTPException) as error:
        raise TrackerGone(
            f"cannot reach the tracker at {tracker}: {error or type(error).__name__}"
        ) from error
    finally:
        connection.close()


def read_join_info(tracker: str) -> JoinInfo:
    """Asks a tracker where its membership service is. Blocks. Raises TrackerGone and JoinFailed."""
    url, status, body = ask(
        tracker,
        "GET",
        "/api/join-info",
        headers={"accept": "application/json"},
        timeout_s=INFO_S,
        limit=MAX_INFO_BYTES,
    )
    if status >= 500:
        raise TrackerGone(f"the tracker at {tracker} answers with status {status}")
    try:
        info = json.loads(body)
        host, _, port = str(info["grpc_address"]).rpartition(":")
        if host in ("", "0.0.0.0", "[::]", "::"):  # noqa: S104 - recognised, not bound
            host = bracketed(str(url.hostname))
        trackers = tuple(str(each) for each in list(info.get("trackers", ()))[:MAX_TRACKERS])
        tls, ca = bool(info.get("tls")), str(info.get("ca", ""))
        return JoinInfo(str(info["mesh_id"]), f"{host}:{int(port)}", trackers, tls, ca)
    except (ValueError, KeyError, TypeError) as error:
        raise JoinFailed(
            f"at {tracker} there is no meshnet tracker (its /api/join-info cannot be read)"
        ) from error


def meant_for(url: str, tracker: str) -> bool:
    """Whether an address that `tracker` names can be dialled from here: its own loopback is not ours."""
    try:
        return url.startswith(SCHEMES) and (not loopback(url) or loopback(tracker))
    except ValueError:
        return False


def elsewhere(tracker: str) -> bool:
    """True when the tracker is on another machine; False for what is no address, too."""
    try:
        return not loopback(tracker)
    except ValueError:
        return False
