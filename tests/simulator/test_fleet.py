"""Emulated devices are processes of their own; what goes wrong with one does not stop a round."""

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from contextlib import suppress
from threading import Thread

import numpy as np
import pytest
from typer.testing import CliRunner

from coordinator.rules.states import AssignmentState, RoundState, TaskState
from coordinator.store.tasks import TaskSettings
from device_runtime.conditions import Conditions, Requirements
from device_runtime.errors import ConfigError
from device_runtime.state.folder import KeyFile, Sealer, device_key
from device_runtime.state.records import read_journal
from fedcore.wire.signatures import PublicKey, device_id
from muster.app import app
from simulator import datasets
from simulator.errors import FleetError
from simulator.fleet.faults import EmulatedConditions, PlannedFailure
from simulator.fleet.fleet import Fleet, FleetConfig, FleetSummary, Session, state_folder
from simulator.fleet.fork_server import Ended
from simulator.fleet.fork_servers import HERE, fork_servers
from simulator.fleet.profile import Kind, equal_kinds


def processes():
    """Fork servers and devices of this machine, each with its parent."""
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as line, open(f"/proc/{pid}/stat") as stat:
                if b"simulator.fleet.fork_server" in line.read():
                    yield pid, int(stat.read().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Fork servers are started as for users: here they are found by their command lines."""
    monkeypatch.setattr("simulator.fleet.fork_servers.subprocess", subprocess)


def own_devices():
    """Device processes of this process's fleets: children of a fork server, which is a child of this process."""
    parents = dict(processes())
    return {pid for pid, parent in parents.items() if parents.get(parent) == os.getpid()}


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


def test_device_with_nan_examples_aborts_and_the_round_goes_on(task, servers, tmp_path):
    users, _ = datasets.users("digits", None, 6)
    users.fields["x"][users.starts[2]] = np.nan
    outcomes = []
    with task() as (store, url, task_id):
        devices = fleet(tmp_path, url, users, concurrency=6)
        summary = devices.run(lambda session: outcomes.append((session.client, session.outcome)), servers)
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


def test_devices_are_processes_and_a_killed_one_is_not_counted(task, tmp_path):
    users, _ = datasets.users("digits", None, 6)
    others, killed = own_devices(), []

    def kill_one():
        while not killed:
            if devices := own_devices() - others:
                killed.append(devices.pop())
                os.kill(killed[0], signal.SIGKILL)
            time.sleep(0.005)

    with task(goal=4, minimum=2, rounds=1, reporting_deadline_s=5.0) as (store, url, task_id):
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


def test_a_process_runs_one_session_after_the_other(task, tmp_path):
    users, _ = datasets.users("digits", None, 6)
    others, seen = own_devices(), set()
    with task(goal=2, minimum=1, rounds=50, over_selection=1.0) as (_, url, _):
        devices = fleet(tmp_path, url, users, concurrency=2, sessions=10)
        summary = devices.run(lambda session: seen.update(own_devices() - others))
    assert summary.endings == {"reported": 10}
    assert len(seen) == 2


def test_a_device_whose_fleet_is_told_to_stop_says_so(task, tmp_path):
    users, _ = datasets.users("digits", None, 4)
    with task(goal=4, minimum=1, over_selection=1.0, rounds=1) as (store, url, task_id):
        kinds = (Kind(name="slow", slow_down=10_000.0),)
        devices = fleet(tmp_path, url, users, concurrency=4, kinds=kinds)
        with fork_servers({HERE: ["onnxruntime"]}) as servers:
            running = Thread(target=lambda: suppressed(devices.run, servers=servers))
            running.start()
            wait_until(lambda: store.rounds(task_id) and len(store.cohort(task_id, 1)) == 4)
            time.sleep(1)
        running.join()
        seats = store.cohort(task_id, 1)
    assert {(seat.state, seat.reason) for seat in seats} == {(AssignmentState.ABORTED, "conditions")}


def test_silent_devices_do_not_stall_a_round(task, servers, tmp_path):
    users, _ = datasets.users("digits", None, 6)
    with task(goal=6, minimum=3, rounds=1, over_selection=1.0, selection_timeout_s=1.0) as (
        store,
        url,
        task_id,
    ):
        fleet(tmp_path, url, users.subset(range(4)), concurrency=4).run(servers=servers)
        record = store.rounds(task_id)[-1]
    assert record.state is RoundState.COMMITTED
    assert (record.assigned, record.reported) == (4, 4)


def test_a_fleet_without_a_coordinator_says_so(tmp_path):
    users, _ = datasets.users("digits", None, 25)
    words = "sessions in a row failed; the last: failed: unreachable: .*refused; start the coordinator at http://127.0.0.1:9"
    with pytest.raises(FleetError, match=words):
        fleet(tmp_path, "http://127.0.0.1:9", users, concurrency=25).run()
    with pytest.raises(ConfigError, match=r"'127\.0\.0\.1:9' must start with https:// or http://"):
        fleet(tmp_path, "127.0.0.1:9", users)


def test_devices_enrol_with_the_secret_of_a_file_or_hear_what_is_missing(tmp_path, coordinators, bundle, servers):
    users, _ = datasets.users("digits", None, 2)
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    settings = TaskSettings(population="p", goal=2, rounds=1, over_selection=1.0)
    with coordinators.local(tmp_path, accept_unattested=False, enrolment_secret_file=str(secret)) as local:
        local.store.register_task(bundle, settings)
        summary = fleet(tmp_path / "with", local.url, users, enrolment_secret=secret).run(servers=servers)
        assert summary.endings["reported"] == 2
        local.store.register_task(bundle, settings)
        with pytest.raises(FleetError, match=r"not-attested.*; give the devices its enrolment secret, or .*--trial"):
            fleet(tmp_path / "without", local.url, users).run()


def test_an_unknown_population_is_named(task, tmp_path):
    users, _ = datasets.users("digits", None, 25)
    words = r"unknown-population.*'p'.*; create a task of this population first"
    with task(population="other") as (_, url, _), pytest.raises(FleetError, match=words):
        fleet(tmp_path, url, users, concurrency=25).run()


def test_a_fleet_stops_after_as_many_sessions_as_asked(task, servers, tmp_path):
    users, _ = datasets.users("digits", None, 6)
    with task(goal=2, rounds=50, over_selection=1.0) as (_, url, _):
        summary = fleet(tmp_path, url, users, concurrency=4, sessions=6, wait_s=2.0).run(servers=servers)
    assert sum(summary.endings.values()) == 6


def test_fleet_of_the_wrong_format_ends_and_says_what_to_do(task, tmp_path, executorch):
    users, _ = datasets.users("digits", None, 4)
    with task() as (_, url, _), pytest.raises(FleetError) as refused:
        fleet(tmp_path, url, users, concurrency=4, kinds=equal_kinds((HERE,), ("executorch",))).run()
    assert "every device is refused for good, all 4" in str(refused.value)
    assert "unsupported-format" in str(refused.value)
    assert "--backend onnxruntime" in str(refused.value)


def test_a_fleet_whose_every_device_holds_too_little_ends(task, tmp_path):
    users, _ = datasets.users("digits", None, 4)
    with task(min_examples=10_000) as (_, url, _), pytest.raises(FleetError, match="not-eligible"):
        fleet(tmp_path, url, users, concurrency=2).run()


def test_devices_that_are_refused_do_not_end_a_fleet_in_which_others_work(task, tmp_path, executorch):
    users, _ = datasets.users("digits", None, 4)
    kinds = equal_kinds((HERE,), ("onnxruntime", "executorch"))
    with task(goal=2, over_selection=1.0) as (store, url, task_id):
        summary = fleet(tmp_path, url, users, concurrency=4, kinds=kinds).run()
        assert store.task(task_id).state is TaskState.COMPLETED
    assert summary.by_kind[kinds[0].name]["reported"] == 4
    assert set(summary.by_kind[kinds[1].name]) <= {"rejected: unsupported-format", "rejected: no-task"}


def test_only_devices_whose_labels_match_a_target_take_part(task, servers, tmp_path):
    users, _ = datasets.users("digits", None, 6)
    kinds = tuple(Kind(name=version, labels=(f"app_version={version}:1",)) for version in ("3.10", "3.1"))
    with task(goal=2, over_selection=1.0, where="app_version >= 3.2") as (store, url, task_id):
        summary = fleet(tmp_path, url, users, concurrency=6, kinds=(*kinds, Kind(name="silent"))).run(servers=servers)
        assert store.task(task_id).state is TaskState.COMPLETED
    assert summary.by_kind["3.10"]["reported"] == 4
    for other in ("3.1", "silent"):
        assert set(summary.by_kind[other]) <= {"rejected: not-eligible", "rejected: no-task"}
    entries = read_journal(state_folder(tmp_path / "devices", min(summary.participants)))
    assert {entry.target for entry in entries if entry.task} == {"app_version >= 3.2"}


@pytest.fixture
def run_faulty(task, servers, tmp_path):
    """Four sessions of devices of one kind: their summary, the seats of round 1, and the devices' journals."""

    def run(**what):
        users, _ = datasets.users("digits", None, 4)
        with task(goal=4, over_selection=1.0, reporting_deadline_s=60.0) as (store, url, task_id):
            kinds = (Kind(name="faulty", **what),)
            summary = fleet(tmp_path, url, users, concurrency=4, sessions=4, kinds=kinds).run(servers=servers)
            seats = store.cohort(task_id, 1) if store.rounds(task_id) else []
        return summary, seats, [read_journal(state_folder(tmp_path / "devices", client)) for client in users.clients]

    return run


def test_a_silent_device_neither_reports_nor_gives_up(run_faulty):
    summary, seats, journals = run_faulty(silence=1.0)
    assert summary.by_kind == {"faulty": {"silent": 4}}
    assert {seat.state for seat in seats} == {AssignmentState.ASSIGNED}
    assert [[(entry.outcome, entry.reason) for entry in journal] for journal in journals] == [
        [("failed", "unreachable")]
    ] * 4


@pytest.mark.parametrize("step", [1, 10_000])
def test_a_device_that_drops_out_is_killed_while_it_trains(run_faulty, step):
    summary, seats, journals = run_faulty(drop_out=1.0, drop_out_step=step)
    assert summary.by_kind == {"faulty": {"killed": 4}}
    assert {seat.state for seat in seats} == {AssignmentState.ASSIGNED}
    for (entry,) in journals:
        assert (entry.outcome, entry.closed, entry.receipt) == ("interrupted", None, "")
        assert entry.plan == "logreg-fedavg"
        assert entry.assignment in {seat.id for seat in seats}


def test_a_device_whose_conditions_do_not_hold_stays_away_and_says_why(run_faulty):
    unplugged = EmulatedConditions(constant=Conditions(charging=False))
    summary, seats, journals = run_faulty(conditions=unplugged, requirements=Requirements(charging=True))
    assert summary.endings == {"not-now: conditions": 4}
    assert seats == []
    assert sum(entry.times for journal in journals for entry in journal) == 4
    assert {entry.detail for journal in journals for entry in journal} == {"not charging"}


def test_a_fleet_in_which_nobody_ever_reports_ends(task, tmp_path, monkeypatch):
    monkeypatch.setattr("simulator.fleet.fleet.NO_REPORT_S", 1.0)
    users, _ = datasets.users("digits", None, 2)
    unplugged = EmulatedConditions(constant=Conditions(charging=False))
    kinds = (Kind(name="k", conditions=unplugged, requirements=Requirements(charging=True)),)
    with task() as (_, url, _), pytest.raises(FleetError, match=r"no device reported for .*not charging"):
        fleet(tmp_path, url, users, concurrency=2, kinds=kinds, sessions=50).run()


def test_a_device_whose_clock_is_off_reports_all_the_same(run_faulty):
    summary, _, journals = run_faulty(clock_skew_s=86_400.0)
    assert summary.endings == {"reported": 4}
    assert all(entry.opened > time.time() + 80_000 for journal in journals for entry in journal)


def test_command_reports_every_kind_as_a_table_and_as_json(task, tmp_path):
    (tmp_path / "fleet.toml").write_text(
        "[[kind]]\nname = 'well'\nweight = 3\n[[kind]]\nname = 'doomed'\ndrop_out = 1\n"
    )

    def muster_fleet(url, *options):
        options = ["--coordinator", url, "--population", "p", "--profile", str(tmp_path / "fleet.toml"), *options]
        result = CliRunner().invoke(app, ["fleet", "run", "--devices", "4", *options], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.stdout

    with task(goal=3, over_selection=4 / 3, rounds=2) as (_, url, _):
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


def test_the_device_of_a_killed_session_is_known_by_its_key(tmp_path):
    failure = PlannedFailure(dies_after=1)
    ended = Ended("ann", None, -signal.SIGKILL)
    nobody = Session.of(ended, Kind(name="phone"), failure, tmp_path)
    assert (nobody.ending, nobody.outcome.device, list(tmp_path.iterdir())) == ("killed", "", [])
    key = device_key(tmp_path, Sealer(KeyFile(tmp_path / "sealing-key")))
    session = Session.of(ended, Kind(name="phone"), failure, tmp_path)
    summary = FleetSummary(Counter())
    summary.add(session)
    assert summary.clients == {device_id(PublicKey.of(key).text): "ann"}
