"""The regular evaluation of a task that trains."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from coordinator.errors import WrongRevision

revision = "0004"
down_revision = "0003"

_TASKS = sa.table("tasks", sa.column("id", sa.String()), sa.column("evaluation", sa.JSON(none_as_null=True)))


def upgrade() -> None:
    """Add the column."""
    comment = "how often its models are evaluated, by which bundle"
    op.add_column("tasks", sa.Column("evaluation", sa.JSON(none_as_null=True), nullable=True, comment=comment))


def downgrade() -> None:
    """Drop it. Raises WrongRevision for a task with such an evaluation."""
    query = sa.select(_TASKS.c.id).where(_TASKS.c.evaluation.is_not(None))
    if task := op.get_bind().execute(query).scalars().first():
        raise WrongRevision(f"task {task}: revision 0003 knows no regular evaluations; nothing was changed")
    with op.batch_alter_table("tasks") as tasks:
        tasks.drop_column("evaluation")
