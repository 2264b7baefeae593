"""Privacy budgets of populations."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def _column(name: str, kind: sa.types.TypeEngine[Any], comment: str) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, comment=comment)


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "budgets",
        _column("population", sa.String(200), "whose tasks share it"),
        _column("epsilon", sa.Float(), "most that all tasks together may reveal of a device"),
        _column("delta", sa.Float(), "the chance that this leaves open"),
        _column("minimum_devices", sa.Integer(), "least devices of a group that a question may show"),
        sa.PrimaryKeyConstraint("population", name=op.f("pk_budgets")),
        comment="Privacy budgets of populations; whoever adds a task or changes a budget holds the table meanwhile",
    )


def downgrade() -> None:
    """Undo it; the budgets are lost, and tasks are no longer refused for them."""
    op.drop_table("budgets")
