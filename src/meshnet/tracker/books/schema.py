"""The tables as the newest migration leaves them. Times are unix ms, amounts micro-units, both 64 bits.

The migrations create them (`migrations/versions`); a test compares the two.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Big = BigInteger().with_variant(Integer(), "sqlite")
"""SQLite numbers rows by itself only for a column of type INTEGER, which is 64 bits wide there."""


def _id() -> Column[int]:
    return Column("id", Big, primary_key=True, autoincrement=True)


accounts = Table(
    "accounts",
    metadata,
    _id(),
    Column("name", Text, nullable=False, unique=True),
    Column("unlimited", Boolean, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)

keys = Table(
    "keys",
    metadata,
    _id(),
    Column("hash", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("account_id", ForeignKey("accounts.id"), nullable=False, index=True),
    Column("scope", Text, nullable=False),
    Column("monthly_budget", BigInteger),
    Column("total_budget", BigInteger),
    Column("requests_per_minute", BigInteger),
    Column("tokens_per_minute", BigInteger),
    Column("models", Text),
    Column("expires_at", BigInteger),
    Column("revoked_at", BigInteger),
    Column("created_at", BigInteger, nullable=False),
    Column("last_used_at", BigInteger),
    CheckConstraint("scope IN ('use', 'admin')", name="scope"),
    sqlite_autoincrement=True,
)

key_spending = Table(
    "key_spending",
    metadata,
    Column("key_id", ForeignKey("keys.id"), primary_key=True),
    Column("period", Text, primary_key=True),
    Column("amount", BigInteger, nullable=False),
)
"""What a key has spent or reserved: one row per month (`2026-11`, by acceptance) and one named `all`."""

prices = Table(
    "prices",
    metadata,
    Column("model", Text, primary_key=True),
    Column("valid_from", BigInteger, primary_key=True),
    Column("input", BigInteger, nullable=False),
    Column("output", BigInteger, nullable=False),
    CheckConstraint("input >= 0 AND output >= 0", name="positive"),
)

calls = Table(
    "calls",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", ForeignKey("accounts.id"), nullable=False),
    Column("key_id", ForeignKey("keys.id"), nullable=False, index=True),
    Column("tracker", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("price_input", BigInteger, nullable=False),
    Column("price_output", BigInteger, nullable=False),
    Column("mesh_share", Integer, nullable=False),
    Column("reserved", BigInteger, nullable=False),
    Column("status", Text, nullable=False),
    Column("outcome", Text),
    Column("reason", Text),
    Column("prompt_tokens", BigInteger, nullable=False, server_default="0"),
    Column("output_tokens", BigInteger, nullable=False, server_default="0"),
    Column("charge", BigInteger, nullable=False, server_default="0"),
    Column("accepted_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger, index=True),
    CheckConstraint("status IN ('open', 'held', 'settled', 'released', 'refunded')", name="status"),
    Index(
        "ix_calls_unfinished",
        "tracker",
        sqlite_where=text("status IN ('open', 'held')"),
        postgresql_where=text("status IN ('open', 'held')"),
    ),
)

work = Table(
    "work",
    metadata,
    Column("call_id", ForeignKey("calls.id"), primary_key=True),
    Column("line", Integer, primary_key=True),
    Column("node_id", Text, nullable=False, index=True),
    Column("layers", Integer, nullable=False),
    Column("prefill_tokens", BigInteger, nullable=False),
    Column("decode_tokens", BigInteger, nullable=False),
)

entries = Table(
    "entries",
    metadata,
    _id(),
    Column("at", BigInteger, nullable=False),
    Column("call_id", ForeignKey("calls.id")),
    Column("kind", Text, nullable=False),
    Column("line", Integer, nullable=False),
    Column("part", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("amount", BigInteger, nullable=False),
    Column("why", Text),
    Column("reference", Text, unique=True),
    UniqueConstraint("call_id", "kind", "line", name="uq_entries_call"),
    CheckConstraint("amount >= 0", name="amount"),
    CheckConstraint("source <> target", name="books"),
    sqlite_autoincrement=True,
)
"""Append-only: triggers refuse UPDATE and DELETE on both databases."""

balances = Table(
    "balances",
    metadata,
    Column("book", Text, primary_key=True),
    Column("amount", BigInteger, nullable=False),
)
"""Sums of the entries, kept in the same transactions; `ledger check` proves them."""

settings = Table(
    "settings",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
    Column("changed_at", BigInteger, nullable=False),
)

mesh = Table(
    "mesh",
    metadata,
    Column("id", Text, primary_key=True),
    Column("signing_secret", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
)

join_tokens = Table(
    "join_tokens",
    metadata,
    _id(),
    Column("hash", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("max_uses", Integer),
    Column("revoked_at", BigInteger),
    sqlite_autoincrement=True,
)

join_uses = Table(
    "join_uses",
    metadata,
    Column("token_id", ForeignKey("join_tokens.id"), primary_key=True),
    Column("node_id", Text, primary_key=True),
    Column("first_at", BigInteger, nullable=False),
)

trackers = Table(
    "trackers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("url", Text, nullable=False),
    Column("info", Text, nullable=False),
    Column("beats", BigInteger, nullable=False),
    Column("started_at", BigInteger, nullable=False),
    Column("ended_at", BigInteger),
)

versions = Table(
    "versions",
    metadata,
    Column("topic", Text, primary_key=True),
    Column("version", BigInteger, nullable=False),
)
"""A counter per cached topic (keys, prices, settings): trackers poll it and drop what they cached."""

suspects = Table(
    "suspects",
    metadata,
    Column("call_id", Text, primary_key=True),
    Column("model", Text, nullable=False),
    Column("route", Text, nullable=False),
    Column("cause", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("opened_at", BigInteger, nullable=False),
    Column("closed_at", BigInteger),
    Index(
        "ix_suspects_unclosed",
        "opened_at",
        sqlite_where=text("closed_at IS NULL"),
        postgresql_where=text("closed_at IS NULL"),
    ),
)

checks = Table(
    "checks",
    metadata,
    _id(),
    Column("call_id", Text, nullable=False, index=True),
    Column("cause", Text, nullable=False),
    Column("route", Text, nullable=False),
    Column("verdict", Text, nullable=False),
    Column("worst_gap", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Column("at", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)

events = Table(
    "events",
    metadata,
    _id(),
    Column("at", BigInteger, nullable=False, index=True),
    Column("kind", Text, nullable=False),
    Column("node_id", Text),
    Column("call_id", Text),
    Column("detail", Text, nullable=False),
    sqlite_autoincrement=True,
)
