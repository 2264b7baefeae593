"""Which devices are there, on a clock that only the test moves."""

from __future__ import annotations

import pytest

from coordinator.driver.memory.device_presence import Presence, Silence
from coordinator.errors import NoLongerNeeded
from coordinator.rules.states import lost_after_s
from fedcore.plan import BlobRef
from fedcore.wire.messages import Assignment

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
