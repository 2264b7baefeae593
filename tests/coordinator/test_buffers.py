"""Mode buffered: devices come and report at their own speed, and every goal reports make the next version."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from coordinator.commands import CountReport
from coordinator.errors import DatabaseLocked, InvalidTask, NoLongerNeeded, TooStale, Unavailable, UnexpectedEvent
from coordinator.rules import rounds
from coordinator.rules.buffers import discount, open_buffer, places, step
from coordinator.rules.states import RoundState, TaskState
from coordinator.rules.task_settings import Buffered, ClearReports, Secagg, TaskSettings
from coordinator.store.garbage_collection import Retention, collect
from fedcore.codecs import Rotation
from fedcore.report import Segment
from tests.coordinator.bundles import START, make_bundle, make_plan, report_vector
from tests.coordinator.conftest import states

POLICY = rounds.RoundPolicy(
    goal=2, minimum=2, over_selection=1.0, selection_timeout_s=60, reporting_deadline_s=600, concurrency=3
)
X, Y = np.array([8.0, 0, 0, 0]), np.array([0, 8.0, 0, 0])


@pytest.fixture
def buffered(register, tmp_path):
    """Register a task in mode buffered on FedBuff; answers its id."""
    bundle = make_bundle(tmp_path / "fedbuff", make_plan(weighting="uniform"), "fedbuff")

    def make(concurrency=3, max_staleness=5, **settings):
        mode = Buffered(concurrency=concurrency, max_staleness=max_staleness)
        return register(bundle, **{"goal": 2, "rounds": 9, "buffered": mode} | settings)

    return make


def after(round_, *events):
    for event in events:
        round_, _ = step(round_, event)
    return round_


def model(store, task, number):
    return store.checkpoint(task, number)["params"].astype(np.float64)


def count(given, delta):
    return CountReport(given.assignment, given.assignment * 4, report_vector(delta, 1.0))


# --- the rule


def test_whoever_comes_is_drawn_up_to_the_concurrency():
    fresh = open_buffer(POLICY, taken_over=1)
    assert step(fresh, rounds.Waiting(1)) == (fresh, (rounds.Select(1),))
    assert step(fresh, rounds.Waiting(9)) == (fresh, (rounds.Select(2),))
    full = after(fresh, rounds.Configured(2))
    assert (places(full), step(full, rounds.Waiting(9))) == (0, (full, ()))
    assert places(after(full, rounds.Lost(1), rounds.Reported())) == 2


def test_the_goal_ends_the_buffer_and_leaves_devices_at_work():
    done = after(open_buffer(POLICY, taken_over=2), rounds.Configured(1), rounds.Reported(4), rounds.Reported(0))
    assert (done.state, done.staleness, done.outstanding) == (RoundState.AGGREGATING, (1, 0, 0, 0, 1), 1)
    with pytest.raises(UnexpectedEvent):
        step(done, rounds.Reported(0))
    committed = after(done, rounds.Aborted(), rounds.Aggregated())
    assert (committed.state, committed.aborted, committed.outstanding) == (RoundState.COMMITTED, 1, 0)
    assert discount(done.staleness) == pytest.approx((1 + 5**-0.5) / 2)


@pytest.mark.parametrize("event", [rounds.Aborted(), rounds.Expired(1), rounds.Lost(1)])
def test_a_buffer_without_reports_ends_after_as_many_failures_as_places(event):
    failing = after(open_buffer(POLICY), rounds.Configured(3), event, event)
    assert failing.state is RoundState.REPORTING
    assert after(failing, event).reason == "too-few-reports"


def test_a_device_that_fails_again_and_again_counts_once():
    failing = after(
        open_buffer(POLICY),
        rounds.Configured(3),
        rounds.Aborted(),
        rounds.Aborted(again=True),
        rounds.Expired(1, again=1),
    )
    assert (
        after(failing, rounds.Configured(3), rounds.Aborted(again=True), rounds.Lost(1, again=1)).state
        is RoundState.REPORTING
    )
    assert after(failing, rounds.Configured(3), rounds.Aborted(), rounds.Lost(1)).reason == "too-few-reports"


def test_devices_that_vanish_do_not_end_a_buffer_that_has_a_report():
    proven = after(
        open_buffer(POLICY),
        rounds.Configured(3),
        rounds.Reported(),
        rounds.Lost(2),
        rounds.Configured(3),
        rounds.Lost(3),
    )
    assert proven.state is RoundState.REPORTING
    assert after(proven, rounds.Abandon("cancelled")).reason == "cancelled"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"secagg": Secagg(), "goal": 8}, "secagg must be absent in mode buffered"),
        ({"clear": ClearReports(estimator="median")}, "estimator must be mean in mode buffered"),
        ({"minimum": 1}, "minimum must be the goal, 2"),
    ],
)
def test_settings_that_do_not_fit_the_mode_are_refused_with_the_reason(settings, words):
    with pytest.raises(InvalidTask, match=words):
        TaskSettings(**{"population": "phones", "goal": 2, "rounds": 1, "buffered": Buffered()} | settings)


@pytest.mark.parametrize(("name", "value"), [("concurrency", 0), ("max_staleness", -1), ("max_staleness", 1001)])
def test_bounds_of_the_mode_are_named(name, value):
    with pytest.raises(InvalidTask, match=name):
        Buffered(**{name: value})


# --- the coordinator


@pytest.mark.every_engine
def test_two_reports_make_a_version_without_the_slow_device(store, buffered, desk):
    task = buffered()
    slow, one, two = (*desk.assign("slow"), *desk.assign("a"), *desk.assign("b"))
    assert [(given.round, given.slot) for given in (slow, one, two)] == [(1, 0), (1, 1), (1, 2)]
    assert not desk.wait("waits for a place").done()
    desk.report(one, X)
    desk.report(two, Y)
    desk.turn()
    np.testing.assert_array_equal(model(store, task, 1), START + (X + Y) / 2)
    (fresh,) = desk.assign("a")
    assert (fresh.round, fresh.checkpoint.sha256) == (2, store.rounds(task)[0].checkpoint_sha256)
    receipt = desk.report(slow, X)
    assert receipt.round == 1
    desk.report(fresh, Y)
    desk.turn()
    paper = model(store, task, 1) + (2**-0.5 * X + Y) / 2
    np.testing.assert_allclose(model(store, task, 2), paper, rtol=1e-6)
    first, second, third = store.rounds(task)
    assert (first.staleness, second.staleness, third.state) == ((2,), (1, 1), RoundState.REPORTING)
    assert (first.handed_on, second.taken_over, second.handed_on) == (1, 1, 1)
    assert [(one.number, one.device) for one in store.counted(task, 2)] == [(1, "slow"), (2, "a")]


def test_reports_beyond_the_goal_go_into_the_next_version(store, buffered, desk):
    task = buffered()
    given = [*desk.assign("a"), *desk.assign("b"), *desk.assign("c")]
    *_, late = desk.turn(count(given[0], X), count(given[1], X), count(given[2], Y))
    assert not late.done()
    desk.turn()
    assert late.result(timeout=0).assignment == given[2].assignment
    assert [(one.state.value, one.reported) for one in store.rounds(task)] == [("committed", 2), ("reporting", 1)]
    desk.report(*desk.assign("d"), Y)
    desk.turn()
    np.testing.assert_allclose(model(store, task, 2), START + X + (2**-0.5 * Y + Y) / 2, rtol=1e-6)


def test_a_report_from_too_old_a_model_is_refused_and_counted(store, buffered, desk):
    task = buffered(max_staleness=0)
    slow, one, two = (*desk.assign("slow"), *desk.assign("a"), *desk.assign("b"))
    holding = desk.driver.presence.hold(slow.assignment)
    desk.report(one)
    desk.report(two)
    desk.turn()
    assert isinstance(holding.exception(timeout=0), TooStale)
    with pytest.raises(TooStale, match="more versions of the model"):
        desk.report(slow)
    assert (store.rounds(task)[0].stale, store.cohort(task, 1)[0].state.value) == (1, "too-stale")
    assert desk.assign("slow")[0].round == 2


def test_no_device_has_two_reports_in_a_version(buffered, desk):
    buffered(goal=3)
    desk.report(*desk.assign("a"))
    again = desk.wait("a")
    desk.report(*desk.assign("b"))
    assert not again.done()
    desk.report(*desk.assign("c"))
    desk.turn()
    assert again.result(timeout=0).round == 2


def test_an_assignment_ends_at_its_own_deadline(store, buffered, desk):
    task = buffered(reporting_deadline_s=60)
    (first,) = desk.assign("a")
    desk.hold(first)
    desk.pass_time(30)
    (second,) = desk.assign("b")
    desk.hold(second)
    desk.pass_time(30)
    with pytest.raises(NoLongerNeeded):
        desk.report(first)
    assert desk.report(second).round == 1
    (open_,) = store.rounds(task)
    assert (open_.expired, open_.reported) == (1, 1)


def test_a_plan_that_no_device_can_run_pauses_the_task(store, buffered, desk):
    task = buffered(concurrency=2, max_attempts=2)
    for name in "abcd":
        desk.give_up(*desk.assign(name))
        desk.turn()
    assert states(store, task) == [(1, 1, "abandoned", "too-few-reports"), (1, 2, "abandoned", "too-few-reports")]
    assert store.task(task).state is TaskState.PAUSED


def test_one_device_that_always_gives_up_ends_no_buffer(store, buffered, desk):
    task = buffered(concurrency=2)
    (slow,) = desk.assign("slow")
    for _ in range(4):
        desk.give_up(*desk.assign("broken"))
        desk.turn()
    assert [(one.state.value, one.aborted) for one in store.rounds(task)] == [("reporting", 4)]
    assert desk.report(slow).assignment == slow.assignment


def test_a_pause_lets_devices_at_work_report_and_draws_no_other(store, buffered, desk):
    task = buffered()
    one, two, slow = (*desk.assign("a"), *desk.assign("b"), *desk.assign("slow"))
    desk.report(one)
    store.pause(task)
    desk.pass_time(1)
    assert desk.arrive("c").reason == "no-task"
    desk.report(two)
    desk.turn()
    assert states(store, task) == [(1, 1, "committed", "")]
    with pytest.raises(NoLongerNeeded):
        desk.report(slow)
    store.resume(task)
    desk.pass_time(1)
    assert desk.assign("c")[0].round == 2


def test_a_paused_buffer_that_nobody_can_fill_is_given_up(store, buffered, desk):
    task = buffered()
    one, two = (*desk.assign("a"), *desk.assign("b"))
    desk.report(one)
    store.pause(task)
    desk.pass_time(1)
    desk.give_up(two)
    desk.pass_time(1)
    assert states(store, task) == [(1, 1, "abandoned", "paused")]


def test_the_last_version_ends_the_task_and_what_devices_still_do(store, buffered, desk):
    task = buffered(rounds=1)
    one, two, slow = (*desk.assign("a"), *desk.assign("b"), *desk.assign("slow"))
    holding = desk.driver.presence.hold(slow.assignment)
    desk.report(one)
    desk.report(two)
    desk.turn()
    assert store.task(task).state is TaskState.COMPLETED
    assert isinstance(holding.exception(timeout=0), NoLongerNeeded)
    assert store.rounds(task)[0].not_needed == 1


def test_a_restart_keeps_versions_and_gives_up_the_open_buffer(store, buffered, desk, new_desk):
    task = buffered()
    one, two, slow = (*desk.assign("a"), *desk.assign("b"), *desk.assign("slow"))
    desk.report(one, X)
    desk.report(two, Y)
    desk.turn()
    (fresh,) = desk.assign("a")
    receipt = desk.report(fresh, X)
    later = new_desk()
    assert states(store, task) == [(1, 1, "committed", ""), (2, 1, "abandoned", "driver-lost")]
    assert later.report(fresh, X) == receipt  # acknowledged once, and in no model
    with pytest.raises(NoLongerNeeded):
        later.report(slow, X)
    for name in "ab":
        (given,) = later.assign(name)
        assert (given.round, given.attempt) == (2, 2)
        later.report(given, Y)
    later.turn()
    np.testing.assert_array_equal(model(store, task, 2), START + (X + Y) / 2 + Y)


def test_reports_wait_for_a_version_that_cannot_be_written_but_not_long(store, buffered, desk):
    task = buffered()
    one, two, third = (*desk.assign("a"), *desk.assign("b"), *desk.assign("c"))
    desk.report(one, X)
    put, desk.store.blobs.put = desk.store.blobs.put, lambda data: (_ for _ in ()).throw(OSError("the disk is full"))
    desk.report(two, X)
    desk.pass_time(1)
    (late,) = desk.turn(count(third, Y))
    desk.live(9, third)
    assert not late.done()
    desk.live(3, third)
    with pytest.raises(Unavailable, match="the next model cannot be made"):
        late.result(timeout=0)
    desk.store.blobs.put = put
    desk.pass_time(2)
    assert store.rounds(task)[0].state is RoundState.COMMITTED
    assert desk.report(third, Y).assignment == third.assignment


@pytest.mark.parametrize("error", [OSError("the disk is full"), DatabaseLocked("locked")])
def test_a_report_beyond_the_goal_outlives_a_commit_that_fails(store, buffered, desk, error, monkeypatch):
    task = buffered()
    given = [*desk.assign("a"), *desk.assign("b"), *desk.assign("c")]
    with monkeypatch.context() as patched:
        patched.setattr(desk.store.blobs, "put", lambda data: (_ for _ in ()).throw(error))
        *_, late = desk.turn(*(count(one, X) for one in given))
    assert not late.done()
    desk.pass_time(2)
    desk.turn()
    assert late.result(timeout=0).assignment == given[2].assignment
    assert [(one.state.value, one.reported) for one in store.rounds(task)] == [("committed", 2), ("reporting", 1)]


def test_a_pause_keeps_a_full_buffer_that_could_not_be_written(store, buffered, desk, monkeypatch):
    task = buffered()
    one, two = (*desk.assign("a"), *desk.assign("b"))
    desk.report(one, X)
    with monkeypatch.context() as patched:
        patched.setattr(desk.store.blobs, "put", lambda data: (_ for _ in ()).throw(OSError("the disk is full")))
        desk.report(two, X)
        store.pause(task)
        desk.pass_time(1)
    desk.pass_time(2)
    assert states(store, task) == [(1, 1, "committed", "")]


def test_a_rollback_begins_from_the_earlier_model(store, buffered, desk):
    task = buffered()
    for name in "abcd":
        desk.report(*desk.assign(name), X)
        desk.turn()
    (slow,) = desk.assign("slow")
    store.pause(task)
    desk.pass_time(1)
    desk.give_up(slow)
    desk.pass_time(1)
    store.roll_back(task, 1)
    store.resume(task)
    desk.pass_time(1)
    (given,) = desk.assign("a")
    assert given.checkpoint.sha256 == store.rounds(task)[0].checkpoint_sha256


def test_models_stay_as_long_as_devices_start_from_them(store, buffered, desk):
    task = buffered()
    desk.report(*desk.assign("a"))
    desk.report(*desk.assign("b"))
    desk.turn()
    (slow,) = desk.assign("slow")
    for number in (2, 3):
        for name in "ab":
            desk.report(*desk.assign(name), [number, 0, 0, 0])
        desk.turn()
    collect(store, Retention(models=1, assignments_s=-1.0, grace_s=-1.0))
    assert [one.number for one in store.rounds(task) if one.checkpoint_sha256] == [1, 3]
    assert store.blobs.has(slow.checkpoint.sha256)
    assert desk.report(slow).assignment == slow.assignment


def test_devices_rest_between_versions_also_while_others_work(buffered, desk):
    buffered(min_separation_rounds=3)
    slow, one, two = (*desk.assign("slow"), *desk.assign("a"), *desk.assign("b"))
    desk.report(one)
    desk.report(two)
    desk.turn()
    assert desk.driver._memory.participation.is_resting(slow.task, "a", desk.now, 0)
    desk.give_up(slow)
    assert not desk.driver._memory.participation.is_resting(slow.task, "slow", desk.now, 0)


def test_progress_and_pages_tell_of_the_buffer_and_its_staleness(store, buffered, desk):
    task = buffered()
    slow, one, two = (*desk.assign("slow"), *desk.assign("a"), *desk.assign("b"))
    desk.report(one)
    desk.report(two)
    desk.turn()
    desk.report(slow)
    desk.hold(*desk.assign("c"))
    desk.pass_time(3)
    progress = store.progress_of(task)
    assert progress.sentence == "round 2: 1 of 2 reports in the buffer, 1 of 3 devices at work"
    assert 'muster_report_staleness_bucket{le="1.0"} 3.0' in desk.driver.metrics.text().decode()


def test_a_plan_with_codecs_has_no_mode_buffered(register, tmp_path):
    coded = (Segment("delta", 4, "mean", codecs=(Rotation(4),)), *make_plan().report.segments[1:])
    bundle = make_bundle(tmp_path / "coded", make_plan(segments=coded, weighting="uniform"), "fedbuff")
    with pytest.raises(InvalidTask, match="the plan has codecs, with a key for each round"):
        register(bundle, goal=2, buffered=Buffered(concurrency=3, max_staleness=5))


def test_a_plan_that_quantises_in_clear_has_no_secure_rounds(register, tmp_path):
    plan = make_plan()
    bundle = make_bundle(tmp_path / "coded", replace(plan, report=replace(plan.report, bits=4)))
    with pytest.raises(InvalidTask, match="the plan rounds reports in the clear to 4 bits"):
        register(bundle, goal=10, minimum=8, secagg=Secagg())
