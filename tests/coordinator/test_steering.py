"""The windows of a driver that runs: what it expects of its rounds."""

from __future__ import annotations

import pytest

from coordinator.commands import AwaitAssignment, CheckInDevice
from coordinator.rules.selection import Eligibility
from fedcore.wire.messages import CheckIn, RetryWindow
from tests.coordinator.conftest import CAPABILITIES, Desk

BOUNDS = RetryWindow(5.0, 86_400.0)


def arrival(device, examples):
    return CheckInDevice(
        "phones", device, Eligibility.of(device, CheckIn(capabilities=CAPABILITIES, examples=examples))
    )


@pytest.fixture
def desk(store):
    return Desk(store, retry=BOUNDS)


def test_device_not_drawn_returns_when_the_running_round_should_end(register, desk):
    register(goal=1, rounds=9, reporting_deadline_s=600)
    (running,) = desk.assign("a")
    waiting = desk.wait("b", seconds=30)
    desk.pass_time(100)
    # Nothing is known of its rounds yet: half of what they may take.
    assert waiting.result(timeout=0).retry == RetryWindow(190.0, 210.0)
    desk.report(running)
    (second,) = desk.assign("c")
    waiting = desk.wait("d", seconds=30)
    desk.pass_time(30)
    assert waiting.result(timeout=0).retry == RetryWindow(60.0, 80.0)
    desk.report(second)


def test_round_of_a_paused_task_counts_for_how_long_rounds_take(store, register):
    # Long after its clock began: the population must not be sent away for as long as the coordinator has run.
    desk = Desk(store, retry=BOUNDS, now=50_000.0)
    task = register(goal=1, rounds=9, reporting_deadline_s=600)
    (running,) = desk.assign("a")
    store.pause(task)
    desk.pass_time(50)
    store.resume(task)
    desk.pass_time(50)
    desk.report(running)
    desk.assign("b")
    waiting = desk.wait("c", seconds=30)
    desk.pass_time(30)
    assert waiting.result(timeout=0).retry == RetryWindow(60.0, 80.0)


def test_devices_of_a_selection_with_too_few_return_together_at_once(register, desk):
    register(goal=3, selection_timeout_s=60)
    waiting = [desk.wait(name, seconds=500) for name in "ab"]
    desk.pass_time(60)
    assert {future.result(timeout=0).retry for future in waiting} == {RetryWindow(5.0, 25.0)}


def test_device_that_no_task_can_use_stays_away_for_a_minute_or_so(register, desk):
    register(min_examples=50)
    assert desk.arrive("a").retry == RetryWindow(45.0, 75.0)


def test_devices_that_took_part_or_rest_return_after_their_rest(register, desk):
    register(goal=1, rounds=9, min_separation_s=3600)
    assert desk.arrive("a").retry.min_s == 3600
    desk.report(*desk.assign("a"))
    desk.pass_time(600)
    answer = desk.arrive("a")
    assert (answer.reason, answer.retry.min_s) == ("resting", 3000)


@pytest.mark.parametrize(
    "visit",
    [
        lambda desk, _: desk.wait("restless", seconds=20),
        lambda desk, number: desk.arrive(f"gone {number}"),
        lambda desk, _: desk.arrive("a"),
    ],
    ids=["superseded", "left", "resting"],
)
def test_visits_without_a_return_take_no_place_in_the_next_round(register, desk, visit):
    register(goal=5, rounds=9, min_separation_rounds=3, reporting_deadline_s=600)  # eight places
    given = desk.assign("a", "b", "c", "d", "e")
    desk.pass_time(500)
    for assignment in given:
        desk.report(assignment)
    desk.assign("p", "q", "r", "s", "t")
    desk.pass_time(1)
    for number in range(10):
        visit(desk, number)
    desk.pass_time(60)
    waiting = desk.wait("late", seconds=10)
    desk.pass_time(10)
    # When the next selection opens, and not in the queue.
    assert waiting.result(timeout=0).retry == RetryWindow(419.0, 439.0)


def test_rest_in_rounds_is_told_in_the_time_that_rounds_take(register, desk):
    register(goal=1, rounds=9, min_separation_rounds=4)
    (given,) = desk.assign("a")
    desk.pass_time(100)
    desk.report(given)
    desk.turn()
    assert desk.arrive("a").retry.min_s == pytest.approx(3 * (100 + 20))


def test_hopeless_check_in_is_answered_while_the_driver_is_busy(register, desk):
    register(min_examples=50, min_separation_s=3600, rounds=9, goal=1)
    hopeless, hopeful = arrival("b", {"default": 10}), arrival("a", {"default": 50})
    assert desk.driver.turn_away(hopeless) is None  # nothing is known yet, not even the population
    desk.pass_time(1)
    with desk.store.database.writing():
        rejected = desk.driver.turn_away(hopeless)
        assert desk.driver.turn_away(hopeful) is None
    assert rejected.reason == desk.arrive("c").reason == "not-eligible"
    (future,) = desk.turn(AwaitAssignment(desk.ask(hopeful).session, "a", 5))
    desk.report(future.result(timeout=0))
    assert desk.driver.turn_away(hopeful).reason == "resting"


def test_closing_coordinator_leaves_every_answer_to_the_driver(register, desk):
    register(min_examples=50)
    desk.turn()
    desk.driver.drain()
    desk.turn()
    assert desk.driver.turn_away(arrival("a", {})) is None
