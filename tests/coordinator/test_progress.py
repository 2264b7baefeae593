"""Why a task is where it is: every reason in the situation that it is for, through a driver and its rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.commands import AwaitAssignment, CountReport
from coordinator.errors import InvalidTask
from coordinator.rules.progress import DIVERGED, OBSTACLES, Observation, Reason
from coordinator.rules.states import Requires, TaskState
from coordinator.rules.task_settings import PrivacyBudget
from fedcore.conditions import StatedConditions
from fedcore.wire.messages import Rejected
from tests.coordinator.bundles import make_private_bundle
from tests.coordinator.conftest import Desk
from tests.coordinator.test_secure import SECURE, run, seat

pytestmark = pytest.mark.promise("A task without progress says why, the same everywhere, and writes nothing")

every_engine = pytest.mark.every_engine

EPOCH = 1_000_000_000.0


class Clock:
    """What the database takes the time from: the clock of the desk that was made last."""

    desk: Desk | None = None

    def __call__(self):
        return EPOCH + (self.desk.now if self.desk else 0.0)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def desk(store, clock):
    clock.desk = Desk(store, lease_s=15.0)
    return clock.desk


def said(store, task):
    """Reason and sentence, as anybody reads them."""
    one = store.progress_of(task)
    assert one.stalled is one.reason.stalled
    return one.reason.value, one.sentence


def at_length(desk, seconds, *here, step_s=1.0):
    """Let time pass as a driver sees it; devices with the assignments `here` are there."""
    desk.live(seconds, *here, step_s=step_s)


@every_engine
def test_task_that_no_coordinator_drives_or_has_looked_at_says_so(store, register, desk):
    first = register()
    takes = "no coordinator drives population phones yet: one that runs takes it up in seconds"
    assert said(store, first) == ("no-driver", takes)
    desk.pass_time(2)
    second = register()
    assert said(store, second) == ("starting", "the coordinator takes the task up")
    desk.pass_time(0.3)  # the first look does not wait for the next one that is due
    assert said(store, second) == ("selecting", "round 1: 0 of 2 devices wait")


@every_engine
def test_silent_driver_is_named_until_another_takes_over(store, register, desk, clock):
    task = register()
    at_length(desk, 12)
    desk.now += 35
    words = "the coordinator that drives population phones was last heard of 37 s ago"
    assert said(store, task) == ("driver-silent", words)
    clock.desk = successor = Desk(store, lease_s=15.0, now=desk.now)
    assert said(store, task)[0] == "starting"
    successor.pass_time(2)
    assert said(store, task)[0] == "selecting"
    at_length(successor, 12)
    assert said(store, task)[0] == "no-devices"


@every_engine
def test_driver_that_takes_a_population_back_at_once_speaks_for_it_again(store, register, desk):
    task = register()
    desk.pass_time(2)
    with store.database.writing() as records:
        (lease,) = records.leases.leases()
        records.leases.release(lease)
        records.observations.write(task, "another", Observation(since=0.0))
    desk.pass_time(2)
    assert said(store, task)[0] == "selecting"


def test_population_without_check_ins_says_for_how_long(store, register, desk):
    task = register(goal=20, minimum=15, over_selection=1.3)
    at_length(desk, 10)
    assert said(store, task) == ("selecting", "round 1: 0 of 26 devices wait")
    at_length(desk, 51)
    never = "no check-in was accepted since the coordinator took the task up 60 s ago"
    assert said(store, task) == ("no-devices", f"round 1 needs 26 devices, 15 at least: {never}")
    desk.arrive("a")
    at_length(desk, 40)
    last = "none waits, the last check-in that was accepted came 40 s ago"
    assert said(store, task) == ("no-devices", f"round 1 needs 26 devices, 15 at least: {last}")


def test_devices_that_come_at_night_are_waited_for(store, register, clock):
    task = register()
    clock.desk = desk = Desk(store, lease_s=15.0, quiet_s=12 * 3600)
    at_length(desk, 3600, step_s=60)
    words = (
        "round 1 needs 2 devices, 2 at least: no check-in was accepted since the coordinator took the task up 59 min"
    )
    assert said(store, task) == ("waiting-for-devices", f"{words} ago")
    at_length(desk, 12 * 3600, step_s=600)
    assert said(store, task)[0] == "no-devices"
    desk.arrive("a")
    at_length(desk, 3600, step_s=60)
    assert said(store, task)[0] == "waiting-for-devices"


@pytest.mark.parametrize(
    ("obstacle", "settings", "device"),
    [
        ("examples", {"min_examples": 50}, {}),
        ("format", {}, {"formats": ("other",)}),
        ("version", {"requires": Requires(min_version="9")}, {}),
        ("memory", {"requires": Requires(min_memory_bytes=1)}, {}),
        ("conditions", {"requires": Requires(charging=True)}, {"conditions": StatedConditions(charging=False)}),
    ],
)
def test_devices_that_are_rejected_are_counted_by_what_keeps_them_out(
    store, register, desk, obstacle, settings, device
):
    task = register(**settings)
    at_length(desk, 30)
    for name in "abc":
        assert isinstance(desk.arrive(name, **device), Rejected)
    at_length(desk, 35)
    needs = "round 1 needs 2 devices, 2 at least, and none that is eligible waits"
    rejected = f"3 check-ins were rejected lately: 3 {OBSTACLES[obstacle]}"
    assert said(store, task) == ("none-eligible", f"{needs}; {rejected}")
    at_length(desk, 180, step_s=4.0)
    assert said(store, task)[0] == "no-devices"


@every_engine
def test_devices_that_wait_are_counted_by_what_keeps_them_from_a_task(store, register, desk):
    other = register(goal=1, rounds=9, over_selection=2, minimum=1)
    task = register(goal=9, min_examples=20)
    waits = [desk.wait(name, seconds=900, examples={"default": 20}) for name in "ab"]
    busy = [wait.result(timeout=0) for wait in waits]
    assert {given.task for given in busy} == {other}
    for name in "ab":
        desk.wait(name, seconds=900, examples={"default": 20})
    desk.wait("c", seconds=900)
    session = desk.arrive("d", examples={"default": 20}).session
    desk.turn(AwaitAssignment(session, "d", 900, frozenset({other})))
    why = "2 with an assignment, 1 with too few examples, 1 willing only for other tasks"
    at_length(desk, 20, *busy)
    waiting = f"4 wait and are not eligible: {why}"
    assert said(store, task) == ("selecting", f"round 1: 0 of 9 devices wait, 40 s left; {waiting}")
    at_length(desk, 50, *busy)
    needs = "round 1 needs 9 devices, 9 at least, and none that is eligible waits"
    assert said(store, task) == ("none-eligible", f"{needs}; {waiting}")


def test_resting_device_is_counted_waiting_and_rejected(store, register, desk):
    task = register(goal=1, min_separation_s=3600)
    desk.report(*desk.assign("a"))
    at_length(desk, 30)
    assert desk.arrive("a").reason == "resting"
    at_length(desk, 61)
    words = "1 check-in was rejected lately: 1 resting after taking part"
    assert said(store, task) == (
        "none-eligible",
        f"round 2 needs 1 device, 1 at least, and none that is eligible waits; {words}",
    )
    register(goal=5)
    desk.pass_time(1)
    desk.wait("a", seconds=900)
    at_length(desk, 50)
    assert "; 1 waits and is not eligible: 1 resting after taking part" in said(store, task)[1]


def test_selection_is_expected_first_and_too_few_on_its_retry(store, register, desk):
    task = register(goal=3, minimum=2, selection_timeout_s=60)
    desk.wait("a", seconds=30)
    at_length(desk, 20)
    assert said(store, task) == ("selecting", "round 1: 1 of 3 devices waits, 40 s left")
    at_length(desk, 40)
    assert said(store, task)[0] == "no-devices"
    desk.wait("b", seconds=30)
    at_length(desk, 5)
    again = "round 1 needs 3 devices, 2 at least: 1 waits, 55 s left; the attempt before had too few"
    assert said(store, task) == ("too-few-devices", again)
    desk.wait("c", seconds=30)
    desk.wait("d", seconds=30)
    at_length(desk, 2)
    assert said(store, task) == ("reporting", "round 1: 0 of 3 reports, 598 s left")


@every_engine
def test_reports_and_seconds_of_a_round_are_those_of_now(store, register, desk):
    task = register(goal=2, over_selection=1.5, minimum=1)
    first, second, third = desk.assign("a", "b", "c")
    at_length(desk, 100, first, second, third)
    desk.report(first)
    assert said(store, task) == ("reporting", "round 1: 1 of 2 reports, 500 s left")
    store.pause(task)
    desk.pass_time(1)
    paused = "round 1: 1 of 2 reports, 499 s left; paused: no round follows it"
    assert said(store, task) == ("reporting", paused)
    desk.report(second)
    assert said(store, task) == ("paused", "paused by an operator; 1 of 2 rounds are committed")
    store.resume(task)
    at_length(desk, 5)
    assert said(store, task) == ("selecting", "round 2: 0 of 3 devices wait")
    at_length(desk, 10)
    assert said(store, task)[0] == "no-devices"


def test_round_waits_for_silent_devices_and_not_for_lost_ones(store, register, desk, monkeypatch):
    task = register(goal=4, minimum=1)
    monkeypatch.setattr("coordinator.rules.states._LEAST_SILENCE_S", 60.0)
    here, *_ = (one.result(timeout=0) for one in [desk.wait(name) for name in "abcd"])
    at_length(desk, 9, here)
    assert said(store, task) == ("reporting", "round 1: 0 of 4 reports, 591 s left")
    at_length(desk, 31, here)
    for name in "bc":
        desk.wait(name, seconds=900)
    at_length(desk, 5, here)
    silent = "round 1 waits for 3 devices not heard of for 45 s: 0 of 4 reports, 555 s left"
    assert said(store, task) == ("devices-silent", f"{silent}; 2 wait and are not eligible: 2 with an assignment")
    at_length(desk, 20, here)
    lost = "round 1: 0 of 4 reports, 535 s left; 3 devices lost"
    again = "2 wait and are not eligible: 2 that this round drew before"
    assert said(store, task) == ("reporting", f"{lost}; {again}")


@every_engine
def test_task_that_is_over_says_how_it_ended(store, register, desk, tmp_path):
    done, stopped = register(goal=1, rounds=1), register(goal=1, population="tablets")
    desk.report(*desk.assign("a"))
    store.cancel(stopped)
    assert said(store, done) == ("completed", "1 of 1 rounds are committed")
    assert said(store, stopped) == ("cancelled", "cancelled; 0 of 2 rounds are committed")
    privacy = PrivacyBudget(epsilon=2, delta=1e-6, users=9, noise_multiplier=3)
    bundle = make_private_bundle(tmp_path / "private")
    private = register(bundle, goal=1, rounds=9, population="watches", privacy=privacy)
    given = desk.wait("a", population="watches").result(timeout=0)
    desk.ask(CountReport(given.assignment, "1" * 64, np.array([0, 0, 0, 0, 1], np.float32)))
    reason, sentence = said(store, private)
    assert reason == "privacy-budget-spent"
    assert sentence.startswith("1 of 9 rounds are committed: another round would exceed the privacy budget: ε 1.")


@every_engine
def test_a_task_whose_blob_is_gone_says_so_and_counts_as_stalled(store, register, desk, tmp_path):
    lost = register()
    (tmp_path / "blobs" / store.task(lost).plan_sha256).unlink()
    desk.pass_time(1)
    reason, words = said(store, lost)
    assert (reason, Reason(reason).stalled) == ("paused-after-failures", True)
    assert words.startswith("paused: a blob cannot be read: there is no blob")
    assert "resume" in words


@every_engine
def test_failed_attempts_hold_the_next_one_and_then_pause_the_task(store, register, desk):
    task = register(goal=1, max_attempts=3)
    desk.pass_time(1)
    for device in "ab":
        desk.give_up(*desk.assign(device))
    waiting = desk.wait("c", seconds=900)
    at_length(desk, 5)
    words = "round 1 begins in 10 s, because attempts at it failed, the last with too-few-reports"
    assert said(store, task) == ("back-off", words)
    at_length(desk, 12)
    assert said(store, task)[0] == "reporting"
    desk.give_up(waiting.result(timeout=0))
    why = "round 1 failed 3 times in a row, at last with too-few-reports; find out why, then resume it"
    assert said(store, task) == ("paused-after-failures", f"paused: {why}")


@every_engine
def test_model_that_cannot_be_written_is_said_after_the_grace(store, register, desk, monkeypatch):
    task = register(goal=1)
    (assignment,) = desk.assign("a")

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store.blobs, "put", full)
        desk.report(assignment)
        at_length(desk, 5)
        assert said(store, task) == ("aggregating", "round 1: the next model is made of 1 report")
        at_length(desk, 20)
        words = "round 1 has 1 report, and for 25 s its model could not be written"
        assert said(store, task) == ("cannot-write", f"{words}; the coordinator's log says why")
    at_length(desk, 2)
    assert said(store, task)[0] == "selecting"


@every_engine
def test_secure_round_says_which_phase_it_is_in_and_who_has_answered(store, register, desk):
    task = register(**SECURE)
    devices = seat(desk)
    seats = [device.given for device in devices]
    run(devices[:3], ("advertise",))
    at_length(desk, 2, *seats)
    assert said(store, task) == ("reporting", "round 1: 3 of 8 devices have trained, 598 s left")
    run(devices[3:], ("advertise",))
    at_length(desk, 2, *seats)
    run(devices[:5], ("share",))
    at_length(desk, 2, *seats)
    assert said(store, task) == ("reporting", "round 1: 5 of 8 devices have sent their shares, 594 s left")


@every_engine
def test_progress_is_not_written_while_only_time_passes(store, register, desk):
    task, other = register(), register(population="tablets", goal=1)
    desk.arrive("a", formats=("other",))
    busy = desk.wait("b", population="tablets").result(timeout=0)
    store.pause(other)
    at_length(desk, 200, busy)
    with store.database.reading() as records:
        written = records.observations.version()
    assert said(store, task)[1].endswith(" 200 s ago")
    at_length(desk, 100, busy)
    assert said(store, task)[1].endswith(" 300 s ago")
    with store.database.reading() as records:
        assert records.observations.version() == written
    for longer_s, words in ((600, "15 min"), (9000, "3 h"), (190_000, "2 days")):
        at_length(desk, longer_s, step_s=longer_s / 5)
        assert said(store, task)[1].endswith(f" {words} ago")


@every_engine
def test_task_that_diverged_says_in_which_round_and_why(store, register):
    task = register()
    with store.database.writing() as records:
        records.move_task(records.task(task), TaskState.PAUSED, DIVERGED, "diverged in round 7: train.loss is nan")
    assert said(store, task) == ("diverged", "paused: diverged in round 7: train.loss is nan")


def test_task_that_starts_later_draws_nobody_before_and_says_when(store, register, desk, bundle):
    with pytest.raises(InvalidTask, match=r"starts_at must be a time with its zone, .*: day"):
        register(starts_at="2027-02-30T06:00:00Z")
    task = register(starts_at="2001-09-09T03:47:40+02:00")
    at_length(desk, 30)
    assert said(store, task) == ("scheduled", "starts at 2001-09-09T03:47:40+02:00, in 30 s")
    rejected = desk.arrive("a")
    assert (type(rejected), rejected.reason) == (Rejected, "no-task")
    store.pause(task)
    assert said(store, task)[0] == "paused"
    store.resume(task)
    at_length(desk, 31)
    assert said(store, task)[0] == "selecting"
    assert {given.task for given in desk.assign("b", "c")} == {task}
    assert store.rounds(task)[0].opened_at >= EPOCH + 60


def test_every_reason_is_met_here():
    promised = Path(__file__).read_text()
    assert [reason.value for reason in Reason if f'"{reason.value}"' not in promised] == []
