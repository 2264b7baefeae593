"""Replicas that do not drive a population send its devices away by the driver's notice, and tell the driver."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future

import pytest

from coordinator.commands import AwaitAssignment, CancelWait, CheckInDevice
from coordinator.errors import DatabaseLocked, ReplayedSignature
from coordinator.rules.pacing import Notice, Return, Tally, notice_of, tally_of, text_of
from coordinator.rules.selection import DeviceHoldOut, Eligibility, Needs
from fedcore.validation import UNDECODABLE
from fedcore.wire.messages import Accepted, Assignment, CheckIn, RetryWindow
from tests.coordinator.conftest import CAPABILITIES, Desk
from tests.coordinator.test_steering import BOUNDS

LEASE_S = 3.0
AHEAD_S = 5000.0


def visit(device="a", token="", examples=1, signed=0, formats=("onnx",), **stated):
    able = CheckIn(capabilities=CAPABILITIES, examples={"default": examples}, **stated)
    return CheckInDevice("phones", device, Eligibility.of(device, able), token, signed)


class Pair:
    """The driver of a population, whose clock is ahead, and other replicas, which follow it."""

    def __init__(self, store, others=1, source=None):
        self.driver = Desk(store, source, "http://driver", lease_s=LEASE_S, now=AHEAD_S, retry=BOUNDS)
        self.others = [self.other(store, number) for number in range(others)]
        self.live(3)

    @property
    def desks(self):
        return [self.driver, *self.others]

    def other(self, store, number=0):
        desk = Desk(store, url=f"http://other{number}", lease_s=LEASE_S, retry=BOUNDS)
        assert not desk.membership.held
        return desk

    def live(self, seconds, step_s=0.5):
        for _ in range(round(seconds / step_s)):
            for desk in self.desks:
                desk.pass_time(step_s)

    @property
    def idle(self):
        return self.driver.driver._memory.steering._populations["phones"].pace.idle


@pytest.fixture
def pair(store, register):
    register(min_examples=10)
    return Pair(store)


def away(desk, *args, **kwargs):
    return desk.driver.turn_away(visit(*args, **kwargs))


def test_replica_sends_away_whom_no_task_can_use(pair):
    (other,) = pair.others
    told = away(other)
    assert (told.reason, told.retry) == ("not-eligible", RetryWindow(45.0, 75.0))
    assert away(pair.driver, "b").retry == told.retry


def test_replica_leaves_whom_a_task_may_use_to_the_driver(pair):
    (other,) = pair.others
    assert away(other, examples=10) is None
    assert isinstance(pair.driver.ask(visit(examples=10)), Accepted)


def test_token_of_one_replica_holds_at_all_others(pair):
    (other,) = pair.others
    for giver, reader, device in ((other, pair.driver, "a"), (pair.driver, other, "b")):
        token = away(giver, device).token
        pair.live(10)
        early = away(reader, device, token)
        assert early.reason == "too-early"
        assert early.retry.min_s == pytest.approx(35.0, abs=1.0)


@pytest.mark.every_engine
def test_driver_counts_whom_others_sent_away(pair):
    (other,) = pair.others
    for number in range(100):
        away(other, str(number))
    assert pair.idle == 0
    pair.live(2.5)
    assert 70 <= pair.idle <= 100
    log = pair.driver.driver._memory.check_ins.arrivals
    (task,) = pair.driver.driver._memory.tasks
    assert log.lately(task, pair.driver.now) == {"examples": 100}


def test_replicas_put_devices_into_one_queue(store, register):
    register(min_examples=10)
    pair = Pair(store, others=2)
    first, second = pair.others
    for number in range(2000):
        away(first, str(number))
    pair.live(3.0)
    waits = [away(desk, "late").retry.min_s for desk in (first, second, pair.driver)]
    assert min(waits) > 120
    assert max(waits) - min(waits) < 5


def test_device_that_shows_itself_at_every_replica_takes_one_place(store, register):
    register(min_examples=10)
    pair = Pair(store, others=2)
    desks = [*pair.others, pair.driver]
    token = ""
    for _ in range(3):
        told = [away(desk, token=token) for desk in desks]
        assert "not-eligible" in {one.reason for one in told}
        pair.live(2.5, step_s=0.1)
        assert pair.idle <= 1.0
        token = told[0].token
        pair.live(60, step_s=1.0)


def test_new_task_lets_devices_come_at_every_replica(pair, register):
    (other,) = pair.others
    token = away(other).token
    register(min_examples=1)
    pair.live(1)
    assert away(other, token=token) is None


def test_replica_that_cannot_know_the_drivers_clock_asks_it(store, register):
    register(min_examples=10)
    driver = Desk(store, url="http://driver", lease_s=LEASE_S, now=AHEAD_S, retry=BOUNDS)
    driver.pass_time(0.5)
    other = Desk(store, url="http://other", lease_s=LEASE_S, retry=BOUNDS)
    other.pass_time(0.5)
    assert away(other) is None
    driver.pass_time(1.5)
    other.pass_time(0.5)
    assert away(other).reason == "not-eligible"


def test_replica_does_not_follow_a_driver_that_is_gone(pair):
    (other,) = pair.others
    assert away(other) is not None
    with pair.driver.store.database.writing() as records:
        records.leases.forget(pair.driver.membership.id)
    other.pass_time(0.5)
    assert other.membership.held == {"phones"}
    assert not other.driver.follows("phones")
    assert away(other, "b").reason == "not-eligible"


@pytest.mark.every_engine
def test_tallies_are_deleted_once_they_were_counted(pair):
    (other,) = pair.others
    away(other)
    other.pass_time(1.5)
    with other.store.database.reading() as records:
        assert records.notices.any_told({"phones"})
    pair.live(2)
    with other.store.database.reading() as records:
        assert not records.notices.any_told({"phones"})


def test_nothing_is_written_while_nobody_comes(pair):
    with pair.driver.store.database.reading() as records:
        before = records.notices.changed({})
    pair.live(10)
    with pair.driver.store.database.reading() as records:
        assert records.notices.changed({}) == before


def test_check_in_that_is_sent_again_later_ends_no_session(pair):
    driver = pair.driver
    session = driver.ask(visit(examples=10, signed=20)).session
    (waiting,) = driver.turn(AwaitAssignment(session, "a", 10.0))
    with pytest.raises(ReplayedSignature):
        driver.ask(visit(examples=10, signed=19))
    assert not waiting.done() or waiting.result(timeout=0).assignment
    assert driver.ask(visit("b", examples=10, signed=1)).session


def test_device_that_waits_at_three_replicas_has_one_chance(store, register):
    register(goal=4, rounds=40)
    pair = Pair(store, 2, random.Random(3))
    driver, *others = pair.desks
    thrice, once = [f"thrice{number}" for number in range(3)], [f"once{number}" for number in range(9)]
    drawn: Counter[str] = Counter()
    for _ in range(40):
        waits: dict[AwaitAssignment, Future] = {}
        for devices in (thrice, thrice, thrice, once):
            visits = [visit(device, examples=10) for device in devices]
            assert not any(other.driver.turn_away(one) for other in others for one in visits)
            sessions = [answer.result(timeout=0).session for answer in driver.turn(*visits)]
            calls = [AwaitAssignment(session, one, 5.0) for session, one in zip(sessions, devices, strict=True)]
            waits |= zip(calls, driver.turn(*calls), strict=True)
        driver.pass_time(0.5)
        told = {wait.device: answer.result(timeout=0) for wait, answer in waits.items() if drew(answer)}
        assert len(told) == 4
        drawn.update(told.keys())
        driver.turn(*(CancelWait(wait.session, answer) for wait, answer in waits.items()))
        for given in told.values():
            driver.report(given)
        pair.live(0.5)
    # Pearson's statistic of uniform draws is larger once in 1,000 times; with three chances each it is about 30 more.
    expected = 40 * 4 / 12
    assert sum((drawn[device] - expected) ** 2 / expected for device in (*thrice, *once)) < 31.3


def drew(answer):
    """Whether a wait ended with an assignment."""
    return answer.done() and isinstance(answer.result(timeout=0), Assignment)


def test_notices_and_tallies_come_back_as_they_were_written():
    hold_out = DeviceHoldOut("phones", 0.25, on_held_out=True)
    needs = Needs(frozenset({"onnx"}), "default", 5, hold_out=hold_out, target="region = eu")
    notice = Notice(generation=b"\0\xff345678", tasks={"t": needs}, idle_until=1.5)
    assert notice_of(text_of(notice)) == notice
    visits = [(b"12345678", Return(1.5, 2.5)), (b"\0" * 8, Return(3.0, 4.0))]
    tally = Tally.of(b"generation", visits, {("t", "examples"): 2, ("t", "format"): 1})
    assert list(tally_of(text_of(tally)).each()) == visits
    assert tally.obstacles == {"t": {"examples": 2, "format": 1}}


def test_tally_of_another_generation_tells_the_driver_nothing(pair, register):
    (other,) = pair.others
    away(other)
    other.pass_time(1.5)  # its tally lies there
    register(min_examples=1)
    pair.driver.pass_time(0.5)
    pair.live(2)
    assert pair.idle == 0
    assert isinstance(pair.driver.ask(visit()), Accepted)


def test_tally_of_a_driver_that_is_gone_keeps_no_device_away(pair):
    (other,) = pair.others
    away(other)
    other.pass_time(1.5)
    with pair.driver.store.database.writing() as records:
        records.leases.forget(pair.driver.membership.id)
    for _ in range(4):
        other.pass_time(0.5)
    assert other.membership.held == {"phones"}
    assert away(other).retry.max_s <= BOUNDS.max_s


def test_failed_beat_of_a_replica_forgets_no_device(pair, monkeypatch):
    (other,) = pair.others
    away(other)
    with monkeypatch.context() as broken:
        broken.setattr(other.membership, "_beat", locked)
        other.pass_time(1.5)
    assert not other.driver.follows("phones")
    pair.live(3)
    assert away(other).reason == "too-early"
    assert away(pair.driver).reason == "too-early"


def locked(now):
    raise DatabaseLocked("busy")


def test_driver_that_stands_still_is_not_followed(store, register):
    register(min_examples=10)
    driver = Desk(store, url="http://driver", lease_s=LEASE_S, now=AHEAD_S, retry=BOUNDS)
    other = Desk(store, url="http://other", lease_s=LEASE_S, retry=BOUNDS, drives=False)
    for _ in range(6):
        driver.pass_time(0.5)
        other.pass_time(0.5)
    assert away(other) is not None
    for _ in range(8):
        other.pass_time(0.5)
    assert away(other, "b") is None


def test_tally_of_another_size_is_refused():
    with pytest.raises(UNDECODABLE, match="visits have 3 bytes"):
        tally_of(text_of(Tally(b"generation", b"abc", {})))
