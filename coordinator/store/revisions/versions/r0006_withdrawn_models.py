"""Roll-outs name released versions, and their maker and gate, and may withdraw one; counts of versions in use."""

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


def _column(name: str, kind: sa.types.TypeEngine[Any], comment: str) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, comment=comment)


def upgrade() -> None:
    """Let roll-outs name released versions, and make the table of counts."""
    with op.batch_alter_table("model_roll_outs") as table:
        for name, comment in _ADDED.items():
            table.add_column(sa.Column(name, sa.Text(), nullable=False, comment=comment, server_default=""))
        table.drop_constraint(op.f(_KEY), type_="foreignkey")
        table.create_foreign_key(op.f(_KEY), "model_releases", _VERSION, _VERSION)
        _comment(table, _SHARE, _NEW_SHARE)
    with op.batch_alter_table("model_roll_outs") as table:
        for name in _ADDED:
            table.alter_column(name, server_default=None)
    op.create_table(
        "model_counts",
        _column("population", sa.String(200), "whose check-ins"),
        _column("name", sa.String(64), "name of the model"),
        _column("number", sa.Integer(), "of the version"),
        _column("day", sa.String(10), "of the check-ins, UTC, as 2026-11-26"),
        _column("refused", sa.Boolean(), "whether devices stated that they refused it, or else that they have it"),
        _column("count", sa.BigInteger(), "check-ins that stated so"),
        sa.ForeignKeyConstraint(
            _VERSION, [f"model_releases.{name}" for name in _VERSION], name=op.f("fk_model_counts_population")
        ),
        sa.PrimaryKeyConstraint(*_VERSION, "day", "refused", name=op.f("pk_model_counts")),
        comment="Counts of check-ins by the version of a model that devices stated; nothing of a single device",
    )


def downgrade() -> None:
    """Undo it; the counts are lost. Raises WrongRevision when a model was withdrawn, as devices would get it."""
    query = sa.select(_ROLL_OUTS.c.name).where(_ROLL_OUTS.c.share == 0)
    if name := op.get_bind().execute(query).scalars().first():
        raise WrongRevision(f"model {name}: revision 0005 knows no withdrawn versions; nothing was changed")
    op.drop_table("model_counts")
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
