"""Join links: one line that holds all another machine needs, `meshnet://HOST:PORT/MESH?token=TOKEN`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qs, quote, urlsplit

SCHEME = "meshnet"


class InvitationError(ValueError):
    """The link is refused; the message says why and where to get one."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where the tracker's HTTP port is, the mesh that the token is bound to, and the token."""

    host: str
    port: int
    mesh_id: str
    token: str

    @property
    def tracker(self) -> str:
        """The tracker's URL."""
        return f"http://{self._authority()}"

    def link(self) -> str:
        """The link as it is pasted into a terminal."""
        return f"{SCHEME}://{self._authority()}/{quote(self.mesh_id)}?token={quote(self.token)}"

    def _authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


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
    token = parse_qs(parts.query).get("token", [""])[0]
    for value, name in ((host, "host"), (port, "port"), (mesh_id, "mesh"), (token, "token")):
        if not value:
            raise InvitationError(f"the join link has no {name}; {hint}")
    assert host is not None
    assert port is not None
    return Invitation(host, port, mesh_id, token)
