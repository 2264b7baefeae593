"""A task's settings as one column: what it holds, and settings of another version."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
from sqlalchemy import text

from coordinator.errors import UnusableStore
from coordinator.rules.task_settings import Secagg, TaskSettings
from coordinator.store.database import Database
from fedcore.schedule import ServerSchedule
from tests.coordinator.conftest import states
from tests.coordinator.test_store import connected, dump
from tests.forked import COMMAND, forked

EXACT = {
    "over_selection": 1.0000000000000002,
    "selection_timeout_s": 0.1 + 0.2,
    "reporting_deadline_s": 600.0000000000001,
    "max_loss_growth": 1.7976931348623157e308,
    "min_separation_s": 5e-324,
}
"""Floats that are others where one digit is lost."""


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
        with pytest.raises(UnusableStore, match=rf"task {task}.*brand_new.*upgrade this coordinator") as refused:
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
    with pytest.raises(UnusableStore, match=rf"task {task}: .*{named}.*upgrade"):
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
