"""Emulated devices are processes of their own; what goes wrong with one does not stop a round."""

import json
import os
import re
import signal
import time
from contextlib import contextmanager, suppress
from threading import Thread

import numpy as np
import pytest
from typer.testing import CliRunner

from coordinator.rules.rounds import AssignmentState, RoundState, TaskState
from coordinator.store.tasks import TaskSettings
from device_runtime.conditions import Conditions, Requirements
from device_runtime.state.journal import read_journal
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from muster.app import app
from muster.server import local_coordinator
from simulator import datasets
from simulator.errors import FleetError
from simulator.fleet.faults import EmulatedConditions
from simulator.fleet.fleet import Fleet, FleetConfig, state_folder
from simulator.fleet.fork_servers import HERE, emulators
from simulator.fleet.profile import Kind, take_turns


@contextmanager
def task(folder, **settings):
    """A coordinator process with one task; gives its store, its URL and the task's id."""
    bundle = export_bundle(Model(load("logreg")), create("fedavg", {"batch_size": 5}), folder / "plan")
    given = {"population": "p", "goal": 5, "rounds": 2, "over_selection": 1.2, "selection_timeout_s": 2.0} | settings
    with local_coordinator(folder) as local:
        yield local.store, local.url, local.store.register_task(bundle, TaskSettings(**given)).id


def processes():
    """ForkServer processes of this machine, each with its parent."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as line, open(f"/proc/{pid}/stat") as stat:
                if b"simulator.fleet.fork_server" in line.read():
                    yield pid, int(stat.read().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue


def fleet(folder, url, users, **settings):
    return Fleet(FleetConfig(coordinator=url, population="p", folder=folder / "devices", **settings), users)


def suppressed(run, **given):
    with suppress(FleetError):
        run(**given)


def wait_until(holds):
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_device_with_nan_examples_aborts_with_a_reason_and_the_round_goes_on(tmp_path):
    users, _ = datasets.users("digits", None, 6)
    users.fields["x"][users.starts[2]] = np.nan
    outcomes = []
    with task(tmp_path) as (store, url, task_id):
        devices = fleet(tmp_path, url, users, concurrency=6)
        summary = devices.run(lambda session: outcomes.append((session.client, session.outcome)))
        seats = [seat for number in (1, 2) for seat in store.cohort(task_id, number)]
        assert store.task(task_id).state is TaskState.COMPLETED
        assert np.isfinite(store.checkpoint(task_id)["params"]).all()
    aborted = [(client, outcome) for client, outcome in outcomes if outcome.outcome == "aborted"]
    assert {client for client, _ in aborted} == {users.clients[2]}
    assert {outcome.reason for _, outcome in aborted} == {"invalid-examples"}
    assert all("'x'" in outcome.detail for _, outcome in aborted)
    assert {seat.reason for seat in seats if seat.state is AssignmentState.ABORTED} == {"invalid-examples"}
    # Broken examples do not mend themselves: the device stays away for hours.
    assert summary.endings["aborted: invalid-examples"] == len(aborted) == 1
    assert len(summary.participants) == 5


def test_devices_are_separate_processes_and_a_killed_one_is_counted_by_nobody(tmp_path):
    users, _ = datasets.users("digits", None, 6)
    killed = []

    def kill_one():
        # Devices are children of the emulator, which is a child of this process.
        while not killed:
            parents = dict(processes())
            devices = [pid for pid, parent in parents.items() if parents.get(parent) == os.getpid()]
            if devices:
                os.kill(devices[0], signal.SIGKILL)
                killed.append(devices[0])
            time.sleep(0.005)

    with task(tmp_path, goal=4, minimum=2, rounds=1, reporting_deadline_s=5.0) as (store, url, task_id):
        killer = Thread(target=kill_one)
        killer.start()
        outcomes = []
        fleet(tmp_path, url, users, concurrency=6).run(lambda session: outcomes.append(session.outcome))
        killer.join()
        record = store.rounds(task_id)[-1]
    died = [outcome for outcome in outcomes if outcome.reason == "process-died"]
    assert [outcome.detail for outcome in died] == ["exit code -9"]
    assert record.state is RoundState.COMMITTED
    assert record.reported == sum(outcome.outcome == "reported" for outcome in outcomes)


def test_a_process_runs_one_session_after_the_other(tmp_path):
    users, _ = datasets.users("digits", None, 6)
    seen = set()
    with task(tmp_path, goal=2, minimum=1, rounds=50, over_selection=1.0) as (_, url, _):

        def look(_session):
            parents = dict(processes())
            seen.update(pid for pid, parent in parents.items() if parents.get(parent) == os.getpid())

        summary = fleet(tmp_path, url, users, concurrency=2, sessions=10).run(look)
    assert summary.endings == {"reported": 10}
    assert len(seen) == 2


def test_a_device_whose_fleet_is_told_to_stop_says_so(tmp_path):
    users, _ = datasets.users("digits", None, 4)
    with task(tmp_path, goal=4, minimum=1, over_selection=1.0, rounds=1) as (store, url, task_id):
        kinds = (Kind(name="slow", slow_down=10_000.0),)
        devices = fleet(tmp_path, url, users, concurrency=4, kinds=kinds)
        with emulators({HERE: ["onnxruntime"]}) as machines:
            running = Thread(target=lambda: suppressed(devices.run, machines=machines))
            running.start()
            wait_until(lambda: store.rounds(task_id) and len(store.cohort(task_id, 1)) == 4)
            time.sleep(1)
        running.join()
        seats = store.cohort(task_id, 1)
    assert {(seat.state, seat.reason) for seat in seats} == {(AssignmentState.ABORTED, "conditions")}


def test_silent_devices_do_not_stall_a_round(tmp_path):
    users, _ = datasets.users("digits", None, 6)
    with task(tmp_path, goal=6, minimum=3, rounds=1, over_selection=1.0, selection_timeout_s=1.0) as (
        store,
        url,
        task_id,
    ):
        fleet(tmp_path, url, users.subset(range(4)), concurrency=4).run()
        record = store.rounds(task_id)[-1]
    assert record.state is RoundState.COMMITTED
    assert (record.assigned, record.reported) == (4, 4)


def test_a_fleet_without_a_coordinator_says_so(tmp_path):
    users, _ = datasets.users("digits", None, 25)
    with pytest.raises(FleetError, match="sessions in a row failed; the last: failed: unreachable"):
        fleet(tmp_path, "http://127.0.0.1:9", users, concurrency=25).run()


def test_an_unknown_population_is_named(tmp_path):
    users, _ = datasets.users("digits", None, 25)
    with task(tmp_path, population="other") as (_, url, _), pytest.raises(FleetError, match=r"unknown-population.*'p'"):
        fleet(tmp_path, url, users, concurrency=25).run()


def test_a_fleet_stops_after_as_many_sessions_as_asked(tmp_path):
    users, _ = datasets.users("digits", None, 6)
    with task(tmp_path, goal=2, rounds=50, over_selection=1.0) as (_, url, _):
        summary = fleet(tmp_path, url, users, concurrency=4, sessions=6, wait_s=2.0).run()
    assert sum(summary.endings.values()) == 6


def test_a_fleet_whose_every_device_runs_the_wrong_format_ends_and_says_what_to_do(tmp_path, executorch):
    users, _ = datasets.users("digits", None, 4)
    with task(tmp_path) as (_, url, _), pytest.raises(FleetError) as refused:
        fleet(tmp_path, url, users, concurrency=4, kinds=take_turns((HERE,), ("executorch",))).run()
    assert "every device is refused for good, all 4" in str(refused.value)
    assert "unsupported-format" in str(refused.value)
    assert "--backend onnxruntime" in str(refused.value)


def test_a_fleet_whose_every_device_holds_too_little_ends(tmp_path):
    users, _ = datasets.users("digits", None, 4)
    with task(tmp_path, min_examples=10_000) as (_, url, _), pytest.raises(FleetError, match="not-eligible"):
        fleet(tmp_path, url, users, concurrency=2).run()


def test_devices_that_are_refused_do_not_end_a_fleet_in_which_others_work(tmp_path, executorch):
    users, _ = datasets.users("digits", None, 4)
    kinds = take_turns((HERE,), ("onnxruntime", "executorch"))
    with task(tmp_path, goal=2, over_selection=1.0) as (store, url, task_id):
        summary = fleet(tmp_path, url, users, concurrency=4, kinds=kinds).run()
        assert store.task(task_id).state is TaskState.COMPLETED
    assert summary.by[kinds[0].name]["reported"] == 4
    assert set(summary.by[kinds[1].name]) <= {"rejected: unsupported-format", "rejected: no-task"}


def strike(tmp_path, **what):
    """Four sessions, all of one kind: its summary, the seats of round 1, and the devices' journals."""
    users, _ = datasets.users("digits", None, 4)
    with task(tmp_path, goal=4, over_selection=1.0, reporting_deadline_s=60.0) as (store, url, task_id):
        kinds = (Kind(name="struck", **what),)
        summary = fleet(tmp_path, url, users, concurrency=4, sessions=4, kinds=kinds).run()
        seats = store.cohort(task_id, 1) if store.rounds(task_id) else []
    return summary, seats, [read_journal(state_folder(tmp_path / "devices", client)) for client in users.clients]


def test_a_silent_device_neither_reports_nor_gives_up(tmp_path):
    summary, seats, journals = strike(tmp_path, silence=1.0)
    assert summary.by == {"struck": {"silent": 4}}
    assert {seat.state for seat in seats} == {AssignmentState.ASSIGNED}
    assert [[(entry.outcome, entry.reason) for entry in journal] for journal in journals] == [
        [("failed", "unreachable")]
    ] * 4


@pytest.mark.parametrize("step", [1, 10_000])
def test_a_device_that_drops_out_is_killed_while_it_trains(tmp_path, step):
    summary, seats, journals = strike(tmp_path, drop_out=1.0, drop_out_step=step)
    assert summary.by == {"struck": {"killed": 4}}
    assert {seat.state for seat in seats} == {AssignmentState.ASSIGNED}
    for (entry,) in journals:
        assert (entry.outcome, entry.closed, entry.receipt) == ("interrupted", None, "")
        assert entry.plan == "logreg-fedavg"
        assert entry.assignment in {seat.id for seat in seats}


def test_a_device_whose_conditions_do_not_hold_stays_away_and_says_why(tmp_path):
    unplugged = EmulatedConditions(constant=Conditions(charging=False))
    summary, seats, journals = strike(tmp_path, conditions=unplugged, requirements=Requirements(charging=True))
    assert summary.endings == {"not-now: conditions": 4}
    assert seats == []
    assert sum(entry.times for journal in journals for entry in journal) == 4
    assert {entry.detail for journal in journals for entry in journal} == {"not charging"}


def test_a_fleet_in_which_nobody_ever_reports_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("simulator.fleet.fleet.NO_REPORT_S", 1.0)
    users, _ = datasets.users("digits", None, 2)
    unplugged = EmulatedConditions(constant=Conditions(charging=False))
    kinds = (Kind(name="k", conditions=unplugged, requirements=Requirements(charging=True)),)
    with task(tmp_path) as (_, url, _), pytest.raises(FleetError, match=r"no device reported for .*not charging"):
        fleet(tmp_path, url, users, concurrency=2, kinds=kinds, sessions=50).run()


def test_a_device_whose_clock_is_off_reports_all_the_same(tmp_path):
    summary, _, journals = strike(tmp_path, clock_skew_s=86_400.0)
    assert summary.endings == {"reported": 4}
    assert all(entry.opened > time.time() + 80_000 for journal in journals for entry in journal)


def test_the_command_tells_what_became_of_every_kind_to_people_and_to_programs(tmp_path):
    (tmp_path / "fleet.toml").write_text(
        "[[kind]]\nname = 'well'\nweight = 3\n[[kind]]\nname = 'doomed'\ndrop_out = 1\n"
    )

    def muster_fleet(url, *options):
        options = ["--coordinator", url, "--population", "p", "--profile", str(tmp_path / "fleet.toml"), *options]
        result = CliRunner().invoke(app, ["fleet", "run", "--devices", "4", *options], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.stdout

    with task(tmp_path, goal=3, over_selection=4 / 3, rounds=2) as (_, url, _):
        facts = json.loads(muster_fleet(url, "--sessions", "4", "--json"))
        table = muster_fleet(url, "--sessions", "4")
    well, doomed = ({"devices": 3, "endings": {"reported": 3}}, {"devices": 1, "endings": {"killed": 1}})
    assert facts["kinds"] == {"well": well, "doomed": doomed}
    assert (facts["devices"], facts["sessions"], facts["participants"]) == (4, 4, 3)
    assert facts["endings"] == {"reported": 3, "killed": 1}
    assert facts["bytes_up"] > 0
    lines = (re.split(r"\s{2,}", line) for line in table.splitlines())
    rows = {cells[0]: cells[1:] for cells in lines if len(cells) == 4}
    assert rows["how sessions ended"] == ["well", "doomed", "all"]
    assert rows["devices"] == ["3", "1", "4"]
    assert rows["sessions"] == ["3", "1", "4"]
    assert rows["reported"] == ["3", "0", "3"]
    assert rows["killed"] == ["0", "1", "1"]
