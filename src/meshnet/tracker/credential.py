"""What lets a node that was here come back: a MAC over its id, by a key derived from the mesh's secret.

It needs no storage, so it holds at every tracker of the mesh and across restarts.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

_LABEL = b"meshnet node credential 1"


def make_credential(secret: bytes, mesh_id: str, node_id: str) -> str:
    """The credential of a node in a mesh; `secret` is the mesh's signing secret."""
    key = hmac.digest(secret, _LABEL, hashlib.sha256)
    message = f"{mesh_id}\0{node_id}".encode("utf-8", "surrogatepass")
    return "mc-" + base64.urlsafe_b64encode(hmac.digest(key, message, hashlib.sha256)).decode().rstrip("=")


def check_credential(secret: bytes, mesh_id: str, node_id: str, credential: str) -> bool:
    """True when the credential is this node's; compared in constant time."""
    return hmac.compare_digest(
        make_credential(secret, mesh_id, node_id).encode(), credential.encode("utf-8", "surrogatepass")
    )
