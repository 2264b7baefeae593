"""`make migration`: the initial migration and the tables of docs/database.md, written anew from `tables.py`.

Run it whenever a table changes. Once a version has been released its migrations stay as they are, and a change of a
table gets a file of its own.
"""

import re
import subprocess
import sys
from pathlib import Path

import sqlalchemy
from alembic.autogenerate import produce_migrations, render_python_code
from alembic.migration import MigrationContext

from coordinator.store.migrations import HEAD
from coordinator.store.tables import METADATA

ROOT = Path(__file__).parents[1]
MIGRATION = ROOT / "coordinator" / "store" / "revisions" / "versions" / "r0001_initial.py"
DOCUMENT = ROOT / "docs" / "database.md"
HEADING = "## Tables\n"
TEMPLATE = '''"""The tables of version 0.1. Written by `make migration`."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = None


def upgrade() -> None:
    """Make every table."""
{up}


def downgrade() -> None:
    """Drop every table."""
{down}
'''


def migration() -> str:
    """The migration's text in the one format."""
    with sqlalchemy.create_engine("sqlite://").connect() as empty:
        made = produce_migrations(MigrationContext.configure(empty), METADATA)
    up, down = (
        re.sub(r"^ *# ###.*\n?", "", render_python_code(operations), flags=re.MULTILINE)
        for operations in (made.upgrade_ops, made.downgrade_ops)
    )
    text = TEMPLATE.format(revision=HEAD, up=up, down=down)
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(MIGRATION), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def document() -> str:
    """The document with its section of tables, the last one, made anew."""
    tables = [
        f"### {table.name}\n\n{table.comment}.\n\n| column | type | meaning |\n|---|---|---|\n"
        + "".join(f"| `{column.name}` | {_kind(column)} | {column.comment} |\n" for column in table.columns)
        for table in sorted(METADATA.tables.values(), key=lambda table: table.name)
    ]
    return DOCUMENT.read_text().partition(HEADING)[0] + "\n".join([HEADING, *tables])


def _kind(column: sqlalchemy.Column) -> str:
    marks = [f"→ {key.column}" for key in column.foreign_keys]
    marks += ["key"] * column.primary_key + ["or null"] * bool(column.nullable)
    return " ".join([str(column.type).lower(), *marks])


if __name__ == "__main__":
    for path, text in ((MIGRATION, migration()), (DOCUMENT, document())):
        path.write_text(text)
        print(f"wrote {path}")
