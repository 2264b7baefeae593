"""Devices that come back: their tokens, and for how long they are there."""

from __future__ import annotations

import base64
import hmac

import msgspec
import pytest

from coordinator.commands import AwaitAssignment, CheckInDevice
from coordinator.driver.memory.pace_steering import Returns
from coordinator.driver.memory.sessions import Presence, Silence
from coordinator.errors import NoLongerNeeded
from coordinator.rules import pacing
from coordinator.rules.pacing import Generation, Return
from coordinator.rules.selection import Eligibility
from coordinator.rules.states import lost_after_s
from fedcore.plan import BlobRef
from fedcore.wire.messages import Assignment, CheckIn, RetryWindow
from tests.coordinator.conftest import CAPABILITIES, Desk
from tests.coordinator.test_steering import BOUNDS

KEY, WINDOW = b"k" * 32, RetryWindow(10.0, 20.0)
GENERATION = Generation.new(KEY, "phones")
WHEN = Return(100.0, 200.0)


def visit(device="a", token="", population="phones"):
    able = Eligibility.of(device, CheckIn(capabilities=CAPABILITIES, examples={"default": 1}))
    return CheckInDevice(population, device, able, token)


@pytest.fixture
def returns():
    return Returns(lambda: KEY, limit=3)


def test_token_says_when_its_device_may_come():
    token = GENERATION.token("a", WHEN)
    assert GENERATION.read("a", token) == WHEN
    assert len(token) == 56
    said, mac = (data := base64.urlsafe_b64decode(token))[:24], data[24:]
    assert mac == hmac.digest(KEY, said + b"phones\0a", "sha256")[:18]


def test_visit_that_counts_takes_two_hmacs(returns, monkeypatch):
    made, hmac_of = [], pacing._hmac
    monkeypatch.setattr(pacing, "_hmac", lambda key, said: made.append(said) or hmac_of(key, said))
    assert returns.left(visit("seen twice"), 0.0) is returns.left(visit("seen twice"), 0.0) is None
    returns.expect(visit("seen twice"), WINDOW, 0.0)
    assert made[0] == b"phones\0seen twice"
    assert len(made) == 2


@pytest.mark.parametrize(
    "other",
    [
        Generation(b"l" * 32, "phones", GENERATION.name),
        Generation(KEY, "tablets", GENERATION.name),
        Generation.new(KEY, "phones"),
    ],
)
def test_token_of_another_key_population_or_generation_says_nothing(other):
    assert GENERATION.read("a", other.token("a", WHEN)) is None


def test_token_of_another_device_says_nothing():
    assert GENERATION.read("a", GENERATION.token("b", WHEN)) is None


def test_token_with_any_bit_changed_says_nothing():
    data = base64.urlsafe_b64decode(GENERATION.token("a", WHEN))
    for bit in range(8 * len(data)):
        forged = bytearray(data)
        forged[bit // 8] ^= 1 << bit % 8
        assert GENERATION.read("a", base64.urlsafe_b64encode(forged).decode()) is None


@pytest.mark.parametrize("token", ["", "x", "=", "A" * 56, "é" * 56, "A" * 200, "\0"])
def test_what_is_no_token_says_nothing(token):
    assert GENERATION.read("a", token) is None


def test_device_counts_once_with_each_token(returns):
    first = returns.expect(visit(), WINDOW, 0.0)
    assert returns.left(visit(token=first.token), 9.0) == (RetryWindow(1.0, 11.0), first.token)
    back = visit(token=first.token)
    assert returns.left(back, 15.0) is None
    assert returns.left(back, 15.0) is None
    second = returns.expect(back, WINDOW, 15.0)
    for now in (15.0, 20.0):
        assert returns.left(back, now) is not None
        # It hears what it was told when the token counted, as if the answer had been lost.
        assert returns.left(back, now) == (RetryWindow(25.0 - now, 35.0 - now), second.token)
    assert returns.left(visit(token=second.token), 24.0) == (RetryWindow(1.0, 11.0), second.token)
    assert returns.left(visit(token=second.token), 25.0) is None


def test_device_counts_once_whichever_of_its_tokens_it_shows(returns):
    tokens = [returns.expect(visit(), WINDOW, now).token for now in (0.0, 1.0, 2.0)]
    returns.expect(visit(token=tokens[0]), WINDOW, 15.0)
    for token in ("", *tokens):
        assert returns.left(visit(token=token), 24.0).retry == RetryWindow(1.0, 11.0)
        assert returns.left(visit(token=token), 25.0) is None


def test_visit_that_another_replica_heard_counts_once(returns):
    returns.expect(visit(), WINDOW, 0.0)
    mark = returns.generation("phones").mark("a")
    assert not returns.hear("phones", mark, Return(12.0, 22.0), 9.0)
    assert returns.hear("phones", mark, Return(22.0, 32.0), 12.0)
    assert returns.left(visit(), 20.0).retry == RetryWindow(2.0, 12.0)


def test_device_without_a_token_counts_once_until_its_time(returns):
    told = returns.expect(visit(), WINDOW, 0.0)
    assert returns.left(visit(), 9.0) == (RetryWindow(1.0, 11.0), told.token)
    assert returns.left(visit(), 9.0) is not None
    assert returns.left(visit(), 10.0) is None


def test_only_the_last_devices_without_tokens_are_remembered(returns):
    for number in range(4):
        returns.expect(visit(str(number)), WINDOW, 0.0)
    assert len(returns) == 3
    assert returns.left(visit("0"), 1.0) is None
    assert returns.left(visit("1"), 1.0) is not None


def test_expired_token_is_that_of_a_newcomer(returns):
    told = returns.expect(visit("gone"), WINDOW, 0.0)
    assert returns.left(visit("gone", told.token), 21.0) is None
    returns.expect(visit("gone", told.token), WINDOW, 21.0)
    assert returns.left(visit("gone", told.token), 22.0) is not None
    assert returns.left(visit("gone"), 22.0) is not None


def test_new_generation_voids_tokens_of_its_population_alone(returns):
    there, here = (returns.expect(visit("a", "", name), WINDOW, 0.0) for name in ("tablets", "phones"))
    returns.forget({"phones"})
    assert returns.left(visit("a", here.token), 1.0) is None
    assert returns.left(visit("a", there.token, "tablets"), 1.0) is not None
    assert returns.left(visit("a", here.token), 1.0) is None


def test_session_that_ends_without_a_draw_counts_with_its_token(store, register):
    register(goal=1, rounds=9, reporting_deadline_s=600)
    desk = Desk(store, retry=BOUNDS)
    desk.hold(*desk.assign("p"))

    def leave(token):
        able = Eligibility.of("a", CheckIn(capabilities=CAPABILITIES, examples={"default": 10}))
        session = desk.ask(CheckInDevice("phones", "a", able, token)).session
        return desk.ask(AwaitAssignment(session, "a", 0.0))

    first = leave("")
    desk.pass_time(first.retry.min_s)
    second = leave(first.token)
    assert (second.reason, second.token != first.token) == ("not-selected", True)
    assert desk.driver.turn_away(visit("a", first.token)).reason == "too-early"
    assert desk.driver.turn_away(visit("a", second.token)).reason == "too-early"


def test_wall_clock_that_is_set_changes_no_token(store, register, monkeypatch):
    register(min_examples=50)
    desk = Desk(store, retry=BOUNDS)
    told = desk.arrive("a")
    monkeypatch.setattr("time.time", lambda: 3600.0)
    desk.pass_time(44)
    early = desk.ask(visit("a", told.token))
    assert (early.reason, early.retry) == ("too-early", RetryWindow(5.0, 31.0))


def test_tokens_longer_than_two_hundred_characters_are_refused():
    text = msgspec.json.encode(CheckIn(capabilities=CAPABILITIES, examples={}, token="x" * 201))
    with pytest.raises(msgspec.ValidationError, match="length <= 200"):
        msgspec.json.decode(text, type=CheckIn)


BLOB = BlobRef("0" * 64, 1)


def given(name, lost_after_s=5.0):
    numbers = {"round": 1, "attempt": 1, "slot": 0, "seed": 0}
    blobs = {"plan": BLOB, "checkpoint": BLOB}
    return Assignment(assignment=name, task="t", **numbers, **blobs, report_within_s=60.0, lost_after_s=lost_after_s)


class Watch:
    """A presence book of round 1 with two devices, lost after 5 s, and its clock."""

    def __init__(self, lost_after_s=5.0):
        self.now = 0.0
        self.book = Presence(lambda: self.now)
        for name in "ab":
            self.book.expect(1, given(name, lost_after_s))

    def pass_time(self, seconds):
        """Looked at twice a second, as the driver does; who was lost at the last look."""
        until, lost = self.now + seconds, {}
        while self.now < until:
            self.now = min(until, self.now + 0.5)
            lost = self.book.lost()
        return lost


@pytest.fixture
def watch():
    return Watch()


def test_device_is_lost_that_is_not_heard_of(watch):
    assert watch.pass_time(4.5) == {}
    assert watch.pass_time(1) == {1: ["a", "b"]}


def test_open_request_keeps_a_device_and_its_end_begins_the_time_anew(watch):
    watch.book.begin("a")
    assert watch.pass_time(100) == {1: ["b"]}
    watch.book.end("a", broken=False)
    watch.book.forget(["b"])
    assert watch.pass_time(4.5) == {}
    assert watch.pass_time(1) == {1: ["a"]}


def test_broken_connection_leaves_less_time_unless_another_is_open(watch):
    watch.book.begin("a")
    watch.book.begin("a")
    watch.book.begin("b")
    for name in "ab":
        watch.book.end(name, broken=True)
    assert watch.pass_time(1.5) == {}
    assert watch.pass_time(1) == {1: ["b"]}


def test_device_of_a_large_round_has_the_time_in_which_it_asks_again():
    watch = Watch(lost_after_s=40.0)
    watch.book.begin("a")
    watch.book.end("a", broken=True)
    assert watch.pass_time(9.5) == {}
    assert watch.pass_time(1) == {1: ["a"]}


def test_device_that_was_sent_away_for_want_of_room_is_there(watch):
    assert watch.pass_time(4) == {}
    watch.book.heard("a")
    assert watch.pass_time(4.5) == {1: ["b"]}


def test_one_request_at_a_time_holds_an_assignment(watch):
    older = watch.book.hold("a")
    newer = watch.book.hold("a")
    assert older.result(timeout=0) is None
    assert not newer.done()


def test_time_in_which_nobody_looked_does_not_count(watch):
    watch.now = 60.0
    assert watch.book.lost() == {}
    assert watch.pass_time(4.5) == {}
    assert watch.pass_time(1) == {1: ["a", "b"]}


def test_held_promise_is_broken_when_the_assignment_ends(watch):
    held, other = watch.book.hold("a"), watch.book.hold("b")
    watch.book.forget(["a"])
    assert isinstance(held.exception(timeout=0), NoLongerNeeded)
    with pytest.raises(NoLongerNeeded):
        watch.book.hold("a")
    assert not other.done()
    watch.book.dismiss()
    assert other.result(timeout=0) is None


def test_rounds_that_are_over_are_forgotten_with_their_devices(watch):
    watch.book.expect(2, given("c"))
    held = watch.book.hold("c")
    watch.book.forget_all_but({1})
    assert held.done()
    assert watch.pass_time(6) == {1: ["a", "b"]}


def test_silence_counts_devices_that_have_had_no_open_request_for_so_long(watch):
    watch.now = 1.0
    watch.book.begin("a")
    watch.now = 4.0
    assert watch.book.silence(1, 3.0) == Silence(1, 0.0)
    assert watch.book.silence(1, 4.0) == watch.book.silence(2, 0.0) == Silence()


def test_large_rounds_leave_more_time():
    assert (lost_after_s(20), lost_after_s(10_000)) == (5.2, 105.0)
