"""The mesh's identity, the tokens that let nodes in, and the settings that all its trackers share.

The signing secret of tickets cannot be hashed: it must be used. It stands in the database, not in a file
beside it: several trackers on one PostgreSQL must sign alike without a hand copying files, and one backup is
then complete. Whoever can read the database can forge tickets, so the SQLite file and all backups have mode
0600.
"""

from __future__ import annotations

import base64
import json
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from sqlalchemy import Connection, Row, func, insert, select, update

from meshnet.tracker.books import schema
from meshnet.tracker.books.migration import lock_schema
from meshnet.tracker.books.records import BooksError, Clock, JoinToken
from meshnet.tracker.books.secret import digest, new_secret, same
from meshnet.tracker.books.storage import Storage, upsert
from meshnet.tracker.books.watch import Watch, bump

INVITE_MS: Final = 24 * 3_600_000
"""How long an invitation holds by default."""
MAX_SETTING_BYTES: Final = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mesh:
    """The mesh's id (a uuid) and the secret that signs its tickets (32 bytes)."""

    id: str
    signing_secret: bytes = field(repr=False)


def ensure_mesh(connection: Connection, now: int) -> Mesh:
    """The mesh of this database.

    A new database gets one, of several trackers that start at once from the first.
    """
    found = _load_mesh(connection)
    if found is None:
        lock_schema(connection)
        found = _load_mesh(connection) or _make_mesh(connection, now)
    return found


def _load_mesh(connection: Connection) -> Mesh | None:
    row = connection.execute(select(schema.mesh)).one_or_none()
    return None if row is None else Mesh(row.id, base64.b64decode(row.signing_secret))


def _make_mesh(connection: Connection, now: int) -> Mesh:
    made = Mesh(str(uuid.uuid4()), secrets.token_bytes(32))
    connection.execute(
        insert(schema.mesh).values(
            id=made.id, signing_secret=base64.b64encode(made.signing_secret).decode(), created_at=now
        )
    )
    return made


class Joins:
    """The join tokens of one mesh."""

    def __init__(self, storage: Storage, mesh: Mesh, clock: Clock) -> None:
        self._storage = storage
        self._mesh = mesh
        self._clock = clock

    async def create(
        self, name: str, *, valid_ms: int | None = INVITE_MS, max_uses: int | None = None
    ) -> tuple[JoinToken, str]:
        """Makes a token (None.

        No expiry, any number of nodes). Returns it with its secret, shown only here.
        """
        for label, value in (("valid_ms", valid_ms), ("max_uses", max_uses)):
            if value is not None and value < 1:
                raise BooksError(
                    f"{label} is {value}; it must be at least 1", code="bad_join_token", param=label
                )
        secret = new_secret("mj-")
        now = self._clock()
        expires_at = None if valid_ms is None else now + valid_ms
        token = await self._storage.write(
            lambda connection: insert_join_token(
                connection, self._mesh, name, secret, now, expires_at, max_uses
            )
        )
        return token, secret

    async def admit(self, secret: str, node_id: str) -> JoinToken:
        """Lets a node in, or raises BooksError (code `bad_join_token`) saying why not.

        A node that a token has let in before comes back with it at any time, until the token is revoked:
        expiry and the number of uses are about new nodes.
        """
        return await self.admit_proven(digest(secret, self._mesh.id), node_id)

    async def admit_proven(self, wanted: str, node_id: str) -> JoinToken:
        """The same for a node that has proven to know the token with this hash without showing it."""

        def write(connection: Connection) -> JoinToken:
            row = connection.execute(
                _TOKENS.where(schema.join_tokens.c.hash == wanted).with_for_update(of=schema.join_tokens)
            ).one_or_none()
            if row is None or not same(row.hash, wanted):
                raise _no_entry(
                    f"the join token is not one of mesh {self._mesh.id}; ask for a new invitation"
                )
            token = _token(row)
            if token.revoked_at is not None:
                raise _no_entry(f"the join token {token.name!r} was revoked; ask for a new invitation")
            known = connection.execute(
                select(schema.join_uses.c.node_id).where(
                    schema.join_uses.c.token_id == token.id, schema.join_uses.c.node_id == node_id
                )
            ).one_or_none()
            if known is not None:
                return token
            now = self._clock()
            if token.expires_at is not None and token.expires_at <= now:
                raise _no_entry(f"the join token {token.name!r} has expired; ask for a new invitation")
            if token.max_uses is not None and token.uses >= token.max_uses:
                raise _no_entry(
                    f"the join token {token.name!r} has let in {token.uses} of {token.max_uses} nodes; "
                    "ask for a new invitation"
                )
            connection.execute(
                insert(schema.join_uses).values(token_id=token.id, node_id=node_id, first_at=now)
            )
            return find_join_token(connection, token.id)

        return await self._storage.write(write)

    async def find_hash(self, fits: Callable[[str], bool]) -> str | None:
        """The first token's hash that `fits`; the token may no longer hold."""
        hashes = await self._storage.read(
            lambda connection: connection.execute(select(schema.join_tokens.c.hash)).scalars().all()
        )
        return next((found for found in hashes if fits(found)), None)

    async def list(self) -> list[JoinToken]:
        """All tokens, those that no longer hold too."""
        rows = await self._storage.read(
            lambda connection: connection.execute(_TOKENS.order_by(schema.join_tokens.c.id)).all()
        )
        return [_token(row) for row in rows]

    async def revoke(self, token_id: int) -> JoinToken:
        """Ends a token: no node comes in or comes back with it. Nodes that are in stay until they leave."""

        def write(connection: Connection) -> JoinToken:
            token = find_join_token(connection, token_id)
            if token.revoked_at is not None:
                return token
            connection.execute(
                update(schema.join_tokens)
                .where(schema.join_tokens.c.id == token_id)
                .values(revoked_at=self._clock())
            )
            return find_join_token(connection, token_id)

        return await self._storage.write(write)


def _no_entry(message: str) -> BooksError:
    return BooksError(message, code="bad_join_token", status=403, param="join_token")


_TOKENS: Final = select(
    schema.join_tokens,
    select(func.count())
    .select_from(schema.join_uses)
    .where(schema.join_uses.c.token_id == schema.join_tokens.c.id)
    .scalar_subquery()
    .label("uses"),
)


def find_join_token(connection: Connection, token_id: int) -> JoinToken:
    """The token with that id. Raises BooksError when there is none."""
    row = connection.execute(_TOKENS.where(schema.join_tokens.c.id == token_id)).one_or_none()
    if row is None:
        raise BooksError(
            f"there is no join token with the id {token_id}", code="unknown_join_token", status=404
        )
    return _token(row)


def insert_join_token(
    connection: Connection,
    mesh: Mesh,
    name: str,
    secret: str,
    now: int,
    expires_at: int | None,
    max_uses: int | None,
) -> JoinToken:
    """Stores a new token's hash, bound to the mesh, within the caller's transaction."""
    token_id = connection.execute(
        insert(schema.join_tokens)
        .values(
            hash=digest(secret, mesh.id),
            name=name,
            created_at=now,
            expires_at=expires_at,
            max_uses=max_uses,
        )
        .returning(schema.join_tokens.c.id)
    ).scalar_one()
    return find_join_token(connection, token_id)


def _token(row: Row[Any]) -> JoinToken:
    return JoinToken(
        id=row.id,
        name=row.name,
        created_at=row.created_at,
        expires_at=row.expires_at,
        max_uses=row.max_uses,
        uses=row.uses,
        revoked_at=row.revoked_at,
    )


class Settings:
    """JSON values by name, shared by all trackers of the mesh and cached in memory."""

    def __init__(self, storage: Storage, watch: Watch, clock: Clock) -> None:
        self._storage = storage
        self._watch = watch
        self._clock = clock
        self._values: dict[str, Any] | None = None
        self._generation = 0
        watch.on_change("settings", self._drop)

    def _drop(self) -> None:
        self._values = None
        self._generation += 1

    async def all(self) -> dict[str, Any]:
        """Every setting, at most STALE_MS behind what another tracker has set. Do not change the values."""
        await self._watch.ensure()
        if self._values is None:
            generation = self._generation
            rows = await self._storage.read(
                lambda connection: connection.execute(
                    select(schema.settings.c.name, schema.settings.c.value)
                ).all()
            )
            values = {name: json.loads(value) for name, value in rows}
            if generation != self._generation:
                return values
            self._values = values
        return self._values

    async def get(self, name: str, default: Any = None) -> Any:
        """One setting, or `default` when it was never set."""
        return (await self.all()).get(name, default)

    async def put(self, name: str, value: Any) -> None:
        """Keeps a JSON value under `name`; all trackers see it within 2 seconds, this one at once."""
        text = _as_text(name, value)
        await self._write(lambda connection: self._set(connection, name, text))

    async def change(self, name: str, change: Callable[[Any], Any]) -> Any:
        """Keeps `change(value)` in one transaction, so that no change of another tracker is lost; returns it.

        `change` gets what is kept, or None, and runs in another thread; what it raises leaves all as it is.
        """

        def write(connection: Connection) -> Any:
            query = select(schema.settings.c.value).where(schema.settings.c.name == name)
            kept = connection.execute(query).scalar_one_or_none()
            value = change(None if kept is None else json.loads(kept))
            self._set(connection, name, _as_text(name, value))
            return value

        return await self._write(write)

    async def delete(self, name: str) -> None:
        """Forgets a setting; its default holds again."""
        await self._write(
            lambda connection: connection.execute(
                schema.settings.delete().where(schema.settings.c.name == name)
            )
        )

    def _set(self, connection: Connection, name: str, text: str) -> None:
        row = {"name": name, "value": text, "changed_at": self._clock()}
        upsert(connection, schema.settings, [row], replace=("value", "changed_at"))

    async def _write(self, write: Callable[[Connection], T]) -> T:
        def alone(connection: Connection) -> T:
            # First: whoever changes settings at the same time waits for this row until it is committed.
            bump(connection, "settings")
            return write(connection)

        done = await self._storage.write(alone)
        self._watch.changed("settings")
        return done


def _as_text(name: str, value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"), sort_keys=True, allow_nan=False)
    if len(text) > MAX_SETTING_BYTES:
        raise BooksError(
            f"setting {name!r} has {len(text)} bytes; at most {MAX_SETTING_BYTES} are kept",
            code="bad_setting",
            param=name,
        )
    return text
