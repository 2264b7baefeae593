"""Mode buffered at several replicas: each sums its reports by version, and the driver adds the sums."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.commands import CountReport
from coordinator.errors import ConflictingReport, NoLongerNeeded, TooStale, UnexpectedEvent
from coordinator.rules.buffers import open_buffer, step
from coordinator.rules.rounds import Abandon, Configured, Lost, Reported, ReportsElsewhere, RoundPolicy
from coordinator.rules.states import AssignmentState, RoundState, TaskState
from coordinator.rules.task_settings import Buffered
from tests.coordinator.bundles import START, make_bundle, make_plan
from tests.coordinator.test_shared_sums import LEASE_S, Group

X, Y, Z = np.diag([8.0, 16.0, 32.0, 0])[:3]
POLICY = RoundPolicy(
    goal=2, minimum=2, over_selection=1.0, selection_timeout_s=60, reporting_deadline_s=600, concurrency=4
)


@pytest.fixture
def group(store, register, tmp_path):
    """Replicas of a task in mode buffered on FedBuff."""
    bundle = make_bundle(tmp_path / "fedbuff", make_plan(weighting="uniform"), "fedbuff")

    def make(others=1, concurrency=4, max_staleness=5, **settings):
        mode = Buffered(concurrency=concurrency, max_staleness=max_staleness)
        return Group(store, register(bundle, **{"goal": 2, "rounds": 9, "buffered": mode} | settings), others)

    return make


def model(group, number):
    return group.store.checkpoint(group.task, number)["params"].astype(np.float64)


def given_to(group, *devices):
    """An assignment for each, one after the other."""
    return [group.driver.assign(device)[0] for device in devices]


def hand_over(group):
    """Let a version be committed whose reports are told."""
    group.turn()
    for desk in group.others:
        if desk.driver.shared.wait:
            group.tell(desk)
    group.driver.turn()


# --- the rule


def test_told_reports_count_by_their_staleness_also_beyond_the_goal():
    full = _after(open_buffer(POLICY, taken_over=3), Configured(1), Reported(2), ReportsElsewhere((0, 2)))
    assert (full.state, full.reported, full.staleness) == (RoundState.AGGREGATING, 3, (1, 0, 2))
    assert _after(full, ReportsElsewhere((1,))).staleness == (1, 1, 2)
    with pytest.raises(UnexpectedEvent):
        _after(full, ReportsElsewhere((1, 1)))


def test_buffer_that_lost_a_part_hands_its_devices_on():
    open_ = _after(open_buffer(POLICY, taken_over=2), Configured(2), ReportsElsewhere((0,)), Lost(1))
    ended = _after(open_, Abandon("replica-lost", handed_on=1))
    assert (ended.state, ended.reported, ended.handed_on, ended.outstanding) == (RoundState.ABANDONED, 2, 1, 0)
    with pytest.raises(UnexpectedEvent):
        _after(open_, Abandon("replica-lost", handed_on=3))


def _after(round_, *events):
    for event in events:
        round_, _ = step(round_, event)
    return round_


# --- the coordinator


@pytest.mark.every_engine
def test_reports_at_three_replicas_count_by_how_old_their_models_are(group):
    group = group(others=2)
    slow, a, b = given_to(group, "slow", "a", "b")
    for desk, given, delta in zip(group.others, (a, b), (X, Y), strict=True):
        assert group.report(desk, given, delta).assignment == given.assignment
        group.tell(desk)
    assert group.states == [(1, 1, "aggregating", "")]
    hand_over(group)
    np.testing.assert_array_equal(model(group, 1), START + (X + Y) / 2)
    (fresh,) = given_to(group, "a")
    group.driver.report(fresh, X)
    assert group.report(group.others[0], slow, Z).round == 1
    group.tell(group.others[0])
    hand_over(group)
    np.testing.assert_allclose(model(group, 2), model(group, 1) + (X + 2**-0.5 * Z) / 2, rtol=1e-6)
    first, second, third = group.store.rounds(group.task)
    assert (first.staleness, second.staleness, third.state) == ((2,), (1, 1), RoundState.REPORTING)
    assert [(one.number, one.device) for one in group.store.counted(group.task, 2)] == [(1, "slow"), (2, "a")]


@pytest.mark.every_engine
def test_same_report_at_two_replicas_and_the_driver_counts_once(group):
    group = group(others=2)
    (one, two), (a, b) = group.others, given_to(group, "a", "b")
    receipt = group.report(one, a, X)
    assert group.report(two, a, X) == group.driver.report(a, X) == receipt
    with pytest.raises(ConflictingReport, match="another"):
        group.report(two, a, Y)
    group.report(two, b, Y)
    for desk in group.others:
        group.tell(desk)
    hand_over(group)
    assert group.report(one, b, Y) == group.driver.report(b, Y)
    np.testing.assert_array_equal(model(group, 1), START + (X + Y) / 2)


@pytest.mark.every_engine
def test_report_too_stale_is_refused_at_every_replica(group):
    group = group(max_staleness=0)
    slow, *others = given_to(group, "slow", "a", "b")
    for given in others:
        group.driver.report(given, X)
    group.driver.turn()
    with pytest.raises(TooStale, match="more versions of the model"):
        group.report(group.others[0], slow, X)
    assert group.store.cohort(group.task, 1)[0].state is AssignmentState.TOO_STALE


@pytest.mark.every_engine
def test_report_while_a_version_is_made_waits_for_the_next_buffer(group):
    group = group()
    (other,), (a, b, c, d) = group.others, given_to(group, *"abcd")
    group.report(other, a, X)
    group.tell(other)
    group.driver.report(b, Y)
    assert group.states == [(1, 1, "aggregating", "")]
    here, there = group.driver.turn(command(group, c, Z))[0], other.turn(command(group, d, Z, shared=True))[0]
    assert (here.done(), there.done()) == (False, False)
    hand_over(group)
    group.turn()
    assert (here.result(timeout=0).assignment, there.result(timeout=0).assignment) == (c.assignment, d.assignment)
    group.tell(other)
    hand_over(group)
    np.testing.assert_array_equal(model(group, 1), START + (X + Y) / 2)
    np.testing.assert_allclose(model(group, 2), model(group, 1) + 2**-0.5 * Z, rtol=1e-6)


def command(group, given, delta, *, shared=False):
    """The command of a report, as `Group.report` and `Desk.report` make it."""
    asked = []

    class Recorder:
        @staticmethod
        def ask(command):
            asked.append(command)

    group.report(Recorder, given, delta)
    (command,) = asked
    return command if shared else CountReport(command.assignment, command.sha256, command.vector)


@pytest.mark.every_engine
def test_buffer_closes_only_once_reports_for_it_are_written(group):
    group = group()
    a, b, c = given_to(group, *"abc")
    group.driver.report(b, Y)
    with group.store.database.writing() as records:  # as a replica that counts a report of this assignment
        assert a.assignment in records.assignments([a.assignment])
        (last,) = group.driver.turn(command(group, c, Y))
        assert not last.done()
        assert group.states == [(1, 1, "reporting", "")]
    group.driver.pass_time(0.5)
    assert last.result(timeout=0).assignment == c.assignment
    assert group.states[0] == (1, 1, "committed", "")


def test_receipt_that_nobody_told_of_is_in_the_version_that_it_came_for(group):
    group = group()
    (other,), (a, b, c) = group.others, given_to(group, *"abc")
    group.report(other, a, X)
    for given in (b, c):
        group.driver.report(given, Y)
    assert group.states == [(1, 1, "aggregating", "")]
    hand_over(group)
    assert [one.reported for one in group.store.rounds(group.task)] == [3, 0]
    np.testing.assert_allclose(model(group, 1), START + (X + 2 * Y) / 3, rtol=1e-6)


@pytest.mark.promise("In buffered mode a killed replica loses no receipt, and devices at work continue")
@pytest.mark.every_engine
def test_devices_at_work_go_on_when_a_replica_with_receipts_is_silent(group):
    group = group(goal=3, concurrency=5)
    (other,), (slow, a, b, c) = group.others, given_to(group, "slow", *"abc")
    group.report(other, a, X)
    group.tell(other)
    group.report(other, b, X)  # of which nobody will be told
    group.driver.report(c, X)
    group.driver.live(LEASE_S - 0.5, slow, b)
    assert group.states == [(1, 1, "reporting", "")]
    group.driver.live(1.0, slow, b)
    assert group.states == [(1, 1, "abandoned", "replica-lost"), (1, 2, "reporting", "")]
    lost, again = group.store.rounds(group.task)
    assert (lost.reported, lost.handed_on, lost.not_needed, again.taken_over) == (3, 1, 0, 1)
    group.driver.report(slow, Y)
    for given in given_to(group, "a", "b"):
        assert (given.round, given.attempt) == (1, 2)
        group.driver.report(given, Y)
    group.driver.turn()
    np.testing.assert_array_equal(model(group, 1), START + Y)
    assert {one.device for one in group.store.counted(group.task, 1)} == {"slow", "a", "b"}


def test_buffer_is_abandoned_when_a_receipt_has_no_sum(group):
    group = group()
    (other,), (slow, a, b, c) = group.others, given_to(group, "slow", *"abc")
    group.report(other, a, X)
    for given in (b, c):
        group.driver.report(given, Y)
    group.driver.live(LEASE_S - 0.5, slow)
    assert group.states == [(1, 1, "aggregating", "")]
    group.driver.live(1.0, slow)
    assert group.states == [(1, 1, "abandoned", "replica-lost"), (1, 2, "reporting", "")]
    assert [(one.reported, one.handed_on) for one in group.store.rounds(group.task)] == [(3, 1), (0, 0)]


def test_late_device_whose_report_nobody_told_of_costs_the_buffer(group):
    group = group(reporting_deadline_s=60)
    (other,), (a, b) = group.others, given_to(group, "a", "b")
    group.report(other, a, X)
    group.driver.live(62, a, b)
    assert [one.expired for one in group.store.rounds(group.task)] == [1]
    group.driver.live(LEASE_S + 1)
    assert group.states == [(1, 1, "abandoned", "replica-lost"), (1, 2, "reporting", "")]
    assert given_to(group, "a")[0].attempt == 2


def test_buffer_of_a_paused_task_ends_with_its_lost_part(group):
    group = group()
    (other,), (slow, a) = group.others, given_to(group, "slow", "a")
    group.report(other, a, X)
    group.tell(other)
    group.store.pause(group.task)
    group.driver.live(LEASE_S + 0.5, slow)
    assert group.states == [(1, 1, "abandoned", "replica-lost")]
    with pytest.raises(NoLongerNeeded):
        group.driver.report(slow, X)
    assert group.store.task(group.task).state is TaskState.PAUSED


def test_participation_of_a_device_that_went_on_is_remembered(group):
    group = group()
    (other,), (slow, a) = group.others, given_to(group, "slow", "a")
    group.report(other, a, X)
    group.tell(other)
    group.driver.live(LEASE_S + 0.5, slow)
    for given in (slow, *given_to(group, "b")):
        group.driver.report(given, Y)
    group.driver.turn()
    assert group.states[1] == (1, 2, "committed", "")
    with group.store.database.reading() as records:
        taken = records.cohorts.participations(group.task, range(1, 2), 0.0)
    assert {device for device, _, _ in taken} == {"slow", "b"}
