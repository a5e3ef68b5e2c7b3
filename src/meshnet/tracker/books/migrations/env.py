"""Alembic's entry: runs on the connection (and in the transaction) that `migration.migrate` hands over."""

from __future__ import annotations

from alembic import context

from meshnet.tracker.books.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
