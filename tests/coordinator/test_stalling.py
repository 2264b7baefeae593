"""Stalling: a third of the devices harm the rounds of the others, in any way; and a plan that fails everywhere."""

import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from coordinator.commands import AwaitAssignment, CheckInDevice
from coordinator.driver.memory.open_rounds import unreliable_devices
from coordinator.errors import NoLongerNeeded, Refusal
from coordinator.rules.selection import Eligibility
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import Buffered
from fedcore.wire.messages import Assignment, CheckIn
from tests.coordinator.conftest import Desk, states
from tests.coordinator.devices import CAPABILITIES
from tests.coordinator.test_secure import PHASES, SECURE, Device
from tests.sampled import sampled

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
FAILED = {"too-few-reports", "devices-lost", "culprits-known"}
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
each_way = pytest.mark.parametrize(
    "ways",
    sampled(WAYS.values(), [WAYS[name] for name in ("gives up late", "vanishes half-way", "in turns")]),
    ids=WAYS,
)


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
        self._act()

    def _act(self) -> None:
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


SECURELY = SETTINGS | {"secagg": SECURE["secagg"], "selection_timeout_s": 5.0}
MANY = [f"honest{number}" for number in range(45)]
"""More are honest than in the clear: those that revealed shares in vain take part in no other attempt at the round."""


class Seat(Device):
    """A device in a secure round. It answers each message as soon as it comes, up to the one that it does harm with."""

    def __init__(self, desk, given, harm=None, at=None) -> None:
        super().__init__(desk, given, [0.5, -0.25, 0, 1], weight=2)
        self.harm, self.at, self.answered = harm, at, 0
        desk.hold(given)

    def go_on(self) -> None:
        """Answer the next message if it is there. Raises a Refusal when none will come."""
        if self.answered == len(PHASES):
            raise NoLongerNeeded("it has done its part")
        message = self.hear(2 * self.answered) if self.answered else self.given.secagg
        if message is None:
            return
        if self.answered == self.at:
            self.harm(self, self.client.receive(message).message)
            raise NoLongerNeeded("it has done its harm")
        self.answer(message)
        self.answered += 1


def stays_silent(seat, message):
    """It is there until the round is over."""


def disappears(seat, message):
    seat.desk.driver.presence.end(seat.given.assignment, broken=True)


def leaves(seat, message):
    seat.desk.give_up(seat.given)


def talks_rubbish(seat, message):
    seat.say(message[0], message[:1] + bytes(len(message) - 1))


def lies(seat, message):
    """Its boxes open for nobody."""
    seat.say(3, message[:66] + bytes(len(message) - 66))


SECURE_WAYS = {
    f"{harm.__name__} at {phase}": [(harm, at)]
    for at, phase in enumerate(PHASES)
    for harm in (stays_silent, disappears, leaves, *{1: (lies, talks_rubbish), 3: (talks_rubbish,)}.get(at, ()))
}
SECURE_WAYS["in turns"] = [way for (way,) in SECURE_WAYS.values()]


class SecureSiege(Siege):
    """The same in secure rounds."""

    def _begin(self, name: str, given: Assignment) -> None:
        self.due.append(Seat(self.desk, given, *(self.source.choice(self.ways) if name in HOSTILE else ())))

    def _act(self) -> None:
        going = []
        for seat in self.due:
            with suppress(Refusal):
                seat.go_on()
                going.append(seat)
        self.due = going
        self.desk.pass_time(1.0)

    def unreliable(self) -> set[str]:
        """Those that the rows have as unreliable, and the driver too."""
        with self.desk.store.database.reading() as records:
            found = unreliable_devices(records, records.task(self.task)).keys()
        assert found == self.desk.driver._memory.rounds.unreliable[self.task].keys()
        return set(found)


@pytest.mark.parametrize(
    "ways", sampled(SECURE_WAYS.values(), [*list(SECURE_WAYS.values())[::5], SECURE_WAYS["in turns"]]), ids=SECURE_WAYS
)
def test_a_third_of_a_cohort_stalls_few_secure_rounds(store, register, desk, ways):
    task = register(**SECURELY)
    siege = SecureSiege(desk, task, MANY + HOSTILE, ways)
    ended = siege.live(12)
    assert sum(reason != "" for reason in ended) <= MOST_FAILED
    assert store.task(task).state is TaskState.ACTIVE
    assert siege.unreliable() <= set(HOSTILE)


def test_devices_that_failed_before_pause_no_secure_task_that_needs_them(store, register, desk):
    task = register(**SECURELY)
    siege = SecureSiege(desk, task, MANY[:8] + HOSTILE[:4], SECURE_WAYS["stays_silent at open"])
    assert set(siege.live(7)) <= FAILED
    assert store.task(task).state is TaskState.ACTIVE
    siege.names = MANY[:9]
    assert siege.live(9)[-1] == ""


@pytest.mark.parametrize("way", ["leaves at advertise", "stays_silent at advertise", "stays_silent at share"])
def test_secure_rounds_that_fail_everywhere_pause_their_task(store, register, desk, way):
    task = register(**SECURELY)
    ended = SecureSiege(desk, task, HOSTILE, SECURE_WAYS[way]).live()
    assert (len(ended), store.task(task).state) == (5, TaskState.PAUSED)
