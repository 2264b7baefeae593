"""Alerts: what was raised and cleared when, and whether a webhook is still to be told."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def _column(name: str, kind: sa.types.TypeEngine[Any], comment: str, *, null: bool = False) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=null, comment=comment)


def upgrade() -> None:
    """Make the table."""
    op.create_table(
        "alerts",
        _column("id", sa.String(16), "opaque id"),
        _column("kind", sa.String(32), "what is wrong: the reason of a stalled task, expires, unreadable or disk-full"),
        _column("task", sa.String(32), "the task; null where it is about none", null=True),
        _column("subject", sa.Text(), "what it is about beside the task, such as the TLS certificate; often empty"),
        _column("text", sa.Text(), "a sentence for people, of when it was raised"),
        _column("remedy", sa.Text(), "what to do, where the sentence does not say it"),
        _column("raised_at", sa.Float(), "seconds since 1970"),
        _column("cleared_at", sa.Float(), "seconds since 1970; null while it is open", null=True),
        _column("raised_due", sa.Boolean(), "whether the webhook is still to be told that it was raised"),
        _column("cleared_due", sa.Boolean(), "whether the webhook is still to be told that it was cleared"),
        sa.ForeignKeyConstraint(["task"], ["tasks.id"], name=op.f("fk_alerts_task")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alerts")),
        comment="What needed an operator: raised once and cleared once; one alert of a kind, task and subject is open",
    )
    op.create_index("alerts_cleared", "alerts", ["cleared_at"])


def downgrade() -> None:
    """Undo it; the alerts are lost, and events of which the webhook was not told."""
    op.drop_table("alerts")
