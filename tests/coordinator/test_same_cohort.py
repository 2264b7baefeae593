"""Pairs of rounds with the same cohort: who may be drawn for the second trip, and what happens when too few come."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.errors import InvalidTask
from coordinator.rules.states import TaskState
from coordinator.store.garbage_collection import Retention, collect
from coordinator.store.tasks import TaskSettings
from fedcore.errors import InvalidSetting
from fedcore.schedule import ServerSchedule, first_of_pair
from fedcore.wire.messages import RetryWindow
from tests.coordinator.bundles import START, make_bundle
from tests.coordinator.conftest import Desk, states
from tests.coordinator.test_secure import SECURE, Device, run
from tests.coordinator.test_two_trips import GRAPHS, PLAN, SETTINGS, report

PAIRED = {"goal": 3, "minimum": 2, "rounds": 4, "same_cohort": True, "selection_timeout_s": 60.0}
NAMES = ("a", "b", "c")


@pytest.fixture
def bundle(tmp_path):
    return make_bundle(tmp_path / "two", PLAN, "feddane", SETTINGS, graphs=GRAPHS)


def first_trip(desk, *names, gradient=(1, 1, 1, 1)):
    """A round of these devices, who all report."""
    for given in desk.assign(*names):
        report(desk, given, gradient)
    desk.pass_time(1)


def drawn(store, task, number):
    return {one.device for one in store.cohort(task, number)}


def ends(store, task):
    return [(number, state, reason) for number, _, state, reason in states(store, task)]


@pytest.mark.every_engine
def test_the_second_trip_draws_only_who_the_first_one_counted(store, register, desk):
    task = register(**PAIRED)
    first_trip(desk, *NAMES)
    others = [desk.wait(name, seconds=1000) for name in "uvwxyz"]
    desk.pass_time(30)
    assert not any(future.done() for future in others)
    for given in desk.assign(*NAMES):
        assert given.round == 2
        report(desk, given, [0.5, 0, 0, 0])
    desk.pass_time(1)
    assert drawn(store, task, 2) == set(NAMES)
    assert len(drawn(store, task, 3) & set("uvwxyz")) == 3
    np.testing.assert_array_equal(store.checkpoint(task, 2)["params"], START + np.array([0.5, 0, 0, 0], np.float32))


def test_a_device_that_did_not_report_is_not_in_the_second_trip(store, register, desk):
    task = register(**PAIRED)
    first, second, third = desk.assign(*NAMES)
    report(desk, first, [1, 1, 1, 1])
    report(desk, second, [1, 1, 1, 1])
    desk.give_up(third)
    desk.pass_time(1)
    reported = {one.device for one in store.cohort(task, 1) if one.report_sha256}
    futures = {name: desk.wait(name, seconds=1000) for name in NAMES}
    desk.pass_time(1)
    assert {name for name, future in futures.items() if future.done()} == reported == drawn(store, task, 2)
    assert len(reported) == 2


def test_who_is_not_back_in_time_is_missing(store, register, desk):
    task = register(**PAIRED)
    first_trip(desk, *NAMES)
    waiting = [desk.wait(name, seconds=1000) for name in "ac"]
    desk.pass_time(59)
    assert not any(future.done() for future in waiting)
    desk.pass_time(2)
    assert all(future.result(timeout=0).round == 2 for future in waiting)
    assert drawn(store, task, 2) == set("ac")


@pytest.mark.every_engine
def test_the_pair_begins_again_when_too_few_come_back(store, register, desk):
    task = register(**PAIRED)
    first_trip(desk, *NAMES)
    waiting = [desk.wait(name, seconds=1000) for name in "axyz"]
    desk.pass_time(61)
    desk.pass_time(1)
    assert ends(store, task)[1] == (2, "abandoned", "cohort-gone")
    assert ends(store, task)[2][:2] == (2, "committed")
    assert "too few of the devices that round 1 counted came back" in ends(store, task)[2][2]
    # The devices that waited in vain are those of the first trip, which is a round later.
    assert sum(future.done() for future in waiting) == 3
    assert len(drawn(store, task, 3)) == 3
    assert list(store.checkpoint(task, 2)) == ["params"]
    assert store.task(task).settings.rounds == 6


def test_a_stranger_opens_a_second_trip_that_no_member_comes_to(store, register, desk):
    task = register(**PAIRED)
    first_trip(desk, *NAMES)
    desk.pass_time(1000)
    assert ends(store, task) == [(1, "committed", "")]
    desk.wait("stranger", seconds=1000)
    desk.pass_time(61)
    assert ends(store, task)[1] == (2, "abandoned", "cohort-gone")


@pytest.mark.every_engine
def test_a_restarted_coordinator_knows_the_cohort_of_the_first_trip(store, register, new_desk):
    task = register(**PAIRED)
    desk = new_desk()
    first_trip(desk, *NAMES)
    desk.assign(*NAMES)  # and their reports are lost with the process
    after = new_desk()
    strangers = [after.wait(name, seconds=1000) for name in "xyz"]
    after.pass_time(1)
    again = after.assign(*NAMES)
    assert [(given.round, given.attempt) for given in again] == [(2, 2)] * 3
    assert not any(future.done() for future in strangers)
    assert ends(store, task) == [(1, "committed", ""), (2, "abandoned", "driver-lost"), (2, "reporting", "")]


@pytest.mark.every_engine
def test_a_restarted_coordinator_goes_on_with_a_pair_that_began_again(store, register, new_desk):
    task = register(**PAIRED)
    desk = new_desk()
    first_trip(desk, *NAMES)
    desk.wait("a", seconds=1000)
    desk.pass_time(61)
    after = new_desk()
    first_trip(after, "x", "y", "z", gradient=(2, 2, 2, 2))
    again = after.assign("z", "y", "x")
    assert [given.round for given in again] == [4] * 3
    np.testing.assert_array_equal(store.checkpoint(task, 3)["gradient"], [2, 2, 2, 2])


def test_a_failed_second_trip_is_tried_again_with_the_same_cohort(register, desk):
    register(**PAIRED)
    first_trip(desk, *NAMES)
    for given in desk.assign(*NAMES):
        desk.give_up(given)
    strangers = [desk.wait(name, seconds=1000) for name in "xyz"]
    back = [desk.wait(name, seconds=1000) for name in NAMES]
    desk.pass_time(61)
    again = [one.result(timeout=0) for one in back]
    assert [(given.round, given.attempt) for given in again] == [(2, 2)] * 3
    assert not any(future.done() for future in strangers)


def test_a_lost_device_is_replaced_by_another_of_the_cohort(store, register, desk):
    register(**PAIRED)
    first_trip(desk, *NAMES)
    waiting = [desk.wait(name, seconds=1000) for name in "ab"]
    desk.pass_time(61)
    early = [future.result(timeout=0) for future in waiting]
    stranger, late = desk.wait("x", seconds=1000), desk.wait("c", seconds=1000)
    assert not late.done()
    desk.hold(early[0])
    desk.live(60, early[0])
    assert late.result(timeout=0).round == 2
    assert not stranger.done()


def test_pairs_that_begin_again_too_often_pause_the_task(store, register, desk):
    task = register(**PAIRED | {"max_attempts": 2})
    for _ in range(2):
        first_trip(desk, *NAMES)
        desk.wait("stranger", seconds=70)
        desk.pass_time(61)
        desk.pass_time(10)
    found = store.task(task)
    assert found.state is TaskState.PAUSED
    assert "round 3 counted came back for round 4, 2 times in a row" in found.reason
    store.resume(task)
    desk.pass_time(1)
    first_trip(desk, *NAMES)
    assert store.rounds(task)[-1].number == 5


@pytest.mark.every_engine
def test_a_rollback_to_a_first_trip_brings_its_cohort_back(store, register, desk):
    task = register(**PAIRED | {"rounds": 8})
    for names in (NAMES, ("d", "e", "f")):
        first_trip(desk, *names)
        first_trip(desk, *names, gradient=(0.5, 0, 0, 0))
    store.pause(task)
    store.roll_back(task, 1)
    store.resume(task)
    desk.pass_time(1)
    strangers = [desk.wait(name, seconds=1000) for name in "def"]
    assert [given.round for given in desk.assign(*NAMES)] == [6] * 3
    assert not any(future.done() for future in strangers)


def test_of_a_paired_task_the_model_before_the_pair_is_kept(store, register, desk):
    task = register(**PAIRED)
    first_trip(desk, *NAMES)
    first_trip(desk, *NAMES, gradient=(0.5, 0, 0, 0))
    first_trip(desk, *NAMES)
    collect(store, Retention(models=1))
    desk.wait("stranger", seconds=1000)
    desk.pass_time(61)
    assert (4, "abandoned", "cohort-gone") in ends(store, task)
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([0.5, 0, 0, 0], np.float32))


def test_the_second_secure_trip_is_for_the_devices_in_the_first_ones_sum(store, register, desk, tmp_path):
    names = tuple(f"d{number}" for number in range(10))
    settings = SECURE | {"goal": 10, "minimum": 8, "rounds": 2, "same_cohort": True}
    task = register(make_bundle(tmp_path / "secure", PLAN, "feddane", SETTINGS, graphs=GRAPHS), **settings)
    devices = [Device(desk, given, [1, 0, 0, 0], plan=PLAN.of_round(1)) for given in desk.assign(*names)]
    run(devices, ("advertise", "share", "open"))
    run(devices[:9], ("upload",))
    desk.pass_time(6)
    run(devices[:9], ("confirm", "reveal"))
    summed = {one.device for one in store.cohort(task, 1) if one.report_sha256}
    assert len(summed) == 9
    desk.pass_time(1)
    futures = [desk.wait(name, seconds=1000) for name in names]
    desk.pass_time(1)
    assert drawn(store, task, 2) == summed
    assert sum(future.done() for future in futures) == 9


def test_devices_of_the_first_trip_are_told_to_come_back_soon(store, register):
    desk = Desk(store, retry=RetryWindow(5.0, 86_400.0))
    register(**PAIRED | {"reporting_deadline_s": 6000.0})
    given = desk.assign(*NAMES)
    report(desk, given[0], [1, 1, 1, 1])
    member, stranger = desk.wait(device_of(store, given[0]), 30), desk.wait("x", 30)
    desk.pass_time(31)
    assert member.result(timeout=0).retry == RetryWindow(5.0, 20.0)
    assert stranger.result(timeout=0).retry.min_s > 1000
    assert desk.arrive("y").retry == RetryWindow(5.0, 20.0)


def device_of(store, given):
    with store.database.reading() as records:
        return records.assignment(given.assignment).device


def test_a_round_that_waits_for_its_cohort_says_so(store, register, desk):
    task = register(**PAIRED)
    first_trip(desk, *NAMES)
    desk.wait("a", seconds=1000)
    desk.wait("x", seconds=1000)
    desk.pass_time(3)
    said = store.progress_of(task).sentence
    assert said.startswith("round 2: 1 of 3 devices waits")
    assert "1 not counted in the first trip of this pair" in said


def test_an_algorithm_of_one_trip_is_refused_the_setting(register, tmp_path):
    with pytest.raises(InvalidSetting, match="same_cohort is for algorithms of two trips, and fedavg has one"):
        register(make_bundle(tmp_path / "one", algorithm="fedavg"), same_cohort=True)


@pytest.mark.parametrize("asked", [{"min_separation_s": 10.0}, {"min_separation_rounds": 2}])
def test_a_separation_is_refused_with_the_same_cohort(asked):
    with pytest.raises(InvalidTask, match=r"min_separation.* left out with same_cohort"):
        TaskSettings(population="phones", goal=1, rounds=2, same_cohort=True, **asked)


def test_both_rounds_of_a_pair_have_the_goal_of_the_first():
    schedule = ServerSchedule(double_every=3, largest_cohort=100)
    settings = TaskSettings(population="phones", goal=4, rounds=9, schedule=schedule, same_cohort=True)
    assert [settings.in_round(number).goal for number in range(1, 9)] == [4, 4, 4, 4, 8, 8, 16, 16]
    assert [first_of_pair(number) for number in range(1, 5)] == [1, 1, 3, 3]
