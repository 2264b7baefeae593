"""The origin of the models that a task evaluates."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from coordinator.errors import WrongRevision

revision = "0003"
down_revision = "0002"

_TASKS = sa.table("tasks", sa.column("id", sa.String()), sa.column("evaluates", sa.JSON(none_as_null=True)))


def upgrade() -> None:
    """Add the column."""
    comment = "where the models came from that it evaluates"
    op.add_column("tasks", sa.Column("evaluates", sa.JSON(none_as_null=True), nullable=True, comment=comment))


def downgrade() -> None:
    """Drop it. Raises WrongRevision for a task that has an origin."""
    query = sa.select(_TASKS.c.id).where(_TASKS.c.evaluates.is_not(None))
    if task := op.get_bind().execute(query).scalars().first():
        raise WrongRevision(f"task {task}: revision 0002 knows no evaluated models; nothing was changed")
    with op.batch_alter_table("tasks") as tasks:
        tasks.drop_column("evaluates")
