"""What Alembic runs around the revisions: on the connection, and in the transaction, that `migrations` hands it."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
