"""Alembic's environment: it runs revisions on the connection that `migrations` gives it, in one transaction."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
