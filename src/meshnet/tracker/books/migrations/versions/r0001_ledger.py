"""Accounts, keys, prices, calls and the append-only ledger; the mesh, its join tokens and its trackers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Big = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

APPEND_ONLY_SQLITE = """
CREATE TRIGGER entries_refuse_{verb} BEFORE {verb} ON entries
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only: entries cannot be changed or deleted'); END
"""

APPEND_ONLY_POSTGRESQL = (
    """
    CREATE FUNCTION meshnet_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN RAISE EXCEPTION 'the ledger is append-only: entries cannot be changed or deleted'; END $$
    """,
    "CREATE TRIGGER entries_refuse_change BEFORE UPDATE OR DELETE ON entries "
    "FOR EACH ROW EXECUTE FUNCTION meshnet_append_only()",
    "CREATE TRIGGER entries_refuse_truncate BEFORE TRUNCATE ON entries "
    "FOR EACH STATEMENT EXECUTE FUNCTION meshnet_append_only()",
)


def row_id() -> sa.Column[int]:
    return sa.Column("id", Big, primary_key=True, autoincrement=True)


def upgrade() -> None:
    accounts_and_keys()
    calls_and_entries()
    mesh_and_trackers()
    if op.get_bind().dialect.name == "postgresql":
        for statement in APPEND_ONLY_POSTGRESQL:
            op.execute(statement)
    else:
        for verb in ("UPDATE", "DELETE"):
            op.execute(APPEND_ONLY_SQLITE.format(verb=verb))


def accounts_and_keys() -> None:
    op.create_table(
        "accounts",
        row_id(),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("unlimited", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "keys",
        row_id(),
        sa.Column("hash", sa.Text, nullable=False, unique=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("account_id", Big, sa.ForeignKey("accounts.id"), nullable=False, index=True),
        sa.Column("scope", sa.Text, nullable=False),
        sa.Column("monthly_budget", sa.BigInteger),
        sa.Column("total_budget", sa.BigInteger),
        sa.Column("requests_per_minute", sa.BigInteger),
        sa.Column("tokens_per_minute", sa.BigInteger),
        sa.Column("models", sa.Text),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("revoked_at", sa.BigInteger),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("last_used_at", sa.BigInteger),
        sa.CheckConstraint("scope IN ('use', 'admin')", name="scope"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "key_spending",
        sa.Column("key_id", Big, sa.ForeignKey("keys.id"), primary_key=True),
        sa.Column("period", sa.Text, primary_key=True),
        sa.Column("amount", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "prices",
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("valid_from", sa.BigInteger, primary_key=True),
        sa.Column("input", sa.BigInteger, nullable=False),
        sa.Column("output", sa.BigInteger, nullable=False),
        sa.CheckConstraint("input >= 0 AND output >= 0", name="positive"),
    )


def calls_and_entries() -> None:
    op.create_table(
        "calls",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("account_id", Big, sa.ForeignKey("accounts.id"), nullable=False),
        sa.Column("key_id", Big, sa.ForeignKey("keys.id"), nullable=False, index=True),
        sa.Column("tracker", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("price_input", sa.BigInteger, nullable=False),
        sa.Column("price_output", sa.BigInteger, nullable=False),
        sa.Column("mesh_share", sa.Integer, nullable=False),
        sa.Column("reserved", sa.BigInteger, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text),
        sa.Column("reason", sa.Text),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("output_tokens", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("charge", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("accepted_at", sa.BigInteger, nullable=False),
        sa.Column("ended_at", sa.BigInteger, index=True),
        sa.CheckConstraint("status IN ('open', 'held', 'settled', 'released', 'refunded')", name="status"),
    )
    unfinished = sa.text("status IN ('open', 'held')")
    op.create_index(
        "ix_calls_unfinished", "calls", ["tracker"], sqlite_where=unfinished, postgresql_where=unfinished
    )
    op.create_table(
        "work",
        sa.Column("call_id", sa.Text, sa.ForeignKey("calls.id"), primary_key=True),
        sa.Column("line", sa.Integer, primary_key=True),
        sa.Column("node_id", sa.Text, nullable=False, index=True),
        sa.Column("layers", sa.Integer, nullable=False),
        sa.Column("prefill_tokens", sa.BigInteger, nullable=False),
        sa.Column("decode_tokens", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "entries",
        row_id(),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("call_id", sa.Text, sa.ForeignKey("calls.id")),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("line", sa.Integer, nullable=False),
        sa.Column("part", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("amount", sa.BigInteger, nullable=False),
        sa.Column("why", sa.Text),
        sa.Column("reference", sa.Text, unique=True),
        sa.UniqueConstraint("call_id", "kind", "line", name="uq_entries_call"),
        sa.CheckConstraint("amount >= 0", name="amount"),
        sa.CheckConstraint("source <> target", name="books"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "balances",
        sa.Column("book", sa.Text, primary_key=True),
        sa.Column("amount", sa.BigInteger, nullable=False),
    )


def mesh_and_trackers() -> None:
    op.create_table(
        "settings",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
        sa.Column("changed_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "mesh",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("signing_secret", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "join_tokens",
        row_id(),
        sa.Column("hash", sa.Text, nullable=False, unique=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("max_uses", sa.Integer),
        sa.Column("revoked_at", sa.BigInteger),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "join_uses",
        sa.Column("token_id", Big, sa.ForeignKey("join_tokens.id"), primary_key=True),
        sa.Column("node_id", sa.Text, primary_key=True),
        sa.Column("first_at", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "trackers",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("info", sa.Text, nullable=False),
        sa.Column("beats", sa.BigInteger, nullable=False),
        sa.Column("started_at", sa.BigInteger, nullable=False),
        sa.Column("ended_at", sa.BigInteger),
    )
    op.create_table(
        "versions",
        sa.Column("topic", sa.Text, primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
    )
