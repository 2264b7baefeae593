"""A real device process against a real coordinator: killed at every point, told to stop, and on bad roads."""

import json
import resource
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from device_runtime.state.records import read_journal
from simulator import datasets
from tests.device_runtime.process import changed, held_at, kill, muster, until


@pytest.fixture
def silence_s():
    """Long: no device is lost while its process ends and another one starts, however slow the machine is."""
    return 600.0


@pytest.mark.parametrize("call", ["check-in", "assignment"])
def test_killed_before_it_has_work_the_device_begins_anew(world, call):
    world.create()
    device, _ = held_at(world, call)
    assert world.stored() is None
    kill(device)
    assert [entry.outcome for entry in read_journal(world.state)] == ["interrupted"]
    assert world.once()["outcome"] == "reported"
    assert [entry.outcome for entry in read_journal(world.state)] == ["interrupted", "reported"]
    assert [(one["state"], one["reported"]) for one in world.rounds()] == [("committed", 1)]


@pytest.mark.parametrize(("skip", "plan"), [(0, None), (2, "logreg-fedavg")])
def test_device_killed_in_a_download_serves_the_next_attempt(world, skip, plan):
    world.create()
    device, _ = held_at(world, "blob", skip=skip)
    until(lambda: (world.stored() or {}).get("phase", "assigned") == "assigned")
    kill(device)
    (entry,) = read_journal(world.state)
    assert (entry.outcome, entry.task, entry.plan or None, entry.steps) == ("interrupted", world.task, plan, 0)
    outcome = world.once()
    assert (outcome["outcome"], outcome["reason"], outcome["round"]) == ("aborted", "runtime-failed", 1)
    assert world.once()["outcome"] == "reported"
    first, second = world.rounds()
    assert (first["abort_reasons"], first["reported"]) == ({"runtime-failed": 1}, 0)
    assert (second["state"], second["reported"]) == ("committed", 1)


def test_device_killed_in_training_does_not_train_for_it_again(world):
    world.create("long")
    device = world.start("--once")
    until(lambda: world.road.calls.count("blob") >= 5 and read_journal(world.state)[-1].plan)
    # What it spent until then is in the journal, and with that in the day's budget.
    until(lambda: read_journal(world.state)[-1].compute_s > 0.2)
    kill(device)
    (entry,) = read_journal(world.state)
    assert (entry.outcome, entry.closed) == ("interrupted", None)
    assert entry.compute_s > 0.2
    assert world.stored()["phase"] == "assigned"
    assert world.once()["outcome"] == "aborted"
    assert world.stored() is None
    assert world.road.reports == []


@pytest.mark.parametrize("answered", [False, True])
def test_report_without_a_receipt_is_sent_again_and_counted_once(world, answered):
    world.create()
    device, _ = held_at(world, "report", answered=answered)
    stored = world.stored()
    assert stored["phase"] == "trained"
    kill(device)
    # Other examples now: the device must send what it trained, not train again.
    np.savez(world.folder / "mine.npz", **datasets.load("digits").shard(1))
    outcome = world.once()
    assert (outcome["outcome"], outcome["round"], outcome["steps"]) == ("reported", 1, stored["steps"])
    (path, first), (again, second) = world.road.reports
    assert (path, first) == (again, second)
    assert world.road.calls.count("check-in") == 1
    assert [(one["state"], one["reported"], one["assigned"]) for one in world.rounds()] == [("committed", 1, 1)]
    assert world.stored()["phase"] == "uploaded"
    assert list(world.state.glob("*.report")) == []
    entries = read_journal(world.state)
    assert [entry.outcome for entry in entries] == ["interrupted", "reported"]
    assert entries[1].receipt == stored["sha256"]
    assert entries[1].assignment == entries[0].assignment == stored["given"]["assignment"]
    assert world.once()["reason"] == "no-task"


def test_after_the_receipt_nothing_is_sent_again(world):
    world.create()
    assert world.once()["outcome"] == "reported"
    assert world.once()["outcome"] == "rejected"
    assert len(world.road.reports) == 1


def test_a_kept_report_that_comes_too_late_is_dropped_and_the_owner_told(world):
    world.create("short", "--selection-timeout-s", 2, deadline_s=8.0)  # a late device is drawn only then
    device, _ = held_at(world, "report")
    kill(device)
    until(lambda: world.rounds()[0]["state"] == "abandoned")
    until(lambda: time.time() > world.rounds()[0]["opened_at"] + 9.0)
    outcome = world.once()
    assert outcome["outcome"] == "reported"
    assert "is over by now" in outcome["notices"][0]
    assert [entry.outcome for entry in read_journal(world.state)] == ["interrupted", "reported", "dropped"]
    assert [one["reported"] for one in world.rounds()] == [0, 1]


def test_a_kept_report_that_the_coordinator_no_longer_takes_is_dropped(world):
    world.create()
    device, _ = held_at(world, "report")
    kill(device)
    muster("task", "cancel", world.task, *world.where)
    until(lambda: world.rounds()[0]["state"] == "abandoned")
    outcome = world.once()
    assert (outcome["outcome"], outcome["reason"]) == ("not-needed", "no-longer-needed")
    assert world.stored() is None
    assert world.once()["reason"] == "no-task"


def test_a_damaged_kept_report_is_never_sent(world):
    world.create()
    device, _ = held_at(world, "report")
    kill(device)
    (file,) = world.state.glob("*.report")
    file.write_bytes(changed(file.read_bytes()))
    assert world.once()["reason"] == "report-lost"
    assert len(world.road.reports) == 1
    assert world.once()["outcome"] == "reported"


def test_coordinator_that_is_down_gets_the_report_later(world):
    world.create()
    target = world.road.target

    def vanish():
        world.road.target = "127.0.0.1:9"

    world.road.before["report"] = [vanish]
    outcome = world.once()
    assert (outcome["outcome"], outcome["retryable"]) == ("failed", "transient")
    assert "the next session sends it" in outcome["notices"][0]
    world.road.target = target
    assert world.once()["outcome"] == "reported"
    assert len({body for _, body in world.road.reports}) == 1
    assert world.rounds()[0]["reported"] == 1


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_while_it_trains_the_device_gives_up_at_once(world, sign):
    world.create("long")
    device = world.start()
    until(lambda: world.road.calls.count("blob") >= 5)
    time.sleep(0.5)
    device.send_signal(sign)
    _, err = device.communicate(timeout=30)
    assert device.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[sign]
    assert "Traceback" not in err
    assert world.stored() is None
    (entry,) = read_journal(world.state)
    assert (entry.outcome, entry.task) == ("stopped", world.task)
    assert world.rounds()[0]["abort_reasons"] == {"conditions": 1}


def test_told_to_stop_while_it_waits_or_sleeps_the_device_ends_at_once(world):
    world.create()
    device, _ = held_at(world, "assignment")
    device.terminate()
    device.communicate(timeout=10)
    assert device.returncode == 143
    assert world.once()["outcome"] == "reported"
    sleeper = world.start()
    assert json.loads(sleeper.stdout.readline())["reason"] == "no-task"
    sleeper.terminate()
    sleeper.communicate(timeout=10)
    assert sleeper.returncode == 143


def test_a_download_that_was_killed_goes_on_where_it_stopped(world):
    world.create()
    world.road.slow_s = 1.5
    device = world.start("--once")
    until(lambda: any(path.stat().st_size for path in (world.state / "blobs").glob("*.download")))
    kill(device)
    (partial,) = (world.state / "blobs").glob("*.download")
    size = partial.stat().st_size
    world.road.slow_s = 0.0
    assert world.once()["outcome"] == "aborted"
    assert world.once()["outcome"] == "reported"
    assert f"bytes={size}-" in world.road.ranges
    assert list((world.state / "blobs").glob("*.download")) == []


def test_a_slow_coordinator_gets_its_report(world):
    world.create()
    world.road.slow_s = 0.05
    assert world.once()["outcome"] == "reported"
    assert world.rounds()[0]["reported"] == 1


@pytest.mark.security("Everything that is fetched is checked against its size and SHA-256")
def test_other_bytes_than_the_digests_are_never_used_and_not_kept(world):
    world.create()
    world.road.change["blob"] = changed
    outcome = world.once()
    assert (outcome["outcome"], outcome["reason"]) == ("failed", "bad-answer")
    assert list((world.state / "blobs").iterdir()) == []
    assert world.road.reports == []
    del world.road.change["blob"]
    assert world.once()["outcome"] == "reported"


def test_a_disk_that_is_full_is_a_clear_outcome_and_mends(world):
    world.create()
    world.once()

    def full():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    shutil.rmtree(world.state)
    outcome = world.once(preexec_fn=full)
    assert (outcome["outcome"], outcome["reason"]) == ("failed", "state-unusable")
    assert world.once()["reason"] == "no-task"


def test_a_damaged_state_database_is_kept_aside_and_the_owner_told(world):
    world.create()
    device, _ = held_at(world, "report", answered=True)
    kill(device)
    database = world.state / "state.db"
    for suffix in ("-wal", "-shm"):
        Path(f"{database}{suffix}").unlink(missing_ok=True)
    database.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    outcome = world.once()
    assert outcome["reason"] == "no-task"
    (aside,) = world.state.glob("state.db.damaged-*Z")
    assert aside.read_bytes().endswith(b"\xff")
    assert aside.name in outcome["notices"][0]
    assert "state-replaced" in [entry.outcome for entry in read_journal(world.state)]
    assert world.rounds()[0]["reported"] == 1
