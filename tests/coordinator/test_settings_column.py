"""A task's settings as one column: what it holds, settings of another version, and the revision that made it."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import sys

import pytest
import sqlalchemy
from sqlalchemy import text

from coordinator.errors import UnreadableTask, WrongRevision
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import PrivacyBudget, Secagg, TaskSettings
from coordinator.store.blobs import Blobs
from coordinator.store.bundles import first_checkpoint
from coordinator.store.database import Database
from coordinator.store.migrations import BASE, HEAD, Migration, migrate
from coordinator.store.tables import METADATA
from coordinator.store.tasks import open_coordinator_store
from fedcore.schedule import ServerSchedule
from tests.coordinator.conftest import Desk, states
from tests.coordinator.test_failpoints import die
from tests.coordinator.test_store import connected
from tests.forked import COMMAND, forked
from tools import make_migration

FIRST = make_migration.ROOT / "coordinator/store/revisions/versions/r0001_initial.py"
FIRST_SHA256 = "456e49b01d10cd5ef35bab087bf6578d44b4f0a6fdfe8bde5f512c70d85428ad"
MIGRATE = "import sys; from coordinator.store.migrations import migrate; migrate(sys.argv[1])"
EXACT = {
    "over_selection": 1.0000000000000002,
    "selection_timeout_s": 0.1 + 0.2,
    "reporting_deadline_s": 600.0000000000001,
    "max_loss_growth": 1.7976931348623157e308,
    "min_separation_s": 5e-324,
}
"""Floats that are others where one digit is lost."""
PARTS = {
    "requires": {"charging": True, "min_battery": 0.30000000000000004, "min_memory_bytes": 2**63 - 1},
    "on_device": {},
    "formats": ["onnx"],
    "budget": {"peak_rss_mb": 5e-324, "step_cpu_ms": None},
    "clear": {"max_norm": 999999.9999999999, "max_weight": 1.0000000000000002, "estimator": "mean", "tolerate": 0},
    "schedule": {"warmup_rounds": 2**53 + 1},
    "secagg": None,
    "buffered": None,
    "privacy": None,
}
COUNTS = dict.fromkeys(("goal", "minimum", "rounds"), 2) | {"max_attempts": 5, "min_examples": 1}
OTHERS = {
    "running": {"requires": {}, "seed": 2**63 - 1},
    "buffered": {"seed": 2**53 + 1, "buffered": {"concurrency": 7, "max_staleness": 3}},
    "private": {
        **dict.fromkeys(("goal", "minimum"), 40),
        "secagg": {"clip_norm": 0.1, "bits": 16, "max_examples": 1, "phase_s": 30.000000000000004, "group_size": 200},
        "privacy": {"epsilon": 0.1 + 0.2, "delta": 1.0000000000000002e-9, "users": 10**6, "mechanism": "distributed",
                    "bands": 1, "noise_multiplier": None},
    },
}  # fmt: skip
"""What the three tasks of the old store have of their own."""


@pytest.fixture(params=["sqlite", "postgresql"])
def old(request, tmp_path, bundle):
    """The URL of a store of the first revision, in which plain SQL wrote three tasks, of which one runs."""
    url = f"sqlite:///{tmp_path}/old.db"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgresql").without_tables()
    else:
        (tmp_path / "old.db").touch()
    migrate(url, "0001")
    blobs, manifest = Blobs(tmp_path / "blobs", create=True), bundle.manifest
    refs = [blobs.put(data) for data in (*(data for _, data in bundle.blobs()), first_checkpoint(bundle))]
    with connected(url) as connection:
        add(connection, "identity", name="blobs", value=blobs.claim("0" * 32))
        add(connection, "populations", name="phones", created_at=0.1, holder=None, term=0)
        for ref in set(refs):
            add(connection, "blobs", sha256=ref.sha256, size=ref.size, public=True, created_at=0.1, unneeded_at=None)
        digests = {f"{name}_sha256": getattr(manifest, name).sha256 for name in ("plan", "certificate", "state")}
        digests |= {"checkpoint_sha256": refs[-1].sha256}
        signed = dict.fromkeys(("plan_signature", "release"))
        for name, settings in OTHERS.items():
            state = TaskState.ACTIVE if name == "running" else TaskState.CANCELLED
            own = {"id": name, "name": name, "bundle": "hand-made", "state": state.value, "reason": ""}
            own |= {"algorithm": "fedavg", "algorithm_settings": {}, "population": "phones", "created_at": 0.2}
            own |= {"min_separation_rounds": 1, "seed": 0, "same_cohort": False} | COUNTS | EXACT | PARTS | settings
            add(connection, "tasks", **own, **digests, **signed)
        counts = dict.fromkeys(("reported", "aborted", "lost", "expired", "stale", "taken_over", "handed_on"), 0)
        round_ = {"task": "running", "number": 1, "attempt": 1, "state": "reporting", "reason": "", "assigned": 2}
        round_ |= {"staleness": [], "opened_at": 1764000000.1234567, "metrics": {}}
        add(connection, "rounds", **round_, **counts)
        row_id = connection.scalar(text("SELECT id FROM rounds"))
        for slot in range(2):
            given = {"id": f"secret{slot}", "round": row_id, "slot": slot, "device": f"old{slot}", "state": "assigned"}
            add(connection, "assignments", **given, reason="", assigned_at=1764000000.7654321)
        connection.commit()
    return url


def add(connection, table, **values):
    """Insert a row, with plain SQL; lists and dicts are JSON."""
    plain = {name: json.dumps(one) if isinstance(one, dict | list) else one for name, one in values.items()}
    names = ", ".join(f'"{name}"' for name in plain)
    connection.execute(
        text(f'INSERT INTO "{table}" ({names}) VALUES ({", ".join(f":{name}" for name in plain)})'), plain
    )


def present(seen):
    """The tables of a database, without that of its revision."""
    return set(seen.get_table_names()) - {"alembic_version"}


def dump(url, *tables):
    """Every row as text in which numbers differ when their bits do; JSON as it is stored."""
    found = {}
    with connected(url) as connection:
        columns = sqlalchemy.inspect(connection)
        for table in tables or present(columns):
            names = sorted(one["name"] for one in columns.get_columns(table))
            kinds = {one["name"]: str(one["type"]) for one in columns.get_columns(table)}
            said = ", ".join(f'CAST("{name}" AS TEXT)' if kinds[name] == "JSON" else f'"{name}"' for name in names)
            rows = connection.execute(text(f'SELECT {said} FROM "{table}"'))
            found[table] = sorted(repr(dict(zip(names, row, strict=True))) for row in rows)
    return found


def without(row, column):
    """A row of `dump` that lacks a column."""
    return repr({name: value for name, value in ast.literal_eval(row).items() if name != column})


def schema(url):
    """Columns, keys and indexes of every table, as the database has them."""
    with connected(url) as connection:
        seen = sqlalchemy.inspect(connection)
        return {
            table: (
                sorted(
                    (one["name"], str(one["type"]), one["nullable"], one["default"]) for one in seen.get_columns(table)
                ),
                seen.get_pk_constraint(table),
                sorted(map(repr, seen.get_foreign_keys(table))),
                seen.get_indexes(table),
            )
            for table in present(seen)
        }


def change(url, task, edit):
    """Change the stored settings of a task behind the coordinator's back."""
    with connected(url) as connection:
        stored = connection.scalar(text("SELECT CAST(settings AS TEXT) FROM tasks WHERE id = :id"), {"id": task})
        settings = json.loads(stored)
        edit(settings)
        connection.execute(
            text("UPDATE tasks SET settings = :new WHERE id = :id"), {"new": json.dumps(settings), "id": task}
        )
        connection.commit()
    return stored


# --- the column


@pytest.mark.every_engine
def test_settings_come_back_equal_to_the_bit(store, database, register):
    exact = {"seed": 2**63 - 1, "schedule": ServerSchedule(warmup_rounds=2**53 + 1)} | EXACT
    exact |= {"min_separation_s": -0.0}  # which no column of numbers of SQLite keeps
    given = TaskSettings(population="phones", goal=2, rounds=2, minimum=2, **exact)
    assert repr(store.task(register(**exact, minimum=2)).settings) == repr(given)


@pytest.mark.every_engine
def test_every_setting_is_stored_so_that_new_defaults_change_no_task(store, database, register):
    stored = json.loads(change(database, register(secagg=Secagg(), goal=40, minimum=40), lambda settings: None))
    fields = {one.name for one in dataclasses.fields(TaskSettings)}
    assert stored.keys() == fields - {"population"}
    assert stored["secagg"].keys() == {one.name for one in dataclasses.fields(Secagg)}


# --- settings of another version


@pytest.mark.every_engine
@pytest.mark.parametrize("part", ["", "requires", "on_device", "budget", "clear", "schedule", "secagg"])
def test_newer_setting_is_refused_by_name_at_the_start_and_at_each_load(store, database, register, part):
    task = register(secagg=Secagg(), goal=40, minimum=40)
    before = store.task(task)
    stored = change(database, task, lambda settings: (settings[part] if part else settings).update(brand_new=1))
    for attempt in (lambda: store.task(task), lambda: Database(database), store.tasks):
        with pytest.raises(UnreadableTask, match=rf"task {task}.*brand_new.*upgrade this coordinator") as refused:
            attempt()
        assert part in str(refused.value)
    change(database, task, lambda settings: (settings[part] if part else settings).pop("brand_new"))
    assert store.task(task) == before
    assert json.loads(stored) == json.loads(change(database, task, lambda settings: None))


@pytest.mark.every_engine
@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda settings: settings["clear"].update(estimator="sieve"), "estimator.*sieve"),
        (lambda settings: settings.update(goal="adaptive"), "goal"),
        (lambda settings: settings.pop("goal"), "goal"),
    ],
)
def test_newer_value_is_refused_by_name(store, database, register, edit, named):
    task = register()
    change(database, task, edit)
    with pytest.raises(UnreadableTask, match=rf"task {task}: .*{named}.*upgrade"):
        Database(database)


@pytest.mark.every_engine
def test_setting_that_is_not_stored_has_its_default(store, database, register):
    task = register(minimum=1)
    needed = ("goal", "rounds")
    change(database, task, lambda settings: [settings.pop(name) for name in set(settings) - set(needed)])
    assert store.task(task).settings == TaskSettings(population="phones", goal=2, rounds=2)


def test_service_that_does_not_start_says_which_setting_it_does_not_know(store, database, register, tmp_path):
    task = register()
    change(database, task, lambda settings: settings.update(brand_new=1))
    before = dump(database)
    command = [sys.executable, "-m", "muster", "coordinator", "serve", "--port", "0", "--admin-port", "0"]
    command += ["--accept-unattested", "--db", database, "--blobs", str(tmp_path / "blobs")]
    done = forked(COMMAND).run(command)
    assert done.returncode not in (0, -9)
    assert f"settings of task {task}" in " ".join(done.stderr.split())
    assert "brand_new" in done.stderr
    assert "Traceback" not in done.stderr
    assert dump(database) == before


@pytest.mark.every_engine
def test_reports_outlive_a_newer_setting_that_comes_while_a_round_runs(store, database, register, desk):
    task = register(goal=2, rounds=1)
    desk.turn()
    given = desk.assign("a", "b")
    change(database, task, lambda settings: settings.update(brand_new=1))
    for one in given:
        desk.report(one, delta=(2, 2, 2, 2))
    desk.pass_time(1)
    change(database, task, lambda settings: settings.pop("brand_new"))
    assert states(store, task) == [(1, 1, "aggregating", "")]
    desk.pass_time(1)
    assert states(store, task) == [(1, 1, "committed", "")]
    assert [one.state.value for one in store.cohort(task, 1)] == ["reported"] * 2


# --- the revision


def test_first_revision_stays_as_it_was_released():
    assert hashlib.sha256(FIRST.read_bytes()).hexdigest() == FIRST_SHA256, "write another revision instead"


def test_change_of_tables_without_a_revision_is_said_with_its_operations():
    assert make_migration.missing() == ""
    tables = sqlalchemy.MetaData(naming_convention=METADATA.naming_convention)
    for table in METADATA.sorted_tables:
        table.to_metadata(tables)
    tables.tables["blobs"].append_column(sqlalchemy.Column("tier", sqlalchemy.Text()))
    assert "op.add_column('blobs', sa.Column('tier', sa.Text()" in make_migration.missing(tables)


def test_old_store_is_upgraded_runs_on_and_goes_back_with_every_bit(old, tmp_path):
    before = dump(old)
    assert migrate(old) == Migration("0001", HEAD)
    assert migrate(old, "0001") == Migration(HEAD, "0001")
    assert dump(old) == before

    migrate(old)
    with open_coordinator_store(old, tmp_path / "blobs") as store:
        exact = EXACT | {"seed": 2**63 - 1, "schedule": ServerSchedule(warmup_rounds=2**53 + 1)}
        found = store.task("running").settings
        assert repr({name: getattr(found, name) for name in exact}) == repr(exact)
        assert (found.secagg, found.buffered, found.privacy) == (None, None, None)
        assert store.task("buffered").settings.max_staleness == 3
        private = store.task("private").settings
        assert private.secagg == Secagg(**OTHERS["private"]["secagg"])
        assert private.privacy == PrivacyBudget(**OTHERS["private"]["privacy"])
        desk = Desk(store)
        desk.turn()
        for given in desk.assign("a", "b"):
            desk.report(given, delta=(1, 1, 1, 1))
        assert [one[:3] for one in states(store, "running")] == [(1, 1, "abandoned"), (1, 2, "committed")]
        assert {one.state.value for one in store.cohort("running", 1)} == {"reported"}
        after = dump(old)
    migrate(old, "0001")
    gone_back = dump(old)
    assert gone_back.pop("tasks") == before["tasks"]
    later = [table for table in after.keys() - before.keys() if after[table]]
    assert later == ["notices"], "rows of later tables were lost"  # notices a driver writes anew
    after["replicas"] = [without(row, "steady") for row in after["replicas"]]
    assert gone_back == {table: after[table] for table in before if table != "tasks"}


def test_upgraded_store_has_the_tables_of_a_new_one_and_goes_back(old, request, tmp_path):
    on_postgresql = old.startswith("postgresql")
    (tmp_path / "new.db").touch()
    new = request.getfixturevalue("postgresql").without_tables() if on_postgresql else f"sqlite:///{tmp_path}/new.db"
    first = schema(old)
    migrate(old)
    migrate(new)
    assert schema(old) == schema(new) != first
    for url in (old, new):
        migrate(url, "0001")
        assert schema(url) == first
        migrate(url, BASE)


def test_rows_of_an_upgraded_store_still_cannot_point_at_nothing(old):
    migrate(old)
    database = Database(old)
    for statement in ("UPDATE rounds SET task = 'gone'", "DELETE FROM tasks", "UPDATE tasks SET plan_sha256 = 'gone'"):
        with pytest.raises(sqlalchemy.exc.IntegrityError), database.writing() as records:
            records._connection.exec_driver_sql(statement)
    database.close()
    if old.startswith("sqlite"):
        with connected(old) as connection:
            assert connection.execute(text("PRAGMA foreign_key_check")).all() == []


def test_task_with_a_setting_that_had_no_column_is_not_taken_back(old):
    migrate(old)
    change(old, "buffered", lambda settings: settings.update(brand_new=1))
    before = dump(old)
    with pytest.raises(WrongRevision, match="task buffered: revision 0001 differs in brand_new"):
        migrate(old, "0001")
    assert dump(old) == before


@pytest.mark.parametrize(("moment", "revision"), [("before", "0001"), ("after", HEAD)])
def test_killed_upgrade_happened_whole_or_not_at_all(old, tmp_path, moment, revision):
    before = dump(old)
    die(MIGRATE, f"migration.{moment}-commit", old)
    assert migrate(old, "0001") == Migration(revision, "0001")
    assert dump(old) == before
