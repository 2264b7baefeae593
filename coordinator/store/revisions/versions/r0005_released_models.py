"""Models that were released for apps, and their roll-outs."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from coordinator.errors import WrongRevision

revision = "0005"
down_revision = "0004"

_RELEASES = sa.table("model_releases", sa.column("name", sa.String()))
_ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _column(name: str, kind: sa.types.TypeEngine[Any], comment: str) -> sa.Column[Any]:
    return sa.Column(name, kind, nullable=False, comment=comment)


def upgrade() -> None:
    """Make both tables."""
    op.create_table(
        "model_releases",
        _column("population", sa.String(200), "whose devices may use the model"),
        _column("name", sa.String(64), "name of the model"),
        _column("number", sa.Integer(), "of the version: 1, 2, 3 … of the name"),
        _column("plan_sha256", sa.String(64), "has the predict graphs, the schema and the frozen vectors"),
        _column("parameters_sha256", sa.String(64), "the model: a checkpoint with its parameters alone"),
        _column("release", sa.JSON(), "the statement, its signer and the signature"),
        _column("created_at", sa.Float(), "seconds since 1970"),
        sa.ForeignKeyConstraint(["population"], ["populations.name"], name=op.f("fk_model_releases_population")),
        sa.ForeignKeyConstraint(["plan_sha256"], ["blobs.sha256"], name=op.f("fk_model_releases_plan_sha256")),
        sa.ForeignKeyConstraint(
            ["parameters_sha256"], ["blobs.sha256"], name=op.f("fk_model_releases_parameters_sha256")
        ),
        sa.PrimaryKeyConstraint("population", "name", "number", name=op.f("pk_model_releases")),
        comment="Versions of models that apps may use; rows are only ever added",
    )
    op.create_table(
        "model_roll_outs",
        _column("id", _ROW_ID, "row id, in order of time"),
        _column("population", sa.String(200), "whose devices"),
        _column("name", sa.String(64), "name of the model"),
        _column("number", sa.Integer(), "of the version"),
        _column("share", sa.Float(), "of the devices that are given it, above 0 and up to 1"),
        _column("kind", sa.String(16), "promote or roll-back"),
        _column("at", sa.Float(), "seconds since 1970"),
        sa.ForeignKeyConstraint(["population"], ["populations.name"], name=op.f("fk_model_roll_outs_population")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_model_roll_outs")),
        comment="Which versions devices were given; rows are only ever added, and the newest of a model decides",
    )
    op.create_index("model_roll_outs_of", "model_roll_outs", ["population", "name"])


def downgrade() -> None:
    """Drop them. Raises WrongRevision when a model was released."""
    if name := op.get_bind().execute(sa.select(_RELEASES.c.name)).scalars().first():
        raise WrongRevision(f"model {name}: revision 0004 knows no released models; nothing was changed")
    op.drop_table("model_roll_outs")
    op.drop_table("model_releases")
