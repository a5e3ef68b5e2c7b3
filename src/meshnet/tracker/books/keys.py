"""API keys: who may call what. Secrets are shown once, stored hashed and found by their hash."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

from sqlalchemy import Connection, Row, insert, select, update

from meshnet.tracker.books import schema
from meshnet.tracker.books.records import BooksError, Clock, KeyInfo, Scope
from meshnet.tracker.books.secret import digest, new_secret, same
from meshnet.tracker.books.storage import Storage
from meshnet.tracker.books.watch import Watch, bump

CACHED_KEYS: Final = 4096
LIMITS: Final = ("monthly_budget", "total_budget", "requests_per_minute", "tokens_per_minute")
MAX_LIMIT: Final = 10**15

COLUMNS: Final = (
    select(schema.keys, schema.accounts.c.name.label("account"))
    .join(schema.accounts, schema.accounts.c.id == schema.keys.c.account_id)
    .order_by(schema.keys.c.id)
)


class Keys:
    """The keys as stored, with a bounded cache of those in use."""

    def __init__(self, storage: Storage, watch: Watch, clock: Clock) -> None:
        self._storage = storage
        self._watch = watch
        self._clock = clock
        self._cache: OrderedDict[str, KeyInfo] = OrderedDict()
        self._generation = 0
        self._used: dict[int, int] = {}
        watch.on_change("keys", self._drop)

    def _drop(self) -> None:
        self._cache.clear()
        self._generation += 1

    async def authenticate(self, secret: str) -> KeyInfo | None:
        """The key that `secret` opens; None when there is none, or it has expired or was revoked.

        Answers from memory; a revocation in this process counts at once, elsewhere within 2 seconds.
        """
        await self._watch.ensure()
        wanted = digest(secret)
        key = self._cache.get(wanted)
        if key is None:
            key = await self._load(wanted)
            if key is None:
                return None
        else:
            self._cache.move_to_end(wanted)
        now = self._clock()
        if key.revoked_at is not None or (key.expires_at is not None and key.expires_at <= now):
            return None
        self._used[key.id] = now
        return key

    async def _load(self, wanted: str) -> KeyInfo | None:
        generation = self._generation
        row = await self._storage.read(
            lambda connection: connection.execute(COLUMNS.where(schema.keys.c.hash == wanted)).one_or_none()
        )
        # The index has found the row already; comparing in constant time costs nothing and depends on no
        # index.
        if row is None or not same(row.hash, wanted):
            return None
        key = _key(row)
        if generation == self._generation:
            self._cache[wanted] = key
            if len(self._cache) > CACHED_KEYS:
                self._cache.popitem(last=False)
        return key

    async def create(
        self,
        account: str,
        name: str,
        *,
        scope: Scope = "use",
        models: Iterable[str] | None = None,
        expires_at: int | None = None,
        monthly_budget: int | None = None,
        total_budget: int | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
    ) -> tuple[KeyInfo, str]:
        """Makes a key on the account of that name. Returns it with its secret, which is never shown again.

        Raises BooksError for an unknown account, a negative limit or a time that has passed.
        """
        values = _checked(
            {
                "name": name,
                "scope": scope,
                "models": models,
                "expires_at": expires_at,
                "monthly_budget": monthly_budget,
                "total_budget": total_budget,
                "requests_per_minute": requests_per_minute,
                "tokens_per_minute": tokens_per_minute,
            },
            self._clock(),
        )
        secret = new_secret("mn-")
        key = await self._storage.write(
            lambda connection: insert_key(connection, account, secret, self._clock(), **values)
        )
        return key, secret

    async def list(self, account: str | None = None) -> list[KeyInfo]:
        """All keys, revoked ones too, or those of one account."""
        query = COLUMNS if account is None else COLUMNS.where(schema.accounts.c.name == account)
        rows = await self._storage.read(lambda connection: connection.execute(query).all())
        return [_key(row) for row in rows]

    async def get(self, key_id: int) -> KeyInfo:
        """One key. Raises BooksError when there is none."""
        return await self._storage.read(lambda connection: find_key(connection, key_id))

    async def update(self, key_id: int, changes: Mapping[str, Any]) -> KeyInfo:
        """Changes name, models, expires_at or limits (None.

        No limit). Raises BooksError for anything else.
        """
        fields = {"name", "models", "expires_at", *LIMITS}
        if unknown := sorted(set(changes) - fields):
            raise BooksError(
                f"{unknown[0]} of a key cannot be changed; changeable: {', '.join(sorted(fields))}",
                code="bad_key",
                param=unknown[0],
            )
        values = _checked(changes, self._clock())
        return await self._change(key_id, values)

    async def revoke(self, key_id: int) -> KeyInfo:
        """Ends a key for ever. Calls in flight go on; revoking it again changes nothing."""
        return await self._change(key_id, {"revoked_at": self._clock()})

    async def _change(self, key_id: int, values: Mapping[str, Any]) -> KeyInfo:
        def write(connection: Connection) -> KeyInfo:
            key = find_key(connection, key_id)
            if "revoked_at" in values and key.revoked_at is not None:
                return key
            if values:
                connection.execute(update(schema.keys).where(schema.keys.c.id == key_id).values(**values))
                bump(connection, "keys")
            return find_key(connection, key_id)

        key = await self._storage.write(write)
        self._watch.changed("keys")
        return key

    async def save_last_used(self) -> None:
        """Writes down when the keys were last used.

        Called by housekeeping, so that no request waits for it.
        """
        if not self._used:
            return
        used, self._used = self._used, {}

        def write(connection: Connection) -> None:
            for key_id, at in sorted(used.items()):
                connection.execute(
                    update(schema.keys).where(schema.keys.c.id == key_id).values(last_used_at=at)
                )

        await self._storage.write(write, durable=False)


def find_key(connection: Connection, key_id: int) -> KeyInfo:
    """The key with that id. Raises BooksError when there is none."""
    row = connection.execute(COLUMNS.where(schema.keys.c.id == key_id)).one_or_none()
    if row is None:
        raise BooksError(f"there is no key with the id {key_id}", code="unknown_key", status=404, param="key")
    return _key(row)


def insert_key(connection: Connection, account: str, secret: str, now: int, **values: Any) -> KeyInfo:
    """Stores a new key's hash on an account, within the caller's transaction."""
    account_id = connection.execute(
        select(schema.accounts.c.id).where(schema.accounts.c.name == account)
    ).scalar_one_or_none()
    if account_id is None:
        raise BooksError(
            f"there is no account named {account!r}", code="unknown_account", status=404, param="account"
        )
    key_id = connection.execute(
        insert(schema.keys)
        .values(account_id=account_id, hash=digest(secret), created_at=now, **values)
        .returning(schema.keys.c.id)
    ).scalar_one()
    return find_key(connection, key_id)


def _checked(values: Mapping[str, Any], now: int) -> dict[str, Any]:
    checked = dict(values)
    name = checked.get("name")
    if name is not None and not 1 <= len(name.strip()) <= 100:
        raise BooksError(
            f"name {name!r} of a key must have 1 to 100 characters", code="bad_key", param="name"
        )
    if checked.get("scope", "use") not in ("use", "admin"):
        raise BooksError(
            f"scope {checked['scope']!r} is not one of use, admin", code="bad_key", param="scope"
        )
    for field in LIMITS:
        value = checked.get(field)
        if value is not None and not 0 <= value <= MAX_LIMIT:
            raise BooksError(
                f"{field} is {value}; it lies between 0 and {MAX_LIMIT}, or is left out for no limit",
                code="bad_key",
                param=field,
            )
    expires_at = checked.get("expires_at")
    if expires_at is not None and expires_at <= now:
        raise BooksError(
            f"expires_at is {expires_at}, which has passed (now: {now}); to end a key, revoke it",
            code="bad_key",
            param="expires_at",
        )
    if checked.get("models") is not None:
        checked["models"] = json.dumps(sorted({model.lower() for model in checked["models"]}))
    return checked


def _key(row: Row[Any]) -> KeyInfo:
    return KeyInfo(
        id=row.id,
        name=row.name,
        account_id=row.account_id,
        account=row.account,
        scope=row.scope,
        created_at=row.created_at,
        monthly_budget=row.monthly_budget,
        total_budget=row.total_budget,
        requests_per_minute=row.requests_per_minute,
        tokens_per_minute=row.tokens_per_minute,
        models=None if row.models is None else tuple(json.loads(row.models)),
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
    )
