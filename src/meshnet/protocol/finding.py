"""How trackers and nodes find each other on the local network: a service by mDNS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshnet.protocol.addresses import bracketed

SERVICE = "_meshnet._tcp.local."


@dataclass(frozen=True, slots=True)
class FoundTracker:
    """What a tracker says of itself to everybody. Nothing of it is proven: the join token does that."""

    name: str
    mesh_id: str
    url: str
    version: str


def found_tracker(told: Mapping[str, str], addresses: Sequence[str], port: int) -> FoundTracker | None:
    """None for what is no tracker of ours."""
    mesh_id = told.get("mesh", "")
    if not mesh_id or not addresses or not 0 < port < 65_536:
        return None
    host = bracketed(addresses[0])
    scheme = "https" if told.get("tls") == "1" else "http"
    shown = "".join(char for char in told.get("name", "")[:64] if char.isprintable())
    return FoundTracker(shown, mesh_id[:64], f"{scheme}://{host}:{port}", told.get("version", "")[:64])


class NotChosen(Exception):
    """No tracker, or more than one mesh; the message lists them and says what to give."""


def choose(found: Sequence[FoundTracker], mesh: str) -> FoundTracker:
    """The tracker of the mesh with that name or id, or of the only mesh there is. Raises NotChosen."""
    fitting = [each for each in found if not mesh or mesh in (each.name, each.mesh_id)]
    listed = "; ".join(f"{each.name} {each.mesh_id} at {each.url}" for each in found)
    if not fitting:
        seen = f"--mesh {mesh}: only {listed}" if found else "no tracker answers on this network (mDNS)"
        raise NotChosen(
            f"{seen}; give the join link that `meshnet invite` prints, or --tracker http://HOST:PORT"
        )
    if len({each.mesh_id for each in fitting}) > 1:
        raise NotChosen(f"several meshes are on this network: {listed}; say which with --mesh NAME-OR-ID")
    return fitting[0]
