from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from coordinator.errors import UnexpectedEvent
from coordinator.rules import rounds
from coordinator.rules.states import AssignmentState, RoundState, TaskState, move

POLICY = rounds.RoundPolicy(goal=10, minimum=4, over_selection=1.3, selection_timeout_s=5, reporting_deadline_s=60)


def reporting(assigned=13, policy=POLICY):
    configuring, _ = rounds.step(rounds.open_round(policy, 0), rounds.Waiting(assigned), policy.selection_timeout_s)
    return rounds.step(configuring, rounds.Configured(assigned), 10)[0]


def after(round_, *events, now=10.0):
    for event in events:
        round_, _ = rounds.step(round_, event, now)
    return round_


def test_selection_ends_as_soon_as_goal_times_over_selection_wait():
    round_ = rounds.open_round(POLICY, 0)
    assert rounds.step(round_, rounds.Waiting(12), 1) == (round_, ())
    selected, effects = rounds.step(round_, rounds.Waiting(20), 1)
    assert (selected.state, effects) == (RoundState.CONFIGURING, (rounds.Select(13),))


@pytest.mark.parametrize(("goal", "over", "cohort"), [(10, 1.3, 13), (100, 1.1, 110), (3, 1.3, 4), (1, 1.0, 1)])
def test_cohort_is_goal_times_over_selection_rounded_up(goal, over, cohort):
    assert rounds.RoundPolicy(goal, 1, over, 1, 1).cohort == cohort


def test_selection_timeout_takes_who_is_there_from_the_minimum_on():
    selected, effects = rounds.step(rounds.open_round(POLICY, 0), rounds.Waiting(4), 5)
    assert (selected.state, effects) == (RoundState.CONFIGURING, (rounds.Select(4),))


def test_selection_timeout_with_too_few_turns_devices_away():
    abandoned, effects = rounds.step(rounds.open_round(POLICY, 0), rounds.Waiting(3), 5)
    assert (abandoned.state, abandoned.reason) == (RoundState.ABANDONED, "too-few-devices")
    assert effects == (rounds.TurnAway(),)


def test_held_round_draws_nobody_and_has_no_deadline():
    held = rounds.open_round(POLICY, 0, held=True)
    assert rounds.step(held, rounds.Waiting(99, held=True), 1000) == (held, ())
    assert rounds.step(held, rounds.Tick(), 1000) == (held, ())


def test_released_round_draws_at_once_whom_it_has_waited_for():
    held = rounds.open_round(POLICY, 0, held=True)
    whole, effects = rounds.step(held, rounds.Waiting(20), 1)
    assert (whole.state, whole.held, effects) == (RoundState.CONFIGURING, False, (rounds.Release(), rounds.Select(13)))
    assert rounds.step(held, rounds.Waiting(4), 100)[1] == (rounds.Release(), rounds.Select(4))


def test_released_round_with_too_few_devices_waits_its_whole_timeout():
    released, effects = rounds.step(rounds.open_round(POLICY, 0, held=True), rounds.Waiting(3), 100)
    assert (released.state, released.deadline, effects) == (RoundState.SELECTING, 105, (rounds.Release(),))
    assert rounds.step(released, rounds.Waiting(3), 105)[0].reason == "too-few-devices"


def test_failed_attempts_pause_ever_longer_up_to_a_quarter_of_an_hour():
    assert [rounds.back_off_s(failures) for failures in range(5)] == [0, 0, 15, 30, 60]
    assert rounds.back_off_s(10**6) == 900


def test_goal_ends_reporting_and_expires_the_rest():
    round_ = after(reporting(), *[rounds.Reported()] * 9)
    assert round_.state is RoundState.REPORTING
    done, effects = rounds.step(round_, rounds.Reported(), 10)
    assert (done.state, done.reported, effects) == (
        RoundState.AGGREGATING,
        10,
        (rounds.EndAssignments(AssignmentState.NOT_NEEDED),),
    )


@pytest.mark.parametrize(("reported", "state"), [(3, RoundState.ABANDONED), (4, RoundState.AGGREGATING)])
def test_deadline_commits_from_the_minimum_on(reported, state):
    round_ = after(reporting(), *[rounds.Reported()] * reported)
    assert rounds.step(round_, rounds.Tick(), 69.9)[0] == round_
    assert rounds.step(round_, rounds.Tick(), 70)[0].state is state


@pytest.mark.parametrize(("reported", "state"), [(3, RoundState.ABANDONED), (4, RoundState.AGGREGATING)])
def test_round_ends_early_when_nobody_is_left_to_report(reported, state):
    round_ = after(reporting(), *[rounds.Reported()] * reported, *[rounds.Aborted()] * (12 - reported))
    assert round_.state is RoundState.REPORTING
    assert after(round_, rounds.Aborted()).state is state


def test_deadline_cuts_off_whoever_is_still_there():
    done, effects = rounds.step(after(reporting(), *[rounds.Reported()] * 5, rounds.Lost(2)), rounds.Tick(), 70)
    assert (done.expired, done.outstanding, effects) == (6, 0, (rounds.EndAssignments(AssignmentState.EXPIRED),))


def test_lost_devices_are_replaced_as_far_as_the_goal_lacks_them():
    round_ = after(reporting(13), *[rounds.Reported()] * 6, rounds.Lost(5))
    assert rounds.step(round_, rounds.Waiting(9), 11) == (round_, (rounds.Select(2),))
    assert rounds.step(round_, rounds.Waiting(1), 11) == (round_, (rounds.Select(1),))
    replaced = after(round_, rounds.Configured(2))
    assert (replaced.assigned, replaced.attainable, rounds.step(replaced, rounds.Waiting(9), 11)) == (
        15,
        10,
        (replaced, ()),
    )


def test_devices_that_gave_up_are_not_replaced():
    round_ = after(reporting(13), *[rounds.Aborted()] * 5)
    assert rounds.step(round_, rounds.Waiting(9), 11) == (round_, ())


def test_no_more_than_a_cohort_is_replaced_and_nobody_late_in_the_round():
    all_lost = after(reporting(13), rounds.Lost(13))
    assert after(all_lost, rounds.Tick()).reason == "too-few-reports"
    some_lost = after(all_lost, rounds.Configured(10), rounds.Lost(5))
    assert some_lost.missing(10) == 3
    last = after(some_lost, rounds.Configured(3))
    assert (last.replaced, last.assigned, last.missing(10)) == (13, 26, 0)
    assert after(last, rounds.Lost(8)).reason == "too-few-reports"
    assert after(reporting(13), rounds.Lost(13)).missing(41) == 0


def test_round_short_of_its_minimum_waits_briefly_for_replacements():
    round_ = after(reporting(13), rounds.Lost(10))
    assert after(round_, rounds.Waiting(0), now=12.9).state is RoundState.REPORTING
    assert after(round_, rounds.Waiting(0), now=13).state is RoundState.ABANDONED
    assert rounds.step(after(round_, rounds.Waiting(0), now=12.9), rounds.Waiting(1), 12.9)[1] == (rounds.Select(1),)
    assert after(round_, rounds.Configured(1), rounds.Waiting(0), now=13).state is RoundState.REPORTING


def test_round_ends_at_once_when_its_minimum_is_out_of_reach():
    assert after(reporting(13), *[rounds.Aborted()] * 9).state is RoundState.REPORTING
    ended, effects = rounds.step(after(reporting(13), *[rounds.Aborted()] * 9), rounds.Aborted(), 10)
    assert (ended.state, ended.reason) == (RoundState.ABANDONED, "too-few-reports")
    assert effects == (rounds.EndAssignments(AssignmentState.NOT_NEEDED),)
    assert after(reporting(13), rounds.Lost(10), rounds.Tick()).state is RoundState.ABANDONED


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ((rounds.Lost(10),), "too-few-reports"),
        ((rounds.Lost(10, proven=True),), "devices-lost"),
        ((rounds.Reported(), rounds.Lost(12)), "devices-lost"),
        ((rounds.Reported(), *[rounds.Aborted()] * 10), "too-few-reports"),
    ],
    ids=["nobody carried it out", "somebody trained", "somebody reported", "they gave up"],
)
def test_attempt_fails_unless_some_reported_and_devices_only_vanished(events, reason):
    ended = after(reporting(13), *events, rounds.Tick())
    assert (ended.state, ended.reason) == (RoundState.ABANDONED, reason)
    assert (reason in rounds.FAILURES) is (reason == "too-few-reports")


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ((rounds.Expired(9),), "devices-lost"),
        ((rounds.Expired(10),), "too-few-reports"),
        ((rounds.Expired(10, again=1),), "devices-lost"),
        ((*[rounds.Aborted(again=True)] * 3, rounds.Expired(10, again=1)), "too-few-reports"),
        ((rounds.Lost(4), rounds.Expired(9)), "devices-lost"),
    ],
    ids=["enough others", "too few others", "some were late before", "all failed", "vanished"],
)
def test_secure_attempt_fails_by_devices_that_are_late_for_the_first_time(events, reason):
    late = after(reporting(13), *events)
    assert late.state is RoundState.REPORTING
    ended, effects = rounds.step(late, rounds.Summed(0), 10)
    assert (ended.state, ended.reason) == (RoundState.ABANDONED, reason)
    assert effects == (
        rounds.EndAssignments(AssignmentState.EXPIRED if late.timed_out else AssignmentState.NOT_NEEDED),
    )


def test_report_at_the_deadline_is_not_taken():
    with pytest.raises(UnexpectedEvent, match="deadline 70"):
        rounds.step(reporting(), rounds.Reported(), 70)


@pytest.mark.parametrize(
    "event", [rounds.Waiting(3), rounds.Configured(1), rounds.Reported(), rounds.Aborted(), rounds.Aggregated()]
)
def test_ended_round_takes_no_event_but_time_and_abandonment(event):
    ended = after(reporting(), rounds.Abandon("cancelled"))
    assert after(ended, rounds.Tick(), rounds.Abandon("again")) == ended
    with pytest.raises(UnexpectedEvent):
        rounds.step(ended, event, 11)


def test_assignments_and_tasks_end_once():
    assert move(AssignmentState.ASSIGNED, AssignmentState.REPORTED) is AssignmentState.REPORTED
    assert move(TaskState.PAUSED, TaskState.ACTIVE) is TaskState.ACTIVE
    with pytest.raises(UnexpectedEvent):
        move(AssignmentState.REPORTED, AssignmentState.ABORTED)
    with pytest.raises(UnexpectedEvent):
        move(TaskState.CANCELLED, TaskState.ACTIVE)


LEGAL = {
    RoundState.SELECTING: {RoundState.SELECTING, RoundState.CONFIGURING, RoundState.ABANDONED},
    RoundState.CONFIGURING: {RoundState.CONFIGURING, RoundState.REPORTING, RoundState.ABANDONED},
    RoundState.REPORTING: {RoundState.REPORTING, RoundState.AGGREGATING, RoundState.ABANDONED},
    RoundState.AGGREGATING: {RoundState.AGGREGATING, RoundState.COMMITTED, RoundState.ABANDONED},
    RoundState.COMMITTED: {RoundState.COMMITTED},
    RoundState.ABANDONED: {RoundState.ABANDONED},
}
EVENTS = st.one_of(
    st.builds(rounds.Waiting, st.integers(0, 20), st.booleans()),
    st.builds(rounds.Configured, st.integers(0, 20)),
    st.builds(rounds.Summed, st.integers(0, 20)),
    st.builds(rounds.Lost, st.integers(0, 20), st.booleans()),
    st.builds(rounds.Expired, st.integers(0, 20)),
    st.sampled_from(
        [rounds.Reported(), rounds.Reported(), rounds.Reported(), rounds.Aborted(), rounds.Tick(), rounds.Aggregated()]
    ),
)


class RoundMachine(RuleBasedStateMachine):
    """Any history of one round: what its driver does, and events that no driver should send."""

    @initialize(goal=st.integers(1, 6), share=st.floats(0, 1), over=st.floats(1, 3), held=st.booleans())
    def start(self, goal, share, over, held):
        self.policy = rounds.RoundPolicy(goal, max(1, round(goal * share)), over, 5.0, 20.0)
        self.now = 0.0
        self.round: rounds.Round = rounds.open_round(self.policy, self.now, held=held)
        self.history = [self.round]

    def take(self, event):
        self.round, self.effects = rounds.step(self.round, event, self.now)
        self.history.append(self.round)

    def is_in(self, *states):
        return self.round.state in states

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds):
        self.now += seconds
        self.take(rounds.Tick())

    @precondition(lambda self: self.is_in(RoundState.SELECTING))
    @rule(eligible=st.integers(0, 20), held=st.booleans())
    def devices_wait(self, eligible, held):
        before = self.round
        self.take(rounds.Waiting(eligible, held))
        assert (rounds.Release() in self.effects) is (before.held and not self.round.held)
        for effect in self.effects:
            if isinstance(effect, rounds.Select):
                assert not self.round.held
                assert self.policy.minimum <= effect.count <= min(eligible, self.policy.cohort)
                self.take(rounds.Configured(effect.count))

    @precondition(lambda self: self.is_in(RoundState.REPORTING) and self.now < self.round.deadline)
    @precondition(lambda self: self.round.outstanding > 0)
    @rule(event=st.sampled_from([rounds.Reported(), rounds.Reported(), rounds.Aborted()]))
    def device_answers(self, event):
        self.take(event)

    @precondition(lambda self: self.is_in(RoundState.REPORTING))
    @rule(eligible=st.integers(0, 20))
    def devices_wait_while_others_report(self, eligible):
        before = self.round
        self.take(rounds.Waiting(eligible))
        for effect in self.effects:
            if isinstance(effect, rounds.Select):
                assert 0 < effect.count <= min(eligible, before.lost)
                self.take(rounds.Configured(effect.count))
                assert self.policy.minimum <= self.round.attainable <= self.policy.goal

    @precondition(lambda self: self.is_in(RoundState.AGGREGATING))
    @rule()
    def commit(self):
        self.take(rounds.Aggregated())

    @rule(event=EVENTS)
    def anything_happens(self, event):
        """An event is either taken, or refused and changes nothing."""
        before = self.round
        try:
            self.take(event)
        except UnexpectedEvent:
            assert self.round is before

    @precondition(lambda self: len(self.history) > 8)
    @rule()
    def cancel(self):
        self.take(rounds.Abandon("cancelled"))

    @invariant()
    def counts_add_up(self):
        r = self.round
        assert r.outstanding >= 0
        assert r.reported <= r.assigned
        assert r.replaced <= min(r.lost, self.policy.cohort)
        assert not (r.held and r.state not in (RoundState.SELECTING, RoundState.ABANDONED))

    @invariant()
    def every_move_is_in_the_table(self):
        for before, after_ in itertools.pairwise(self.history):
            assert after_.state in LEGAL[before.state]
            assert after_.held <= before.held

    @invariant()
    def reporting_ends_with_whoever_is_needed_and_no_later(self):
        # Only a masked round's aggregation says of some devices that their time is up, and it then ends the round.
        if self.is_in(RoundState.REPORTING) and not self.round.expired:
            assert self.round.reported < self.policy.goal
            assert self.round.attainable >= self.policy.minimum or self.now < self.round.short_until < math.inf
            assert self.round.outstanding > 0 or self.round.attainable < self.policy.minimum

    @invariant()
    def committed_only_from_the_minimum_on(self):
        if self.is_in(RoundState.AGGREGATING, RoundState.COMMITTED):
            assert self.round.reported >= self.policy.minimum

    @invariant()
    def an_end_stays(self):
        ends = [r for r in self.history if r.state.ended]
        assert all(r == ends[0] for r in ends)
        assert bool(self.round.reason) == (self.round.state is RoundState.ABANDONED)

    def teardown(self):
        """Time alone, and the caller's own duties, end every round."""
        if not hasattr(self, "round"):
            return
        if self.is_in(RoundState.SELECTING):
            self.devices_wait(0, held=False)
        self.now += 5
        if self.is_in(RoundState.SELECTING):
            self.devices_wait(0, held=False)
        if self.is_in(RoundState.CONFIGURING):
            self.take(rounds.Configured(self.policy.minimum))
        self.now += 20
        self.take(rounds.Tick())
        if self.is_in(RoundState.AGGREGATING):
            self.commit()
        assert self.round.state.ended


TestRoundMachine = RoundMachine.TestCase
TestRoundMachine.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
