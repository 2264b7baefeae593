"""`make migration`: what a new revision of the database must do.

Run it whenever a table changes. A released revision stays as it is. While all of them do not lead to the code's tables,
this shows the operations that the next one needs, and fails. How it carries rows over is yours to write.
"""

import sys
import tempfile

import sqlalchemy
from alembic.autogenerate import produce_migrations, render_python_code
from alembic.migration import MigrationContext

from coordinator.store.database import make_tables, open_engines
from coordinator.store.tables import METADATA


def missing(tables: sqlalchemy.MetaData = METADATA) -> str:
    """The operations from what the revisions make to these tables, as Python; empty when there are none."""
    with tempfile.TemporaryDirectory() as folder:
        engines = open_engines(f"sqlite:///{folder}/new.db", create=True)
        make_tables(engines)
        with engines.reader.connect() as connection:
            migrations = produce_migrations(MigrationContext.configure(connection), tables)
        engines.close()
    return "" if migrations.upgrade_ops.is_empty() else render_python_code(migrations.upgrade_ops)


if __name__ == "__main__":
    if operations := missing():
        sys.exit(f"write a revision in coordinator/store/revisions/versions with these operations:\n{operations}")
