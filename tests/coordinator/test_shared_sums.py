"""Rounds whose reports come to several replicas: each sums its own, and the driver adds the sums."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from coordinator.commands import AwaitAssignment, CountReport, TakeShare
from coordinator.errors import ConflictingReport, MalformedMessage, NoLongerNeeded, Unavailable
from coordinator.rules import replicas
from coordinator.rules.rounds import Configured, ReportsElsewhere, RoundPolicy, Waiting, open_round, step
from coordinator.rules.states import RoundState
from coordinator.rules.task_settings import Buffered, ClearReports, Secagg, TaskSettings
from fedcore.codecs import RoundKey
from tests.coordinator.bundles import START, report_vector
from tests.coordinator.conftest import Desk, states

LEASE_S = 3.0
KEY = bytes(32)


class Group:
    """The driver of a population, and other replicas, which sum reports for it."""

    def __init__(self, store, task, others=1, ahead_s=0.0):
        self.store, self.task = store, task
        self.driver = Desk(store, url="http://driver", lease_s=LEASE_S)
        self.others = [Desk(store, url=f"http://other{n}", lease_s=LEASE_S, now=ahead_s) for n in range(others)]
        self.turn()

    def turn(self, seconds=0.5):
        for desk in (self.driver, *self.others):
            desk.pass_time(seconds)

    def report(self, desk, given, delta, **kwargs):
        """Send a report to a replica that does not drive the round."""
        vector = report_vector(delta, 1.0, kwargs.get("loss", 0.0))
        with self.store.database.reading() as records:
            record, settings = records.assignment(given.assignment), records.task(self.task).settings
        layout = self.store.plan(record.plan_sha256).of_round(record.number).report
        key, buffered = RoundKey(settings.seed, record.number), settings.buffered is not None
        shared = replicas.SharedRound(record.round, layout, settings.clear, key, buffered)
        return desk.ask(CountReport(given.assignment, vector.tobytes().hex()[:64], vector, shared))

    def message(self, desk):
        """What a replica would send now."""
        (driver,) = desk.driver.shared.drivers
        return replicas.encode_shares(*desk.driver.shared.news(desk.membership.id, driver))

    def hear(self, message):
        shares, sums = replicas.decode_shares(memoryview(message))
        self.driver.driver.heard_of(shares.replica)
        for share, total in zip(shares.shares, sums, strict=True):
            self.driver.ask(TakeShare(shares.replica, share, total))
        return shares

    def tell(self, desk):
        desk.driver.shared.heard(self.hear(self.message(desk)))

    @property
    def model(self):
        return list(self.store.checkpoint(self.task)["params"] - START)

    @property
    def states(self):
        return states(self.store, self.task)


@pytest.fixture
def group(store, register):
    return lambda others=1, ahead_s=0.0, **settings: Group(
        store, register(**({"rounds": 1} | settings)), others, ahead_s
    )


@pytest.mark.every_engine
def test_reports_at_three_replicas_are_in_one_sum(group):
    group = group(others=2, goal=3)
    a, b, c = group.driver.assign("a", "b", "c")
    group.driver.report(a, (3, 0, 0, 0))
    for desk, given, delta in zip(group.others, (b, c), ((0, 6, 0, 0), (0, 0, 9, 0)), strict=True):
        assert group.report(desk, given, delta).assignment == given.assignment
        group.tell(desk)
    assert group.states == [(1, 1, "aggregating", "")]
    group.turn()
    for desk in group.others:
        group.tell(desk)
    assert group.states == [(1, 1, "committed", "")]
    assert group.model == [1, 2, 3, 0]


def test_share_that_is_told_twice_counts_once(group):
    group = group(goal=2)
    (other,), (a, b) = group.others, group.driver.assign("a", "b")
    group.report(other, a, (2, 0, 0, 0))
    first = group.message(other)
    group.hear(first)
    group.report(other, b, (0, 4, 0, 0))
    group.tell(other)
    group.hear(first)
    group.turn()
    last = group.message(other)
    group.hear(last)
    group.hear(last)
    assert [one.reported for one in group.store.rounds(group.task)] == [2]
    assert group.model == [1, 2, 0, 0]


def test_same_report_at_two_replicas_counts_once_and_another_not_at_all(group):
    group = group(others=2, goal=2)
    (one, two), (a, b) = group.others, group.driver.assign("a", "b")
    receipt = group.report(one, a, (2, 0, 0, 0))
    assert group.report(two, a, (2, 0, 0, 0)) == group.driver.report(a, (2, 0, 0, 0)) == receipt
    with pytest.raises(ConflictingReport, match="another"):
        group.report(two, a, (4, 0, 0, 0))
    group.report(two, b, (0, 4, 0, 0))
    for _ in range(2):
        group.tell(one)
        group.tell(two)
        group.turn()
    assert group.model == [1, 2, 0, 0]


def test_receipt_of_which_the_driver_did_not_hear_is_in_the_model(group):
    group = group(goal=1, over_selection=3.0)
    (other,), (a, b, c) = group.others, group.driver.assign("a", "b", "c")
    group.report(other, a, (2, 0, 0, 0))
    group.driver.report(b, (0, 4, 0, 0))
    assert group.states == [(1, 1, "aggregating", "")]
    with pytest.raises(NoLongerNeeded):
        group.report(other, c, (8, 8, 8, 8))
    group.turn()
    group.tell(other)
    (done,) = group.store.rounds(group.task)
    assert (done.state, done.reported, done.expired) == (RoundState.COMMITTED, 2, 0)
    assert group.model == [1, 2, 0, 0]


def test_report_that_is_told_late_leaves_its_device_at_its_next_task(group, register):
    group = group(goal=1, over_selection=2.0)
    (other,), (a, b) = group.others, group.driver.assign("a", "b")
    group.report(other, a, (2, 0, 0, 0))
    group.driver.report(b, (0, 4, 0, 0))
    register(goal=1, name="next")
    group.driver.pass_time(0.5)
    waiting = AwaitAssignment(group.driver.arrive("a").session, "a", 10.0)
    given = group.driver.ask(waiting)
    group.tell(other)
    assert group.driver.ask(waiting).assignment == given.assignment


def test_attempt_is_abandoned_when_a_replica_with_receipts_is_silent(group):
    group = group(goal=2)
    (other,), (a, _) = group.others, group.driver.assign("a", "b")
    group.report(other, a, (2, 0, 0, 0))
    group.tell(other)
    group.driver.live(LEASE_S - 0.5, a, _)
    assert group.states == [(1, 1, "reporting", "")]
    group.driver.live(1.0, a, _)
    assert group.states == [(1, 1, "abandoned", "replica-lost")]


def test_attempt_is_abandoned_when_a_receipt_has_no_sum(group):
    group = group(goal=1, over_selection=2.0)
    (other,), (a, b) = group.others, group.driver.assign("a", "b")
    group.report(other, a, (2, 0, 0, 0))
    group.driver.report(b, (0, 4, 0, 0))
    group.driver.live(LEASE_S - 0.5)
    assert group.states == [(1, 1, "aggregating", "")]
    group.driver.live(1.0)
    assert group.states == [(1, 1, "abandoned", "replica-lost")]


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_clock_of_a_replica_says_nothing_about_a_deadline(group, ahead_s):
    group = group(ahead_s=ahead_s, goal=2)
    (other,), (a, b) = group.others, group.driver.assign("a", "b")
    for given, delta in ((a, (2, 0, 0, 0)), (b, (0, 4, 0, 0))):
        group.report(other, given, delta)
        group.tell(other)
    other.pass_time(0.5)
    group.tell(other)
    assert group.model == [1, 2, 0, 0]


def test_attempt_goes_on_when_a_replica_without_receipts_is_silent(group):
    group = group(goal=2)
    a, b = group.driver.assign("a", "b")
    group.driver.driver.heard_of(group.others[0].membership.id)
    group.driver.report(a, (2, 0, 0, 0))
    group.driver.live(2 * LEASE_S, b)
    group.driver.report(b, (0, 4, 0, 0))
    assert group.model == [1, 2, 0, 0]


def test_replica_that_stops_hands_its_sum_over_before_the_round_ends(group):
    group = group(goal=2)
    (other,), (a, b) = group.others, group.driver.assign("a", "b")
    group.report(other, a, (2, 0, 0, 0))
    other.driver.drain()
    with pytest.raises(Unavailable, match="hands its sum"):
        group.report(other, b, (0, 4, 0, 0))
    other.pass_time(0.5)
    assert other.driver.shared.wait
    group.tell(other)
    assert not other.driver.shared.wait
    group.driver.live(2 * LEASE_S, b)
    group.driver.report(b, (0, 4, 0, 0))
    assert group.model == [1, 2, 0, 0]


def test_sums_of_a_round_that_ended_are_dropped(group):
    group = group(goal=2)
    (other,), (a, _) = group.others, group.driver.assign("a", "b")
    group.report(other, a, (2, 0, 0, 0))
    assert other.driver.shared.wait
    group.driver.live(120, a)
    assert group.states[0][2] == "abandoned"
    other.pass_time(0.5)
    assert not other.driver.shared.wait
    assert other.driver.shared.drivers == set()


def test_device_whose_report_is_on_its_way_elsewhere_is_not_lost(group):
    group = group(goal=2)
    (other,), (a, b) = group.others, group.driver.assign("a", "b")
    with other.driver.shared.expecting(a.assignment, 1):
        for _ in range(40):
            for here in replicas.decode_shares(memoryview(group.message(other)))[0].present:
                group.driver.driver.presence.heard(here)
            group.driver.live(0.5, b)
    assert [one.lost for one in group.store.rounds(group.task)] == [0]
    assert other.driver.shared.drivers == set()


def test_sum_of_another_layout_is_refused(group):
    group = group(goal=2)
    (other,), (a, _) = group.others, group.driver.assign("a", "b")
    group.report(other, a, (2, 0, 0, 0))
    shares, _ = replicas.decode_shares(memoryview(group.message(other)))
    (share,) = shares.shares
    with pytest.raises(MalformedMessage, match="a sum of 3 values"):
        group.driver.ask(TakeShare("other", type(share)(round=share.round, before=0, counted=[], size=3), np.zeros(3)))


@pytest.mark.parametrize("cut", [0, 3, 4, -1, -8])
def test_message_that_is_cut_off_is_refused(group, cut):
    group = group(goal=2)
    (other,), (a, _) = group.others, group.driver.assign("a", "b")
    group.report(other, a, (2, 0, 0, 0))
    other.driver.drain()
    other.pass_time(0.5)
    with pytest.raises(MalformedMessage, match="these shares"):
        replicas.decode_shares(memoryview(group.message(other)[:cut]))


def test_told_reports_count_also_once_the_round_takes_none():
    policy = RoundPolicy(goal=2, minimum=1, over_selection=2.0, selection_timeout_s=9.0, reporting_deadline_s=9.0)
    reporting = step(*_configured(policy), 0.0)[0]
    late = step(step(reporting, ReportsElsewhere((0,)), 1.0)[0], ReportsElsewhere(()), 99.0)[0]
    assert (late.state, late.reported, late.expired) == (RoundState.AGGREGATING, 1, 3)
    told = step(late, ReportsElsewhere((0, 0)), 100.0)[0]
    assert (told.state, told.reported, told.expired, told.outstanding) == (RoundState.AGGREGATING, 3, 1, 0)


def _configured(policy):
    return step(open_round(policy, 0.0), Waiting(4), 0.0)[0], Configured(4)


# --- whose id it is


def test_ids_of_assignments_fit_their_column_and_say_their_round():
    assert replicas.assignment_id(KEY, "0123abcd", 7, 1, "phone") == "0123abcd.AAAABwAAAVBI_7L6YHxI52c"
    given = replicas.assignment_id(KEY, "0123abcd", 2**32 - 1, 2**24 - 1, "phone")
    assert len(given) == 32
    assert replicas.maker_of(given) == "0123abcd"
    assert replicas.round_in(KEY, given, "phone") == 2**32 - 1


def test_forged_ids_and_those_of_other_devices_and_keys_are_nobodys():
    given = replicas.assignment_id(KEY, "0123abcd", 7, 1, "phone")
    replica, text = given.split(".")
    other_round = base64.urlsafe_b64encode(bytes([0, 0, 0, 8]) + base64.urlsafe_b64decode(f"{text}=")[4:])
    same_bytes = text[:-1] + chr(ord(text[-1]) + 1)
    assert base64.urlsafe_b64decode(f"{same_bytes}=") == base64.urlsafe_b64decode(f"{text}=")
    assert replicas.round_in(KEY, given, "phone") == 7
    assert replicas.round_in(KEY, given, "phones") is None
    assert replicas.round_in(bytes([1]) * 32, given, "phone") is None
    for forged in (
        f"0123abce.{text}",
        f"{replica}.{other_round.decode().rstrip('=')}",
        f"{replica}.{same_bytes}",
        f"{replica}.{text[:-1]}",
        f"{replica}.{'é' * 23}",
        f"{replica}.{'!' * 23}",
        replica,
        "",
    ):
        assert replicas.round_in(KEY, forged, "phone") is None


def test_only_rounds_in_the_clear_with_the_mean_are_shared():
    plain = TaskSettings(population="phones", goal=8, rounds=1)
    assert replicas.may_share(plain)
    assert not replicas.may_share(TaskSettings(population="phones", goal=8, rounds=1, secagg=Secagg()))
    assert replicas.may_share(TaskSettings(population="phones", goal=8, rounds=1, buffered=Buffered()))
    median = ClearReports(estimator="median")
    assert not replicas.may_share(TaskSettings(population="phones", goal=8, rounds=1, clear=median))
