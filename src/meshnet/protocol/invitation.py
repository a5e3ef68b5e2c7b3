"""Join links: one line that holds all another machine needs.

`meshnet://HOST:PORT/MESH?token=TOKEN&ca=FINGERPRINT`; the fingerprint is that of the authority of a mesh that
speaks TLS, and is left out where it does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qs, quote, urlsplit

from meshnet.protocol.addresses import bracketed

SCHEME = "meshnet"


class InvitationError(ValueError):
    """The link is refused; the message says why and where to get one."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where the tracker's HTTP port is, the mesh that the token is bound to, and the token."""

    host: str
    port: int
    mesh_id: str
    token: str = field(repr=False)
    ca: str = ""

    @property
    def tracker(self) -> str:
        """The tracker's URL."""
        return f"{'https' if self.ca else 'http'}://{self._authority()}"

    def link(self) -> str:
        """The link as it is pasted into a terminal."""
        pin = f"&ca={self.ca}" if self.ca else ""
        return f"{SCHEME}://{self._authority()}/{quote(self.mesh_id)}?token={quote(self.token)}{pin}"

    def _authority(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"


def looks_like_link(text: str) -> bool:
    """True for what is meant as a join link, well formed or not."""
    return text.startswith(f"{SCHEME}:")


def parse_link(text: str) -> Invitation:
    """Raises InvitationError, which never repeats the token."""
    hint = "get a link with `meshnet invite` on the tracker's machine and paste it whole"
    if not looks_like_link(text):
        raise InvitationError(f"a join link begins with {SCHEME}://; {hint}")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvitationError(f"the join link's address cannot be read ({error}); {hint}") from error
    mesh_id = parts.path.strip("/")
    query = parse_qs(parts.query)
    token, ca = query.get("token", [""])[0], query.get("ca", [""])[0].lower()
    for value, name in ((host, "host"), (port, "port"), (mesh_id, "mesh"), (token, "token")):
        if not value:
            raise InvitationError(f"the join link has no {name}; {hint}")
    if ca and not re.fullmatch("[0-9a-f]{64}", ca):
        raise InvitationError(f"the join link's fingerprint is cut short or mistyped; {hint}")
    assert host is not None
    assert port is not None
    return Invitation(host, port, mesh_id, token, ca)
