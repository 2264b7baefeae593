"""`make migration`: the tables of docs/database.md, written anew from `tables.py`, and what a new revision must do.

Run it whenever a table changes. Revisions stay as they are: while they do not lead to the tables of the code, this
shows the operations that the next one needs, and fails. How it carries rows over is yours to write.
"""

import sys
import tempfile
from pathlib import Path

import sqlalchemy
from alembic.autogenerate import produce_migrations, render_python_code
from alembic.migration import MigrationContext

from coordinator.store.database_engines import open_engines
from coordinator.store.migrations import make_tables
from coordinator.store.tables import METADATA

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "database.md"
HEADING = "## Tables\n"


def missing(tables: sqlalchemy.MetaData = METADATA) -> str:
    """The operations from what the revisions make to these tables, as Python; empty when there are none."""
    with tempfile.TemporaryDirectory() as folder:
        engines = open_engines(f"sqlite:///{folder}/new.db", create=True)
        make_tables(engines)
        with engines.reader.connect() as connection:
            migrations = produce_migrations(MigrationContext.configure(connection), tables)
        engines.close()
    return "" if migrations.upgrade_ops.is_empty() else render_python_code(migrations.upgrade_ops)


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
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")
    if operations := missing():
        sys.exit(f"write a revision in coordinator/store/revisions/versions with these operations:\n{operations}")
