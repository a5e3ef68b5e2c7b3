"""The billing guard's memory: suspect calls, their checks, and what happened to nodes because of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Big = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "suspects",
        sa.Column("call_id", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("route", sa.Text, nullable=False),
        sa.Column("cause", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("opened_at", sa.BigInteger, nullable=False),
        sa.Column("closed_at", sa.BigInteger),
    )
    unclosed = sa.text("closed_at IS NULL")
    op.create_index(
        "ix_suspects_unclosed", "suspects", ["opened_at"], sqlite_where=unclosed, postgresql_where=unclosed
    )
    op.create_table(
        "checks",
        sa.Column("id", Big, primary_key=True, autoincrement=True),
        sa.Column("call_id", sa.Text, nullable=False, index=True),
        sa.Column("cause", sa.Text, nullable=False),
        sa.Column("route", sa.Text, nullable=False),
        sa.Column("verdict", sa.Text, nullable=False),
        sa.Column("worst_gap", sa.Text, nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("at", sa.BigInteger, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "events",
        sa.Column("id", Big, primary_key=True, autoincrement=True),
        sa.Column("at", sa.BigInteger, nullable=False, index=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("node_id", sa.Text),
        sa.Column("call_id", sa.Text),
        sa.Column("detail", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
