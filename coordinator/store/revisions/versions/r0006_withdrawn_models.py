"""Roll-outs name released versions, say who made them and what a gate compared, and may withdraw a version."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from coordinator.errors import WrongRevision

revision = "0006"
down_revision = "0005"

_ROLL_OUTS = sa.table("model_roll_outs", sa.column("name", sa.String()), sa.column("share", sa.Float()))
_KEY = "fk_model_roll_outs_population"
_VERSION = ["population", "name", "number"]
_SHARE = "of the devices that are given it, above 0 and up to 1"
_NEW_SHARE = "of the devices that are given it, up to 1; 0 withdraws it, and no device is given any"
_ADDED = {
    "actor": "who did it, as in the audit log; empty before revision 0006",
    "gate": "what a gate compared, in words; empty without one",
}


def upgrade() -> None:
    """Let roll-outs name released versions."""
    with op.batch_alter_table("model_roll_outs") as table:
        for name, comment in _ADDED.items():
            table.add_column(sa.Column(name, sa.Text(), nullable=False, comment=comment, server_default=""))
        table.drop_constraint(op.f(_KEY), type_="foreignkey")
        table.create_foreign_key(op.f(_KEY), "model_releases", _VERSION, _VERSION)
        _comment(table, _SHARE, _NEW_SHARE)
    with op.batch_alter_table("model_roll_outs") as table:
        for name in _ADDED:
            table.alter_column(name, server_default=None)


def downgrade() -> None:
    """Undo it. Raises WrongRevision when a model was withdrawn: devices would be given it again."""
    query = sa.select(_ROLL_OUTS.c.name).where(_ROLL_OUTS.c.share == 0)
    if name := op.get_bind().execute(query).scalars().first():
        raise WrongRevision(f"model {name}: revision 0005 knows no withdrawn versions; nothing was changed")
    with op.batch_alter_table("model_roll_outs") as table:
        table.drop_constraint(op.f(_KEY), type_="foreignkey")
        table.create_foreign_key(op.f(_KEY), "populations", ["population"], ["name"])
        for name in _ADDED:
            table.drop_column(name)
        _comment(table, _NEW_SHARE, _SHARE)


def _comment(table: Any, before: str, after: str) -> None:
    table.alter_column(
        "share", existing_type=sa.Float(), existing_nullable=False, existing_comment=before, comment=after
    )
