"""A fleet that means ill: rounds are won all the same, and every account of what happened agrees."""

import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import fleet_training
from benchmarks.hostile_fleet import run
from benchmarks.options import HostileFleetOptions
from benchmarks.reconcile import reconcile
from coordinator.rules.states import AssignmentState
from coordinator.store.tasks import TaskSettings
from simulator import datasets
from simulator.fleet.fleet import Fleet, FleetConfig, state_folder
from simulator.fleet.profile import Kind

PROFILE = Path(__file__).parents[2] / "examples" / "fleet-hostile.toml"


def test_silent_killed_and_unplugged_devices_do_not_stop_a_task(coordinators, monkeypatch, capsys):
    monkeypatch.setattr(fleet_training, "local_coordinator", coordinators.local)
    result = run(HostileFleetOptions(profile=PROFILE, devices=16, rounds=4), lambda *_: None)
    with capsys.disabled():
        print(f"\nhostile: {result.endings} in {result.seconds:.0f} s, {result.agreement:.1e} from the engine")
    # A report that was counted twice, or not at all, would move the model.
    assert result.sound, result
    assert result.committed == 4
    assert result.reconcile.sessions == result.reconcile.journalled == sum(result.endings.values())
    assert result.reconcile.accepted >= result.reconcile.receipts >= 4 * 2
    assert result.endings.get("silent", 0) + result.endings.get("killed", 0) >= 1
    assert set(result.kinds) == {"fast", "slow"}


@pytest.fixture(scope="module")
def world(tmp_path_factory, coordinators, bundle, servers):
    """A fleet that did its work, one of four devices always killed: store and task, folder, summary."""
    folder = tmp_path_factory.mktemp("audited")
    users, _ = datasets.users("digits", None, 4)
    with coordinators.local(folder) as local:
        settings = TaskSettings(
            population="p", goal=3, minimum=1, rounds=2, over_selection=4 / 3, selection_timeout_s=20.0
        )
        task = local.store.register_task(bundle, settings).id
        kinds = (Kind(name="well", weight=3), Kind(name="doomed", drop_out=1.0))
        config = FleetConfig(
            coordinator=local.url, population="p", folder=folder / "devices", concurrency=4, kinds=kinds
        )
        summary = Fleet(config, users).run(servers=servers)
        yield local.store, task, folder, summary


def accepted(world, number):
    store, task, *_ = world
    return [seat for seat in store.cohort(task, number) if seat.report_sha256]


def found(world, summary=None):
    store, task, folder, own = world
    return reconcile(store, task, folder / "devices", summary or own).discrepancies


def change(path, sql, undo):
    """Change a row, and hand back what undoes it."""
    with closing(sqlite3.connect(path)) as database, database:
        assert database.execute(sql).rowcount == 1

    def back():
        with closing(sqlite3.connect(path)) as database, database:
            database.execute(undo)

    return back


def test_accounts_with_killed_sessions_have_no_discrepancies(world):
    assert world[3].by_kind["doomed"]["killed"] >= 1
    assert found(world) == ()


def test_a_session_that_is_in_no_journal_is_found(world):
    summary = world[3]
    client = next(iter(summary.sessions))
    more = replace(summary, sessions=summary.sessions + Counter([client]))
    (words,) = found(world, more)
    assert words == f"{client}: {summary.sessions[client] + 1} sessions, {summary.sessions[client]} in its journal"


def test_a_report_that_is_in_the_sum_and_was_not_accepted_is_found(world):
    sql = "UPDATE rounds SET reported = {} WHERE number = 2"
    count = len(accepted(world, 2))
    back = change(world[2] / "muster.db", sql.format(count + 1), sql.format(count))
    assert found(world) == (f"round 2, attempt 1: {count + 1} reports in the sum, {count} accepted",)
    back()


def test_a_device_that_was_counted_twice_in_a_round_is_found(world):
    folder = world[2]
    first, second, *_ = accepted(world, 1)
    sql = f"UPDATE assignments SET device = '{{}}' WHERE id = '{second.id}'"
    back = change(folder / "muster.db", sql.format(first.device), sql.format(second.device))
    words = " ".join(found(world))
    assert f"round 1, attempt 1: 2 reports of device {first.device}" in words
    assert "does not bear out" in words
    back()


def test_a_report_without_a_reported_assignment_is_found(world):
    folder, seat = world[2], accepted(world, 1)[0]
    sql = f"UPDATE assignments SET state = '{{}}' WHERE id = '{seat.id}'"
    back = change(folder / "muster.db", sql.format(AssignmentState.EXPIRED), sql.format(AssignmentState.REPORTED))
    assert found(world) == ("other assignments are reported than have a report",)
    back()


@pytest.mark.parametrize("changed", ["receipt", "assignment"])
def test_a_receipt_that_the_coordinator_did_not_give_is_found(world, changed):
    _, _, folder, summary = world
    seat = accepted(world, 1)[0]
    own = {"receipt": seat.report_sha256, "assignment": seat.id}[changed]
    sql = f"UPDATE journal SET entry = json_set(entry, '$.{changed}', '{{}}') "
    sql += f"WHERE json_extract(entry, '$.{changed}') = '{{}}'"
    state = state_folder(folder / "devices", summary.clients[seat.device]) / "state.db"
    back = change(state, sql.format("other", own), sql.format(own, "other"))
    (words,) = found(world)
    assert words.startswith(f"{summary.clients[seat.device]}: 1 receipts for assignment")
    back()
