"""Stalling: a third of the devices harm the rounds of the others, in any way; and a plan that fails everywhere."""

import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from coordinator.commands import AwaitAssignment, CheckInDevice
from coordinator.errors import Refusal
from coordinator.rules.selection import Eligibility
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import Buffered
from fedcore.wire.messages import Assignment, CheckIn
from tests.coordinator.conftest import Desk, states
from tests.coordinator.devices import CAPABILITIES
from tests.coordinator.test_secure import SECURE, Device, run

pytestmark = pytest.mark.promise("If a third of the devices fail, tasks progress; if all do, they pause")

HONEST, HOSTILE = [f"honest{number}" for number in range(30)], [f"hostile{number}" for number in range(15)]
DEADLINE_S, WORK_S, ATTEMPTS = 60.0, 20.0, 15
SETTINGS = {"goal": 9, "over_selection": 1.3, "rounds": 1000, "reporting_deadline_s": DEADLINE_S}
MOST_FAILED = len(HOSTILE) // 4
"""Of a cohort of 12, of which 9 must report, four stall an attempt."""


def gives_up(after_s) -> Callable:
    return lambda desk: (after_s, desk.give_up)


def vanishes(after_s) -> Callable:
    return lambda desk: (after_s, lambda given: desk.driver.presence.end(given.assignment, broken=True))


ABLE = CheckIn(capabilities=CAPABILITIES, examples={"default": 10})
FAILED = {"too-few-reports", "devices-lost"}
WAYS = {
    "gives up at once": [gives_up(0)],
    "gives up half-way": [gives_up(DEADLINE_S / 2)],
    "gives up late": [gives_up(0.9 * DEADLINE_S)],
    "gives up at the last moment": [gives_up(DEADLINE_S - 3)],
    "vanishes at once": [vanishes(0)],
    "vanishes half-way": [vanishes(DEADLINE_S / 2 + 1)],
    "vanishes late": [vanishes(0.9 * DEADLINE_S)],
    "is late": [gives_up(1e9)],
}
WAYS["in turns"] = [way for (way,) in WAYS.values()]
each_way = pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)


def some_ways(*names):
    return pytest.mark.parametrize("ways", [WAYS[name] for name in names], ids=names)


@pytest.fixture
def desk(new_desk) -> Desk:
    return new_desk(random.Random(1))


class Siege:
    """Devices that come again all the time. Honest ones report after `WORK_S`; hostile ones do as `ways` say."""

    def __init__(self, desk: Desk, task: str, names, ways, seed=0) -> None:
        self.desk, self.task, self.names, self.ways = desk, task, names, ways
        self.source = random.Random(seed)
        self.waiting, self.due = {}, []

    def live(self, attempts=ATTEMPTS) -> list[str]:
        """Go on until so many attempts have ended, or the task is paused; how each ended, "" for a commit."""
        while True:
            ended = [
                reason
                for *_, state, reason in states(self.desk.store, self.task)
                if state == "committed" or reason in FAILED
            ]
            if len(ended) >= attempts or self.desk.store.task(self.task).state is not TaskState.ACTIVE:
                return ended
            self._turn()

    def _turn(self) -> None:
        came = [name for name in self.source.sample(self.names, len(self.names)) if name not in self.waiting]
        sessions = self.desk.turn(*(CheckInDevice("phones", name, Eligibility.of(name, ABLE)) for name in came))
        waits = [AwaitAssignment(one.result().session, name, 1e9) for one, name in zip(sessions, came, strict=True)]
        self.waiting |= zip(came, self.desk.turn(*waits), strict=True)
        for name in [name for name, answer in self.waiting.items() if answer.done()]:
            given = self.waiting.pop(name).result(timeout=0)
            if isinstance(given, Assignment):
                self._begin(name, given)
        now = self.desk.now
        for _, act, given in [one for one in self.due if one[0] <= now]:
            with suppress(Refusal):
                act(given)
        self.due = [one for one in self.due if one[0] > now]
        self.desk.pass_time(min([5.0, *(at - now for at, _, _ in self.due)]))

    def _begin(self, name: str, given: Assignment) -> None:
        self.desk.hold(given)
        after_s, act = WORK_S, self.desk.report
        if name in HOSTILE:
            after_s, act = self.source.choice(self.ways)(self.desk)
        self.due.append((self.desk.now + after_s, act, given))


@each_way
def test_a_third_of_the_devices_stalls_few_attempts_and_pauses_nothing(store, register, desk, ways):
    task = register(**SETTINGS)
    ended = Siege(desk, task, HONEST + HOSTILE, ways).live()
    assert sum(reason != "" for reason in ended) <= MOST_FAILED
    assert store.task(task).state is TaskState.ACTIVE


@each_way
def test_a_third_of_the_devices_holds_up_few_rounds_with_reports_enough(store, register, desk, ways):
    task = register(**SETTINGS | {"minimum": 4})
    assert Siege(desk, task, HONEST + HOSTILE, ways).live() == [""] * ATTEMPTS
    assert desk.now < ATTEMPTS * (WORK_S + 5) + MOST_FAILED * DEADLINE_S


@each_way
def test_devices_that_failed_before_pause_no_task_that_needs_them(store, register, desk, ways):
    task = register(**SETTINGS)
    siege = Siege(desk, task, HONEST[:8] + HOSTILE[:4], ways)
    assert set(siege.live(8)) <= FAILED
    assert store.task(task).state is TaskState.ACTIVE
    siege.names = HONEST[:9]
    assert siege.live(12)[-1] == ""


@some_ways("gives up at once", "vanishes at once", "is late", "in turns")
def test_a_plan_that_fails_everywhere_is_paused_at_once(store, register, desk, ways):
    task = register(**SETTINGS)
    ended = Siege(desk, task, HOSTILE, ways).live()
    assert (len(ended), store.task(task).state) == (5, TaskState.PAUSED)


@some_ways("gives up half-way", "gives up late", "in turns")
def test_a_third_of_the_devices_slows_buffered_rounds_by_little(store, register, desk, ways):
    task = register(goal=5, rounds=1000, buffered=Buffered(concurrency=10), reporting_deadline_s=DEADLINE_S)
    ended = Siege(desk, task, HONEST + HOSTILE, ways).live(30)
    assert sum(reason != "" for reason in ended) <= len(HOSTILE) // 10
    assert store.task(task).state is TaskState.ACTIVE
    assert desk.now < 30 * WORK_S


def test_a_third_of_the_devices_that_gives_up_stalls_few_secure_rounds(store, register, desk):
    task = register(**SECURE | {"rounds": 1000, "over_selection": 1.5})
    names, waiting, ended = HONEST[:16] + HOSTILE[:8], {}, []
    while len(ended) < 8:
        waiting |= {name: desk.wait(name, seconds=1e9) for name in names if name not in waiting}
        drawn = {name: waiting.pop(name).result() for name in names if waiting[name].done()}
        honest = [Device(desk, given, [0.5, -0.25, 0, 1], weight=2) for name, given in drawn.items() if name in HONEST]
        with suppress(Refusal):
            for name in drawn.keys() & set(HOSTILE):
                desk.give_up(drawn[name])
            run(honest)
        desk.pass_time(1)
        ended = [reason for *_, state, reason in states(store, task) if state == "committed" or reason in FAILED]
    assert sum(reason != "" for reason in ended) <= len(HOSTILE[:8]) // 5
    assert store.task(task).state is TaskState.ACTIVE
