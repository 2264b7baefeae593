"""Notices and tallies between replicas, and a steady clock of each."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _column(name: str, kind: sa.types.TypeEngine[Any], comment: str) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, comment=comment)


def upgrade() -> None:
    """Make the tables and the column."""
    comment = "a clock of its own that nobody sets, in seconds, at its last beat"
    with op.batch_alter_table("replicas") as table:
        table.add_column(sa.Column("steady", sa.Float(), nullable=False, comment=comment, server_default="0"))
    with op.batch_alter_table("replicas") as table:
        table.alter_column("steady", server_default=None)
    op.create_table(
        "notices",
        _column("population", sa.String(200), "whose devices they send away"),
        _column("replica", sa.String(8), "replica that drove the population and wrote this"),
        _column("version", sa.BigInteger(), "counts up with every change"),
        _column("said", sa.Text(), "JSON: needs of active tasks, generation of return tokens, end of the idle queue"),
        sa.ForeignKeyConstraint(["population"], ["populations.name"], name=op.f("fk_notices_population")),
        sa.PrimaryKeyConstraint("population", name=op.f("pk_notices")),
        comment="What decides which devices are sent away, for replicas that do not drive the population",
    )
    op.create_table(
        "tallies",
        _column("id", _SERIAL, "number of the row"),
        _column("population", sa.String(200), "whose devices they were"),
        _column("said", sa.Text(), "JSON: keyed digests of devices with their windows, and counts of obstacles"),
        sa.ForeignKeyConstraint(["population"], ["populations.name"], name=op.f("fk_tallies_population")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tallies")),
        comment="Devices that replicas sent away of populations which others drive; the driver counts and deletes them",
    )
    op.create_index("tallies_of", "tallies", ["population"])


def downgrade() -> None:
    """Undo it; what replicas have not told yet is lost."""
    op.drop_table("tallies")
    op.drop_table("notices")
    with op.batch_alter_table("replicas") as table:
        table.drop_column("steady")
