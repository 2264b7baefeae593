"""Devices that vanish in mid-round, on the driver: their places are free within seconds, and the round goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordinator.errors import NoLongerNeeded
from coordinator.rules.states import AssignmentState, TaskState
from tests.coordinator.bundles import START
from tests.coordinator.conftest import states
from tests.coordinator.test_secure import NAMES, PHASES, SECURE, Device, run, seat

every_engine = pytest.mark.every_engine
PATIENT = SECURE | {"secagg": replace(SECURE["secagg"], phase_s=30.0)}
"""Where a device that vanishes is lost before its phase ends."""


@pytest.mark.promise("Devices that vanish during a round do not hold it up")
@every_engine
def test_waiting_device_takes_the_place_of_a_lost_one(store, register, desk):
    task = register(goal=2, rounds=1)
    here, lost = desk.assign("a", "b")
    waiting = desk.wait("c", seconds=100)
    desk.live(6, here)
    late = waiting.result(timeout=0)
    assert (late.slot, late.round, late.attempt, late.checkpoint) == (2, 1, 1, here.checkpoint)
    assert 590 < late.report_within_s < 600
    with pytest.raises(NoLongerNeeded, match="lost"):
        desk.report(lost)
    desk.report(here, [1, 0, 0, 0])
    desk.report(late, [0, 1, 0, 0])
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([0.5, 0.5, 0, 0]))
    (record,) = store.rounds(task)
    assert (record.assigned, record.reported, record.lost, record.not_needed, record.expired) == (3, 2, 1, 0, 0)
    assert [one.state for one in store.cohort(task, 1)][lost.slot] is AssignmentState.LOST


@every_engine
def test_round_without_a_replacement_is_tried_again_at_once_with_others(store, register, desk):
    task = register(goal=2)
    here, _ = desk.assign("a", "b")
    desk.report(here)
    desk.live(9)
    assert states(store, task) == [(1, 1, "abandoned", "devices-lost")]
    again = desk.assign("c", "d")
    assert [given.attempt for given in again] == [2, 2]
    for given in again:
        desk.report(given)
    assert states(store, task)[1] == (1, 2, "committed", "")


def test_nobody_is_in_a_round_twice(store, register, desk):
    task = register(goal=2, rounds=1)
    here, _ = desk.assign("a", "b")
    back = {name: desk.wait(name, seconds=100) for name in "ab"}
    desk.report(here, [1, 0, 0, 0])
    desk.live(6)
    assert [future.done() for future in back.values()] == [False, False]
    desk.live(4)
    desk.pass_time(60)
    assert {future.result(timeout=0).attempt for future in back.values()} == {2}
    assert len(store.cohort(task, 1)) == 2


def test_round_that_needs_no_more_ends_without_its_lost_devices(store, register, desk):
    task = register(goal=3, minimum=2, rounds=1)
    first, second, _ = desk.assign("a", "b", "c")
    for given in (first, second):
        desk.report(given)
    desk.live(6)
    assert states(store, task) == [(1, 1, "committed", "")]


def test_attempts_that_only_lost_devices_do_not_pause_the_task(store, register, desk):
    task = register(goal=2, max_attempts=2)
    for pair in ("ab", "cd", "ef", "gh"):
        here, _ = desk.assign(*pair)
        desk.report(here)
        desk.live(9)
    assert [reason for *_, reason in states(store, task)] == ["devices-lost"] * 4
    assert store.task(task).state is TaskState.ACTIVE


@every_engine
def test_attempts_that_lost_every_device_count_as_failures(store, register, desk):
    task = register(goal=2, max_attempts=2)
    for pair in ("ab", "cd"):
        desk.assign(*pair)
        desk.live(9)
    assert [reason for *_, reason in states(store, task)] == ["too-few-reports"] * 2
    assert store.task(task).state is TaskState.PAUSED


@every_engine
def test_device_that_vanished_does_not_rest(register, desk):
    register(goal=2, rounds=9, min_separation_rounds=3)
    here, _ = desk.assign("a", "b")
    late = desk.wait("c", seconds=100)
    desk.live(6, here)
    for given in (here, late.result(timeout=0)):
        desk.report(given)
    desk.turn()
    answers = {name: desk.arrive(name) for name in "abc"}
    assert sorted(getattr(answer, "reason", "") for answer in answers.values()) == ["", "resting", "resting"]


@every_engine
def test_lost_devices_are_counted_apart(store, register, desk):
    task = register(goal=1, minimum=1, over_selection=3, rounds=9)
    here, gone, spare = desk.assign("a", "b", "c")
    desk.live(6, here, spare)
    desk.report(here)
    desk.turn()
    (record,) = [one for one in store.rounds(task) if one.number == 1]
    assert (record.assigned, record.reported, record.lost, record.not_needed) == (3, 1, 1, 1)
    text = desk.driver.metrics.text().decode()
    for state, count in (("lost", 1), ("not-needed", 1)):
        assert f'muster_unreported_total{{state="{state}"}} {count}.0' in text
    desk.pass_time(61)
    desk.assign("x", "y", "z")
    with store.database.reading() as records:
        found = {one.shape for one in records.sessions.of(store.task(task))}
    assert {f"accepted > waited > assigned > {how}" for how in ("reported", "lost", "not needed")} <= found
    assert gone.assignment != spare.assignment


def test_device_sent_away_while_a_round_lacks_some_returns_at_once(register, desk):
    register(goal=2, rounds=9, reporting_deadline_s=3600)
    here, _ = desk.assign("a", "b")
    desk.pass_time(0.5)
    late = desk.wait("a", seconds=6)  # it is in the round already
    desk.live(6.5, here)
    assert late.result(timeout=0).retry.max_s < 60


def test_draining_coordinator_takes_nobody_for_lost(store, register, desk):
    task = register(goal=1)
    (given,) = desk.assign("a")
    desk.driver.drain()
    desk.live(20)
    desk.report(given)
    assert states(store, task)[0] == (1, 1, "committed", "")


@pytest.mark.promise("Devices that vanish during a round do not hold it up")
@pytest.mark.parametrize("after", range(1, 6))
def test_secure_round_goes_on_without_a_device_that_vanishes_in_any_phase(store, register, desk, after):
    task = register(**PATIENT | {"goal": 9, "selection_timeout_s": 600})
    devices = seat(desk, [*NAMES, "d8"])
    run(devices, PHASES[:after])
    run(devices[1:], PHASES[after : after + 1])
    desk.live(8, *(one.given for one in devices[1:]))
    run(devices[1:], PHASES[after + 1 :])
    desk.turn()
    assert states(store, task) == [(1, 1, "committed", "")]
    in_the_sum = after >= 4
    state = AssignmentState.REPORTED if in_the_sum else AssignmentState.LOST
    assert next(one.state for one in store.cohort(task, 1) if one.id == devices[0].given.assignment) is state


def test_silent_device_that_is_in_the_sum_is_heard_when_it_speaks_again(store, register, desk):
    task = register(**PATIENT)
    devices = seat(desk)
    silent, slow, *others = devices
    run(devices, PHASES[:4])
    run(others, ["confirm"])
    desk.live(8, *(one.given for one in [slow, *others]))
    run([silent, slow], ["confirm"])
    run(devices, ["reveal"])
    desk.turn()
    assert states(store, task) == [(1, 1, "committed", "")]
    assert all(device.result().summed for device in devices)


def test_devices_that_vanish_before_they_reveal_are_late(store, register, desk):
    task = register(**PATIENT)
    devices = seat(desk)
    run(devices, PHASES[:5])
    run(devices[4:], PHASES[5:])
    desk.live(8, *(one.given for one in devices[4:]))
    assert states(store, task) == [(1, 1, "abandoned", "too-few-reports")]
    late = {one.id for one in store.cohort(task, 1) if one.state is AssignmentState.EXPIRED}
    assert late == {one.given.assignment for one in devices[:4]}


@every_engine
def test_secure_round_below_its_minimum_is_tried_again_with_others(store, register, desk):
    task = register(**SECURE)
    devices = seat(desk)
    run(devices[1:], ("advertise",))
    desk.live(9, *(one.given for one in devices[1:]))
    assert states(store, task) == [(1, 1, "abandoned", "devices-lost")]
    again = seat(desk, [f"e{number}" for number in range(8)])
    assert {one.given.attempt for one in again} == {2}


def test_device_replaces_the_last_one_a_secure_round_waits_for(store, register, desk):
    task = register(**SECURE)
    devices = seat(desk)
    run(devices[1:], ("advertise",))
    waiting = desk.wait("late", seconds=100)
    desk.live(6, *(one.given for one in devices[1:]))
    late = Device(desk, waiting.result(timeout=0), [0.5, -0.25, 0, 1], weight=2)
    run([late], ("advertise",))
    run([*devices[1:], late], PHASES[1:])
    assert states(store, task) == [(1, 1, "committed", "")]


@every_engine
def test_driver_recovers_from_a_failed_transaction_while_devices_are_lost(store, register, desk, failing_commit):
    task = register(goal=2, minimum=2, over_selection=1.0)
    desk.assign("a", "b")
    failing_commit["failing"] = True
    desk.live(6)
    failing_commit["failing"] = False
    desk.live(8)
    assert [state for _, _, state, _ in states(store, task)] == ["abandoned"]


@every_engine
def test_device_replaces_one_lost_in_training_in_a_secure_round(store, register, desk):
    task = register(**SECURE)
    devices = seat(desk)
    run(devices[2:], ("advertise",))
    waiting = desk.wait("late", seconds=100)
    desk.live(6, *(one.given for one in devices[1:]))
    late = Device(desk, waiting.result(timeout=0), [0.5, -0.25, 0, 1], weight=2)
    assert (late.given.slot, late.given.secagg) == (8, devices[0].given.secagg)
    run([devices[1], late], ("advertise",))
    run([*devices[1:], late], PHASES[1:])
    assert states(store, task) == [(1, 1, "committed", "")]
    assert store.rounds(task)[0].reported == 8
