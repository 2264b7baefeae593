"""The first tables: those of `tables.py`, until a release fixes them.

Whoever first changes a table after that release copies the released `tables.py` beside this file, makes those tables
here, and writes the next revision.
"""

from __future__ import annotations

from alembic import op

from coordinator.store.tables import METADATA

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make every table."""
    METADATA.create_all(op.get_bind(), checkfirst=False)


def downgrade() -> None:
    """Drop every table, with its indexes."""
    METADATA.drop_all(op.get_bind(), checkfirst=False)
