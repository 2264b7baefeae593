"""Devices that held up a round are left out of the next attempts at it, and drawn last for a while."""

import random
from collections import Counter
from contextlib import suppress

import pytest

from coordinator.driver.memory.open_rounds import unreliable_devices
from coordinator.errors import NoLongerNeeded
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import Buffered
from tests.coordinator.conftest import Desk, states
from tests.coordinator.test_secure import LENIENT, PHASES, SECURE, run, seat

pytestmark = pytest.mark.promise("If a third of the devices fail, tasks progress; if all do, they pause")

every_engine = pytest.mark.every_engine
UNRELIABLE_ROUNDS, SELECTION_S = 20, 60
HONEST, SLOW = [f"honest{number}" for number in range(12)], [f"slow{number}" for number in range(5)]
SETTINGS = {"goal": 9, "over_selection": 1.3, "rounds": 1000, "reporting_deadline_s": 60.0, "max_attempts": 100}


class Crowd:
    """Devices that come in any order, again as soon as their round is over. The slow ones stay, and never report."""

    def __init__(self, desk, names, slow=(), seed=0):
        self.desk, self.names, self.slow, self.source = desk, names, slow, random.Random(seed)
        self.waiting = {}

    def attempt(self):
        """One attempt at a round: the devices that it drew, and after how many seconds."""
        began = self.desk.now
        came = [name for name in self.names if name not in self.waiting]
        self.waiting |= {name: self.desk.wait(name, seconds=1e9) for name in self.source.sample(came, len(came))}
        while not (drawn := {name for name in self.names if self.waiting[name].done()}):
            self.desk.pass_time(5)
        waited_s = self.desk.now - began
        given = {name: self.waiting.pop(name).result(timeout=0) for name in drawn}
        for name, one in sorted(given.items(), reverse=True):  # the slow ones first, while their reports count
            self.desk.hold(one)
            if name not in self.slow:
                with suppress(NoLongerNeeded):
                    self.desk.report(one)
        while not self._over(one):
            self.desk.pass_time(5)
        return drawn, waited_s

    def _over(self, given):
        """Whether the attempt of an assignment has ended."""
        this = given.round, given.attempt
        rounds = self.desk.store.rounds(given.task)
        return next(one.state.ended for one in rounds if (one.number, one.attempt) == this)


@pytest.mark.parametrize("seed", range(3))
def test_five_of_seventeen_devices_stall_one_attempt_and_no_more(store, register, new_desk, seed):
    task = register(**SETTINGS)
    crowd = Crowd(new_desk(random.Random(seed)), HONEST + SLOW, SLOW, seed)
    for _ in range(15):
        crowd.attempt()
    failed = [attempt for _, attempt, state, _ in states(store, task) if state == "abandoned"]
    assert len(failed) <= 1


def stalled(store, register, desk, **settings):
    """A crowd of whom five let the deadline of the first attempt pass, as nobody else was there."""
    task = register(**SETTINGS | {"goal": 4, "over_selection": 1.25} | settings)
    Crowd(desk, SLOW, SLOW).attempt()
    assert states(store, task)[-1] == (1, 1, "abandoned", "too-few-reports")
    return task


def test_who_let_the_deadline_pass_is_left_out_of_the_next_attempt(store, register, desk):
    stalled(store, register, desk)
    drawn, waited_s = Crowd(desk, HONEST[:4] + SLOW, SLOW).attempt()
    assert (drawn, waited_s) == (set(HONEST[:4]), SELECTION_S)


@every_engine
def test_a_restarted_coordinator_knows_who_let_the_deadline_pass(store, register, new_desk):
    stalled(store, register, new_desk())
    drawn, _ = Crowd(new_desk(), HONEST[:4] + SLOW, SLOW).attempt()
    assert drawn == set(HONEST[:4])


@every_engine
def test_another_replica_knows_who_let_the_deadline_pass(store, register, new_desk):
    first = new_desk()
    stalled(store, register, first)
    second = Desk(store, url="http://second", now=first.now)
    first.driver.drain()
    for one in (first, second):
        one.pass_time(1)
    drawn, _ = Crowd(second, HONEST[:4] + SLOW, SLOW).attempt()
    assert drawn == set(HONEST[:4])


def test_late_devices_are_drawn_when_the_others_are_too_few_for_a_round(store, register, desk):
    task = stalled(store, register, desk)
    drawn, waited_s = Crowd(desk, HONEST[:3] + SLOW).attempt()
    assert (set(HONEST[:3]) <= drawn, len(drawn), waited_s) == (True, 5, SELECTION_S)
    assert states(store, task)[1] == (1, 2, "committed", "")


def test_a_plan_that_is_too_slow_for_all_still_pauses_its_task(store, register, desk):
    task = stalled(store, register, desk, max_attempts=2)
    Crowd(desk, SLOW, SLOW).attempt()
    assert store.task(task).state is TaskState.PAUSED
    assert "round 1 failed 2 times in a row, at last with too-few-reports" in store.task(task).reason


@every_engine
def test_late_devices_fill_the_places_that_are_left_until_they_report(store, register, new_desk):
    stalled(store, register, new_desk())
    Crowd(new_desk(), HONEST[:5]).attempt()
    crowd = Crowd(new_desk(), HONEST[:4] + SLOW)
    drawn, waited_s = crowd.attempt()
    assert (set(HONEST[:4]) <= drawn, len(drawn), waited_s) == (True, 5, SELECTION_S)
    crowd.names = sorted(drawn)
    assert crowd.attempt() == (drawn, 0)
    assert Crowd(new_desk(), sorted(drawn)).attempt() == (drawn, 0)


@every_engine
def test_late_devices_are_as_the_others_after_twenty_rounds(store, register, new_desk):
    stalled(store, register, new_desk())
    crowd = Crowd(new_desk(), HONEST[:5] + SLOW)
    for _ in range(UNRELIABLE_ROUNDS + 1):
        drawn, waited_s = crowd.attempt()
        assert (drawn, waited_s) == (set(HONEST[:5]), 0)
    drawn, waited_s = Crowd(new_desk(), SLOW).attempt()
    assert (drawn, waited_s) == (set(SLOW), 0)


def test_a_late_device_takes_the_place_of_no_lost_one(store, register, desk):
    stalled(store, register, desk)
    waiting = [desk.wait(name, seconds=1e9) for name in SLOW]
    given = desk.assign(*HONEST[:5])
    for one in given[:3]:
        desk.report(one)
    desk.live(6)
    assert not any(one.done() for one in waiting)


def test_a_round_that_waits_says_who_held_up_another(store, register, desk):
    task = stalled(store, register, desk)
    for name in SLOW:
        desk.wait(name, seconds=1e9)
    desk.wait(HONEST[0], seconds=1e9)
    desk.pass_time(4)
    progress = store.progress_of(task)
    assert "1 of 5 devices waits" in progress.sentence
    assert "5 that held up a round and are drawn last" in progress.sentence


def test_the_draw_is_uniform_among_those_who_are_not_late(store, register, new_desk):
    stalled(store, register, new_desk())
    crowd, drawn = Crowd(new_desk(random.Random(5)), HONEST + SLOW, SLOW), Counter()
    for _ in range(UNRELIABLE_ROUNDS):
        names, _ = crowd.attempt()
        drawn.update(names)
    assert set(drawn) == set(HONEST)
    # Each of twelve is drawn with chance 5/12 in each of 20 rounds: 8.3 times, with a deviation of 2.2.
    assert all(1 <= count <= 16 for count in drawn.values())


def test_in_mode_buffered_a_late_device_waits_for_the_others(store, register, desk):
    task = register(goal=2, rounds=9, buffered=Buffered(concurrency=1), reporting_deadline_s=60.0)
    desk.hold(desk.assign("slow")[0])
    desk.pass_time(61)
    busy = desk.assign("first")[0]
    late, other = desk.wait("slow", seconds=1e9), desk.wait("second", seconds=1e9)
    desk.report(busy)
    desk.turn()
    assert (late.done(), other.done()) == (False, True)
    desk.report(other.result(timeout=0))
    desk.turn()
    assert late.done()
    assert states(store, task)[0] == (1, 1, "committed", "")


TEN = [f"d{number}" for number in range(10)]


def unreliable(store, task):
    """The devices that are unreliable by the rows, which any driver reads."""
    with store.database.reading() as records:
        return set(unreliable_devices(records, records.task(task)))


def devices_of(store, task, seats):
    ids = {seat.given.assignment for seat in seats}
    return {one.device for one in store.cohort(task, 1) if one.id in ids}


def fall_silent(store, desk, task, phase):
    """Four of ten devices of a secure round are silent from a phase on; answers which."""
    devices = seat(desk, TEN)
    run(devices, PHASES[:phase])
    run(devices[4:], PHASES[phase : phase + 1])
    while not store.rounds(task)[0].state.ended:
        desk.pass_time(600 if phase == 0 else 5)
        with suppress(NoLongerNeeded, TypeError):
            run(devices[4:], PHASES[phase + 1 :])
    return devices_of(store, task, devices[:4])


@every_engine
@pytest.mark.parametrize("phase", [0, 2, 5])
def test_another_replica_knows_who_fell_silent_in_a_secure_round(store, register, new_desk, phase):
    task = register(**LENIENT | {"rounds": 2, "over_selection": 1.0})
    first = new_desk()
    silent = fall_silent(store, first, task, phase)
    assert (unreliable(store, task), store.rounds(task)[0].reason) == (silent, "too-few-reports")
    second = Desk(store, url="http://second", now=first.now)
    first.driver.drain()
    for one in (first, second):
        one.pass_time(1)
    again = {name: second.wait(name, seconds=1e9) for name in sorted(silent)}
    others = [second.wait(f"other{number}") for number in range(10)]
    assert all(one.done() for one in others)
    assert not any(one.done() for one in again.values())


def test_devices_that_more_than_enough_others_precede_stay_reliable(store, register, desk):
    task = register(**SECURE | {"over_selection": 1.25, "rounds": 2})
    devices = seat(desk, TEN)
    run(devices[:8], PHASES[:1])
    desk.pass_time(5)
    run(devices[:8], PHASES[1:])
    assert states(store, task)[0] == (1, 1, "committed", "")
    assert unreliable(store, task) == set()


@pytest.mark.parametrize("how", ["is cancelled", "loses its driver", "is past its deadline"])
def test_devices_whose_secure_round_ends_otherwise_stay_reliable(store, register, new_desk, how):
    task, desk = register(**LENIENT | {"over_selection": 1.0}), new_desk()
    devices = seat(desk, TEN)
    run(devices, PHASES[:2])
    run(devices[1:], PHASES[2:3])
    if how == "is cancelled":
        store.cancel(task)
        desk.pass_time(1)
    elif how == "loses its driver":
        new_desk()
    else:
        desk.pass_time(10_000)
    assert store.rounds(task)[0].state.ended
    assert unreliable(store, task) == (devices_of(store, task, devices[:1]) if "deadline" in how else set())
