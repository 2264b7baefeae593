"""A task's settings in one column of JSON, where each had a column of its own."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from coordinator.errors import WrongRevision

revision = "0002"
down_revision = "0001"

_PARTS = ("secagg", "buffered", "privacy")
"""Those that a task may lack."""
_INTEGERS = ("goal", "minimum", "rounds", "max_attempts", "min_examples", "min_separation_rounds")
_FLOATS = ("over_selection", "selection_timeout_s", "reporting_deadline_s", "max_loss_growth", "min_separation_s")
_JSON = ("requires", "on_device", "formats", "budget", "clear", "schedule")
_COLUMNS: dict[str, sa.types.TypeEngine[Any]] = {
    **dict.fromkeys(_INTEGERS, sa.Integer()),
    **dict.fromkeys(_FLOATS, sa.Float()),
    **dict.fromkeys(_JSON, sa.JSON()),
    **dict.fromkeys(_PARTS, sa.JSON(none_as_null=True)),
    "seed": sa.BigInteger(),
    "same_cohort": sa.Boolean(),
}
_TASKS = sa.table(
    "tasks",
    sa.column("id", sa.String()),
    sa.column("settings", sa.JSON()),
    *(sa.column(name, kind) for name, kind in _COLUMNS.items()),
)


def upgrade() -> None:
    """Gather the columns. Values pass through Python: SQLite's own functions of JSON round floats."""
    comment = "the settings of its rounds, every one; the population has a column of its own"
    op.add_column("tasks", sa.Column("settings", sa.JSON(), comment=comment))
    for row in op.get_bind().execute(sa.select(_TASKS.c.id, *(_TASKS.c[name] for name in _COLUMNS))).all():
        _write(row.id, settings={name: getattr(row, name) for name in _COLUMNS})
    with op.batch_alter_table("tasks") as tasks:
        tasks.alter_column("settings", nullable=False)
        for name in _COLUMNS:
            tasks.drop_column(name)


def downgrade() -> None:
    """Spread them again. Raises WrongRevision for a task with a setting that had no column."""
    for name, kind in _COLUMNS.items():
        op.add_column("tasks", sa.Column(name, kind))
    for row in op.get_bind().execute(sa.select(_TASKS.c.id, _TASKS.c.settings)).all():
        if unlike := sorted(row.settings.keys() ^ _COLUMNS.keys()):
            raise WrongRevision(f"task {row.id}: revision 0001 differs in {', '.join(unlike)}; nothing was changed")
        _write(row.id, **row.settings)
    with op.batch_alter_table("tasks") as tasks:
        tasks.drop_column("settings")
        for name in _COLUMNS:
            tasks.alter_column(name, nullable=name in _PARTS)


def _write(task_id: str, **values: object) -> None:
    op.execute(sa.update(_TASKS).where(_TASKS.c.id == task_id).values(**values))
