"""Migrations: the revision of a database's tables, and the way to another one. Alembic does the work.

The revisions lie in the folder `revisions`. One that was released stays as it is; a change of `tables.py` then gets
one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import sqlalchemy
from sqlalchemy.engine import Connection

from coordinator.errors import MissingStore, WrongRevision
from coordinator.failpoints import reach
from coordinator.store.database_engines import Engines, open_engines

HEAD = "0001"
"""The revision that this code works with."""
BASE = "base"
"""The revision of a database without tables."""
UNKNOWN = "unknown"
"""The revision of tables that are not a coordinator's."""
SCRIPTS = "coordinator.store:revisions"
"""Where Alembic finds the revisions."""
_LOCK = 0x6D7573746572
"""Key of the advisory lock under which PostgreSQL's tables are made and changed."""


@dataclass(frozen=True, slots=True)
class Migration:
    """The revisions before and after `migrate`."""

    before: str
    after: str


def migrate(url: str, to: str = HEAD) -> Migration:
    """Bring an existing database to revision `to`, up or down, in one transaction. No coordinator may run on it.

    Going down loses the contents of the tables and columns that go; BASE has none. Raises MissingStore and
    UnsupportedDatabase; WrongRevision when there is no such revision, or the database is at an unknown one.
    """
    engines = open_engines(url, create=False, bounded=False)  # a change of a large table takes its time
    with engines.opening(), _changing(engines) as connection:
        before = revision_of(connection)
        _run(connection, before, to, engines.name)
        after = revision_of(connection)
    engines.close()
    return Migration(before, after)


def make_tables(engines: Engines) -> None:
    """Make the tables in a database that has none, unless another process was first."""
    with _changing(engines) as connection:
        if revision_of(connection) == BASE:
            _run(connection, BASE, HEAD, engines.name)


def check_revision(connection: Connection, name: str) -> None:
    """Say what to do unless the database called `name` is at HEAD. Raises MissingStore or WrongRevision."""
    revision = revision_of(connection)
    if revision == BASE:
        raise MissingStore(f"there are no tables in {name}; start the coordinator first, or name its database")
    if revision == UNKNOWN:
        raise WrongRevision(f"{name} holds tables, but not a coordinator's; name another database")
    if revision != HEAD:
        raise WrongRevision(
            f"{name} is at revision {revision}, and this version works with {HEAD}: stop every coordinator on it and "
            "run `muster coordinator migrate`, of the newer version if they differ"
        )


def revision_of(connection: Connection) -> str:
    """The revision of a database, BASE or UNKNOWN."""
    names = set(sqlalchemy.inspect(connection).get_table_names())
    if "alembic_version" in names:
        return connection.scalar(sqlalchemy.text("SELECT version_num FROM alembic_version")) or BASE
    return UNKNOWN if names else BASE


@contextmanager
def _changing(engines: Engines) -> Iterator[Connection]:
    """A transaction that changes tables; others wait for it."""
    with engines.writer.connect() as connection:
        connection.detach()  # it is closed at the end: other transactions must not get it as it is set here
        if connection.dialect.name == "sqlite":
            # A table that changes is made anew, and rows of others point at it while the old one goes. Within a
            # transaction SQLite would not switch this.
            connection.connection.cursor().execute("PRAGMA foreign_keys=OFF")
        with connection.begin():
            if connection.dialect.name == "postgresql":
                connection.execute(sqlalchemy.select(sqlalchemy.func.pg_advisory_xact_lock(_LOCK)))
            yield connection
            reach("migration.before-commit")
    reach("migration.after-commit")


def _run(connection: Connection, before: str, to: str, name: str) -> None:
    # Imported late: a database that needs no change should not pay for it.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", SCRIPTS)
    config.attributes["connection"] = connection
    revisions = [BASE, *reversed([script.revision for script in ScriptDirectory.from_config(config).walk_revisions()])]
    for revision, what in ((before, f"{name} is at revision {before}"), (to, f"there is no revision {to!r}")):
        if revision not in revisions:
            raise WrongRevision(f"{what}; this version knows {', '.join(revisions)}")
    (command.upgrade if revisions.index(to) >= revisions.index(before) else command.downgrade)(config, to)
