"""The database itself, on every engine: what it is opened as, what a transaction promises, its tables' revisions."""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
from contextlib import closing, contextmanager
from urllib.parse import quote

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy.schema import CreateTable

from coordinator.errors import StoreConflict, UnusableStore
from coordinator.rules.states import TaskState
from coordinator.store import database as migrations
from coordinator.store.database import BASE, HEAD, Database, Migration, migrate
from coordinator.store.tables import METADATA
from tests.coordinator.test_failpoints import die
from tests.tree import ROOT
from tools import make_migration
from tools.pages import made

pytestmark = pytest.mark.every_engine

PASSWORD = "hunter2"
FIRST = "874229d5d3a86636"
"""Digest of the tables of the first revision."""
NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "0002", "0001"


def upgrade():
    with op.batch_alter_table("tasks") as tasks:
        tasks.add_column(sa.Column("tier", sa.Integer(), nullable=False, server_default="7"))
        tasks.alter_column("name", type_=sa.Text())


def downgrade():
    with op.batch_alter_table("tasks") as tasks:
        tasks.drop_column("tier")
        tasks.alter_column("name", type_=sa.String(100))
"""
"""A revision after the first, for which SQLite makes a table anew that others refer to."""
MIGRATE = """
import sys
from coordinator.store import database as migrations
migrations.SCRIPTS = sys.argv[2]
migrations.migrate(sys.argv[1], "0002")
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request, tmp_path):
    """The URL of a database without tables, on every engine in turn."""
    if request.param == "sqlite":
        path = tmp_path / "empty.db"
        path.touch()
        return f"sqlite:///{path}"
    return request.getfixturevalue("postgresql").without_tables()


@contextmanager
def connected(url):
    """A connection that knows nothing of us."""
    engine = sqlalchemy.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        yield connection
    engine.dispose()


def tables(url):
    with connected(url) as connection:
        return set(sqlalchemy.inspect(connection).get_table_names()) - {"alembic_version"}


def dump(url):
    """Every row as text in which numbers differ when their bits do; JSON as it is stored."""
    found = {}
    with connected(url) as connection:
        seen = sqlalchemy.inspect(connection)
        for table in tables(url):
            kinds = sorted((one["name"], str(one["type"])) for one in seen.get_columns(table))
            said = ", ".join(f'CAST("{name}" AS TEXT)' if kind == "JSON" else f'"{name}"' for name, kind in kinds)
            found[table] = sorted(map(repr, connection.execute(sqlalchemy.text(f'SELECT {said} FROM "{table}"'))))
    return found


# --- what is opened


@pytest.mark.parametrize("options", ["", "-c idle_in_transaction_session_timeout=7s", "-c search_path=public"])
def test_options_of_an_address_add_to_what_keeps_transactions_short(postgresql, options):
    url = postgresql.without_rows()
    url = f"{url}{'&' if '?' in url else '?'}options={quote(options)}"
    names = ("lock_timeout", "idle_in_transaction_session_timeout", "search_path")
    with closing(Database(url)) as database, database.engine.connect() as connection:
        shown = {name: connection.scalar(sqlalchemy.text(f"SHOW {name}")) for name in names}
    assert shown["lock_timeout"] == "10s"
    assert shown["idle_in_transaction_session_timeout"] == ("7s" if "idle" in options else "10s")
    assert (shown["search_path"] == "public") is ("search_path" in options)


@pytest.mark.parametrize("url", ["mysql://host/db", "sqlite://", "sqlite:///:memory:", "state.db", "postgresql://host"])
def test_database_that_this_version_cannot_use_is_refused(url):
    with pytest.raises(UnusableStore, match="sqlite:///PATH or postgresql://"):
        Database(url)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://muster:{PASSWORD}@127.0.0.1:1/db",
        f"postgresql://127.0.0.1:1/db?user=muster&password={PASSWORD}",
        f"mysql://muster:{PASSWORD}@127.0.0.1/db",
        f"postgresql://muster:{PASSWORD}@127.0.0.1:port/db",
    ],
)
def test_message_about_a_database_names_it_without_the_password(url):
    with pytest.raises(UnusableStore) as caught:
        Database(url)
    assert PASSWORD not in str(caught.value)
    assert "127.0.0.1" in str(caught.value) or "is not such an address" in str(caught.value)


def test_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(b"remember the milk " * 100)
    with pytest.raises(UnusableStore, match=r"notes\.txt' cannot be opened: file is not a database"):
        Database(f"sqlite:///{path}")
    assert path.read_bytes() == b"remember the milk " * 100


# --- revisions


def test_new_database_is_made_at_head_with_exactly_the_tables_of_the_code(empty):
    Database(empty).close()
    with connected(empty) as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
        assert connection.scalar(sqlalchemy.text("SELECT version_num FROM alembic_version")) == HEAD


def test_first_tables_stay_as_a_release_has_them():
    made = "".join(str(CreateTable(table)) for table in METADATA.sorted_tables)
    assert hashlib.sha256(made.encode()).hexdigest()[:16] == FIRST, (
        "tables.py changed. Before the first release, put the new digest here; after it, see r0001_initial.py"
    )


def test_change_of_tables_without_a_revision_is_said_with_its_operations():
    assert make_migration.missing() == ""
    changed = sqlalchemy.MetaData(naming_convention=METADATA.naming_convention)
    for table in METADATA.sorted_tables:
        table.to_metadata(changed)
    changed.tables["blobs"].append_column(sqlalchemy.Column("tier", sqlalchemy.Text()))
    assert "op.add_column('blobs', sa.Column('tier', sa.Text()" in make_migration.missing(changed)


def test_every_table_and_column_is_on_the_site_with_its_meaning():
    for table in METADATA.tables.values():
        assert table.comment, table.name
        assert f"### {table.name}\n\n{table.comment}.\n" in made("tables")
        for column in table.columns:
            assert column.comment, column.name
            assert re.search(rf"^\| `{column.name}` \| .+ \| .+ \|$", made("tables"), re.MULTILINE)


def test_tables_go_down_and_up_again(empty):
    assert migrate(empty) == Migration(BASE, HEAD)
    assert tables(empty) == set(METADATA.tables)
    assert migrate(empty) == Migration(HEAD, HEAD)
    assert migrate(empty, BASE) == Migration(HEAD, BASE)
    assert tables(empty) == set()
    Database(empty).close()
    assert tables(empty) == set(METADATA.tables)


def test_processes_that_start_together_make_the_tables_once(empty):
    failures = []

    def start():
        try:
            Database(empty).close()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert tables(empty) == set(METADATA.tables)


@pytest.mark.parametrize("create", [True, False])
def test_database_of_another_revision_is_refused_and_left_as_it_is(empty, create):
    Database(empty).close()
    with connected(empty) as connection:
        connection.execute(sqlalchemy.text("UPDATE alembic_version SET version_num = '9999'"))
        connection.commit()
    with pytest.raises(UnusableStore, match=f"at revision 9999, and this version works with {HEAD}: .*migrate"):
        Database(empty, create=create)
    with pytest.raises(UnusableStore, match=f"at revision 9999; this version knows base, .*{HEAD}"):
        migrate(empty)


@pytest.mark.parametrize("create", [True, False])
def test_database_of_something_else_is_refused_and_left_as_it_is(empty, create):
    with connected(empty) as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE tasks (id TEXT)"))
        connection.commit()
    with pytest.raises(UnusableStore, match="holds tables, but not a coordinator's"):
        Database(empty, create=create)
    assert tables(empty) == {"tasks"}


def test_unknown_revision_and_missing_tables_are_named(empty, tmp_path):
    with pytest.raises(UnusableStore, match="no revision '7'; this version knows base, 0001"):
        migrate(empty, "7")
    with pytest.raises(UnusableStore, match="no tables"):
        Database(empty, create=False)
    with pytest.raises(UnusableStore, match=r"typo\.db"):
        migrate(f"sqlite:///{tmp_path}/typo.db")
    assert not (tmp_path / "typo.db").exists()


@pytest.fixture
def next_revision(tmp_path, monkeypatch):
    """The folder of the revisions of a later version, which is the one that runs."""
    folder = tmp_path / "revisions"
    shutil.copytree(ROOT / "coordinator/store/revisions", folder)
    (folder / "versions" / "r0002_next.py").write_text(NEXT)
    monkeypatch.setattr(migrations, "SCRIPTS", str(folder))
    monkeypatch.setattr(migrations, "HEAD", "0002")
    return folder


def test_store_of_an_older_revision_is_refused_upgraded_and_goes_back(store, database, register, desk, next_revision):
    task = store.task(register())
    desk.turn()
    desk.assign("a", "b")  # rows that refer to the table that is made anew
    store.close()
    before = dump(database)
    with pytest.raises(UnusableStore, match=f"is at revision {HEAD}, and this version works with 0002: .*migrate"):
        Database(database, create=False)
    assert migrate(database, "0002") == Migration(HEAD, "0002")
    with closing(Database(database, create=False)) as upgraded:
        with upgraded.reading() as records:
            assert records.task(task.id) == task
            assert records._connection.exec_driver_sql("SELECT tier FROM tasks").scalar() == 7
        for change in (
            "UPDATE tasks SET plan_sha256 = 'gone'",
            "DELETE FROM populations",
        ):
            with pytest.raises(sqlalchemy.exc.IntegrityError), upgraded.writing() as records:
                records._connection.exec_driver_sql(change)
    assert migrate(database, HEAD) == Migration("0002", HEAD)
    assert dump(database) == before
    with connected(database) as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []


@pytest.mark.parametrize(("moment", "revision"), [("before", HEAD), ("after", "0002")])
def test_killed_upgrade_happened_whole_or_not_at_all(store, database, register, next_revision, moment, revision):
    register()
    store.close()
    before = dump(database)
    die(MIGRATE, f"migration.{moment}-commit", database, next_revision)
    assert migrate(database, HEAD) == Migration(revision, HEAD)
    assert dump(database) == before


def test_every_table_and_column_is_commented():
    for table in METADATA.sorted_tables:
        assert table.comment, table.name
        assert all(column.comment for column in table.columns), table.name


# --- transactions


def test_sqlite_is_durable_and_checks_foreign_keys(tmp_path):
    with closing(Database(f"sqlite:///{tmp_path}/m.db")) as database, database.engine.connect() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


def test_transaction_that_fails_changes_nothing(store, register):
    task = store.task(register())
    with pytest.raises(ZeroDivisionError), store.database.writing() as records:
        assert records.move_task(task, TaskState.PAUSED, "operator") or 1 / 0
    assert store.task(task.id).state is TaskState.ACTIVE


def test_row_cannot_point_at_an_unknown_blob(store, register):
    task = store.task(register())
    with pytest.raises(sqlalchemy.exc.IntegrityError), store.database.writing() as records:
        records._connection.exec_driver_sql("UPDATE tasks SET plan_sha256 = 'missing'")
    assert store.task(task.id) == task


def test_reader_sees_one_state_throughout_and_cannot_write(store, register):
    task = register()
    with store.database.reading() as records:
        assert records.task(task).state is TaskState.ACTIVE
        store.pause(task)
        assert records.task(task).state is TaskState.ACTIVE
    assert store.task(task).state is TaskState.PAUSED


def test_change_that_rests_on_what_is_no_longer_so_is_refused(store, register):
    stale = store.task(register())
    store.pause(stale.id)
    with pytest.raises(StoreConflict, match="tasks is no longer active"), store.database.writing() as records:
        records.move_task(stale, TaskState.COMPLETED, "test")
    assert store.task(stale.id).state is TaskState.PAUSED


def test_writer_that_has_read_a_task_is_not_overtaken(store, register):
    task = register()
    order = []

    def cancel():
        store.cancel(task)
        order.append("cancelled")

    with store.database.writing() as records:
        assert records.task(task).state is TaskState.ACTIVE
        other = threading.Thread(target=cancel)
        other.start()
        other.join(0.2)
        order.append("decided")
        records.move_task(records.task(task), TaskState.PAUSED, "test")
    other.join()
    assert order == ["decided", "cancelled"]
    assert store.task(task).state is TaskState.CANCELLED


def test_two_operators_may_open_a_population_at_once(store, register):
    register()
    failures = []

    def open_population():
        try:
            register(population="tablets")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=open_population) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store.tasks()) == 5
