"""Return tokens: a device carries the time at which it should come, and counts once with each."""

from __future__ import annotations

import base64
import hmac

import msgspec
import pytest

from coordinator.commands import AwaitAssignment, CheckInDevice
from coordinator.driver.memory.pace_steering import Returns
from coordinator.rules import pacing
from coordinator.rules.pacing import Generation, Return
from coordinator.rules.selection import Eligibility
from fedcore.wire.messages import CheckIn, RetryWindow
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
