"""Devices that come before they were told to: they change nothing for anybody, and hear when to come."""

from __future__ import annotations

import pytest

from coordinator.commands import AwaitAssignment
from fedcore.wire.messages import Accepted, Rejected, RetryWindow
from tests.coordinator.conftest import Desk, bare
from tests.coordinator.test_steering import BOUNDS, arrival

VISITS, EVERY_S = 900, 0.2
"""Five visits a second for three minutes."""


@pytest.fixture
def desk(store):
    return Desk(store, retry=BOUNDS)


def useless(desk, device):
    """A check-in that no task can use."""
    visit = arrival(device, {"default": 1})
    return desk.driver.turn_away(visit) or desk.ask(visit)


def impatient(desk, device):
    """A check-in that no task can use until the round has ended: it waits for no moment."""
    answer = desk.arrive(device)
    return desk.ask(AwaitAssignment(answer.session, device, 0.0)) if isinstance(answer, Accepted) else answer


def told(desk, *devices):
    """When devices hear that they should come back, each of which waits for a second and is not drawn."""
    futures = [desk.wait(device, seconds=1) for device in devices]
    desk.pass_time(1)
    return [future.result(timeout=0).retry for future in futures]


@pytest.mark.parametrize("visit", [useless, impatient])
def test_one_device_that_comes_all_the_time_sends_nobody_away(store, register, visit):
    register(goal=2, min_examples=10, reporting_deadline_s=600)  # about three places
    crowd = [f"other {number}" for number in range(8)]
    windows = []
    for attack in (False, True):
        desk = Desk(store, retry=BOUNDS)
        for given in desk.assign("p", "q"):
            desk.hold(given)
        desk.pass_time(1)
        for _ in range(VISITS):
            desk.now += EVERY_S
            if attack:
                visit(desk, "restless")
        windows.append([one.max_s for one in told(desk, *crowd)])
    alone, attacked = windows
    # It holds one place, so the others are one further back at most. A place is worth two minutes here.
    assert all(later <= sooner for later, sooner in zip(attacked, [*alone[1:], alone[-1] + 150], strict=True))


@pytest.mark.parametrize("visit", [useless, impatient])
def test_device_that_comes_too_early_hears_how_long_to_stay_away(register, desk, visit):
    register(goal=1, min_examples=10, reporting_deadline_s=600)
    desk.hold(*desk.assign("p"))
    desk.pass_time(1)
    first = visit(desk, "a").retry
    for passed in (10, 20):
        desk.pass_time(10)
        assert bare(visit(desk, "a")) == Rejected("too-early", RetryWindow(first.min_s - passed, first.max_s - passed))
    desk.pass_time(first.min_s - 20)
    assert visit(desk, "a").reason in ("not-eligible", "not-selected")


def test_device_that_is_nearly_due_still_stays_away_for_the_least_time(register, desk):
    register(min_examples=50)
    assert desk.arrive("a").retry == RetryWindow(45.0, 75.0)
    desk.pass_time(44)
    assert bare(desk.arrive("a")) == Rejected("too-early", RetryWindow(5.0, 31.0))


def test_device_that_was_accepted_may_come_back_at_once(register, desk):
    register(goal=1, rounds=9)
    assert desk.arrive("lost its connection").session
    assert desk.arrive("lost its connection").session
    (given,) = desk.assign("worked")
    desk.report(given)
    assert desk.assign("worked")


def test_new_task_lets_every_device_of_its_population_come(register, desk):
    register(min_examples=50)
    register(min_examples=50, population="tablets")
    assert {desk.arrive("a", population=name).reason for name in ("phones", "tablets")} == {"not-eligible"}
    register(goal=1)
    desk.pass_time(1)
    assert desk.arrive("a").session
    assert desk.arrive("a", population="tablets").reason == "too-early"


def test_restart_of_the_coordinator_forgets_who_should_stay_away(store, register, desk):
    register(min_examples=50)
    for _ in range(2):
        reasons = [desk.arrive("a").reason for _ in range(2)]
        assert reasons == ["not-eligible", "too-early"]
        desk = Desk(store, retry=BOUNDS)


def test_replica_forgets_who_should_stay_away_from_a_population_it_lost(register, desk):
    register(min_examples=50)
    assert [desk.arrive("a").reason for _ in range(2)] == ["not-eligible", "too-early"]
    memory = desk.driver._memory
    memory.drop_populations(frozenset({"phones"}), desk.now)
    desk.pass_time(1)
    assert desk.arrive("a").reason == "not-eligible"
