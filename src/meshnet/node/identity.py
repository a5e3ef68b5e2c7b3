"""Who a node is: its id and its credential, kept in its data folder with access for its owner alone."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from meshnet.models.locks import FileLock
from meshnet.protocol.keys import id_of, load_key, new_key, public_bytes

FILE = "node.json"


class IdentityError(Exception):
    """The data folder cannot be used; the message says why and what helps."""


class Identity(msgspec.Struct, frozen=True):
    """`key` is a private key (PEM) from which the id of a new node follows.

    `credential` and `mesh_id` are the tracker's, from the first time that it let this node in.
    """

    node_id: str
    mesh_id: str = ""
    credential: str = ""
    trackers: tuple[str, ...] = ()
    """Where the mesh's trackers were: a node that starts while its own is gone finds another."""
    key: str = ""
    certificate: str = ""
    ca: str = ""
    """Of the mesh's authority (PEM), in a mesh with TLS; `certificate` is what it gave this node."""


def default_folder(name: str) -> Path:
    """`$XDG_DATA_HOME/meshnet/nodes/NAME`, by default under `~/.local/share`."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "meshnet" / "nodes" / "".join(c if c.isalnum() or c in "-_." else "-" for c in name)


def known_mesh(folder: Path) -> str:
    """The id of the mesh that let the node of a data folder in; empty when none did."""
    try:
        found = msgspec.json.decode((folder / FILE).read_bytes(), type=Identity)
    except (OSError, msgspec.MsgspecError):
        return ""
    return found.mesh_id if found.credential else ""


class Keeper:
    """The identity on disk. Holds the folder until `close`: two nodes must not be one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            lock = FileLock.attempt(folder / ".lock")
        except OSError as error:
            raise IdentityError(
                f"{folder}: cannot be written ({error.strerror}); give another folder with --data"
            ) from error
        if lock is None:
            raise IdentityError(f"{folder}: another node uses this folder; give each node its own --data")
        self._lock = lock
        found = self._read()
        if found is None or not found.key:
            key = new_key()
            own_id = id_of(public_bytes(load_key(key).public_key()))
            # An id under which the node was let in before stays; its credential speaks for it.
            joined = found is not None and found.credential
            found = msgspec.structs.replace(found, key=key) if joined and found else Identity(own_id, key=key)
        self.identity = found
        self.keep(found)

    def _read(self) -> Identity | None:
        path = self.folder / FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=Identity)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise IdentityError(f"{path}: cannot be read ({error}); delete it to join anew") from error

    def keep(self, identity: Identity) -> None:
        """Writes the identity; what was there is replaced at once or not at all."""
        self.identity = identity
        path = self.folder / FILE
        fresh = self.folder / f".{FILE}.{os.getpid()}"
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as stream:
            stream.write(msgspec.json.encode(identity))
            stream.flush()
            os.fsync(stream.fileno())
        fresh.replace(path)

    def close(self) -> None:
        self._lock.release()
