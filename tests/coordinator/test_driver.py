from __future__ import annotations

import random
from concurrent.futures import Future

import numpy as np
import pytest
import sqlalchemy

from coordinator.commands import AbortAssignment, CancelWait, CountReport
from coordinator.errors import ConflictingReport, NoLongerNeeded, Unavailable, UnknownAssignment
from coordinator.rules.states import AssignmentState, RoundState, TaskState
from coordinator.store.tables import ROUNDS, TRANSITIONS
from fedcore.codecs import Rotation, RoundKey
from fedcore.report import Segment
from fedcore.signing import SigningKey, verify
from fedcore.wire.messages import Abort, Rejected
from tests.coordinator.bundles import START, make_bundle, make_plan, report_vector
from tests.coordinator.conftest import RETRY, bare, states

pytestmark = pytest.mark.every_engine


def transitions(store, entity):
    with store.database.engine.connect() as connection:
        table = TRANSITIONS.c
        query = sqlalchemy.select(table.entity_id, table.from_state, table.to_state, table.cause).order_by(table.id)
        return [tuple(row) for row in connection.execute(query.where(table.entity == entity))]


def test_assignment_says_who_signed_the_plan_and_the_rounds_minimum(register, desk, bundle, tmp_path):
    register(bundle, goal=2, minimum=1)
    assert {(a.plan_signature, a.minimum) for a in desk.assign("a", "b")} == {(None, 1)}
    signed = bundle.sign(SigningKey.new(tmp_path / "key.pem"))
    register(signed, population="tablets", goal=1)
    given = desk.wait("c", population="tablets").result(timeout=0)
    assert (given.plan_signature, given.minimum) == (signed.manifest.signature, 1)
    verify(given.plan, given.plan_signature)


def test_two_rounds_of_fedavg_equal_exact_arithmetic(store, register, desk):
    task = register(goal=2, rounds=2, seed=7)
    first = desk.assign("a", "b")
    assert [(a.slot, a.round, a.attempt, a.seed) for a in first] == [(0, 1, 1, 7), (1, 1, 1, 7)]
    desk.report(first[0], [1, 0, 0, 0], weight=1, loss=3)
    receipt = desk.report(first[1], [0, 2, 0, 0], weight=3, loss=1)
    assert (receipt.assignment, receipt.task, receipt.round) == (first[1].assignment, task, 1)
    second = desk.assign("a", "b")
    for assignment in second:
        desk.report(assignment, [0, 0, 0, 8], weight=5)
    np.testing.assert_array_equal(store.checkpoint(task, 1)["params"], START + np.array([0.25, 1.5, 0, 0]))
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([0.25, 1.5, 0, 8]))
    assert states(store, task) == [(1, 1, "committed", ""), (2, 1, "committed", "")]
    assert store.rounds(task)[0].metrics == {"train.loss": 1.0}
    assert store.task(task).state is TaskState.COMPLETED
    assert second[0].checkpoint.sha256 == store.rounds(task)[0].checkpoint_sha256
    assert {(seat.device, seat.state) for seat in store.cohort(task, 1)} == {
        ("a", AssignmentState.REPORTED),
        ("b", AssignmentState.REPORTED),
    }


def test_coded_reports_are_decoded_with_the_key_of_their_round(store, register, desk, tmp_path):
    codecs = (Rotation(2), Rotation(4))
    plan = make_plan(segments=(Segment("delta", 4, "mean", codecs=codecs), *make_plan().report.segments[1:]))
    task = register(make_bundle(tmp_path / "coded", plan), goal=2, rounds=2)
    deltas, expected = np.array([[1, 0, 2, -1], [3, 1, 0, 0]], np.float32), START.astype(np.float64)
    for _ in range(2):
        for given, delta in zip(desk.assign("a", "b"), deltas, strict=True):
            assert given.seed == store.task(task).settings.seed
            coded = plan.report.encode({"delta": delta}, RoundKey(given.seed, given.round))["delta"]
            desk.report(given, coded, 2.0)
        expected += deltas.mean(axis=0)
    np.testing.assert_allclose(store.checkpoint(task, 2)["params"], expected, atol=1e-6)


def test_server_state_is_carried_between_rounds(store, register, desk, tmp_path):
    task = register(make_bundle(tmp_path / "adam", algorithm="fedadam", settings={"server_lr": 1.0}), goal=1)
    for _ in range(2):
        desk.report(*desk.assign("a"), delta=[1, 1, 1, 1])
    m, v, expected = 0.0, 1e-6, START.astype(np.float64)
    for _ in range(2):
        m, v = np.float32(0.9 * m + 0.1), np.float32(0.99 * v + 0.01)
        expected = (expected + m / (np.sqrt(np.float64(v)) + 1e-3)).astype(np.float32)
    np.testing.assert_allclose(store.checkpoint(task)["params"], expected, rtol=1e-6)


def test_same_source_draws_the_same_cohorts(register, store, new_desk):
    register(goal=2, over_selection=1, rounds=99, selection_timeout_s=3, minimum=2)
    drawn = []
    for _ in range(2):
        desk = new_desk(random.Random(5))
        waiting = {name: desk.wait(name) for name in "ab"}
        drawn.append({name: future.result(timeout=0).slot for name, future in waiting.items()})
    assert drawn[0] == drawn[1]


def test_selection_timeout_with_too_few_becomes_the_next_attempt(store, register, desk):
    task = register(goal=2, selection_timeout_s=5)
    alone = desk.wait("a")
    desk.pass_time(5)
    assert bare(alone.result(timeout=0)) == Rejected("not-selected", RETRY)
    assert [a.attempt for a in desk.assign("a", "b")] == [2, 2]
    assert states(store, task) == [(1, 1, "abandoned", "too-few-devices"), (1, 2, "reporting", "")]


@pytest.mark.promise("Silent devices, and devices that die during an upload, stall no round")
def test_silent_devices_cannot_stall_a_round_that_has_its_minimum(store, register, desk):
    task = register(goal=3, minimum=1, reporting_deadline_s=60)
    quick, *silent = desk.assign("a", "b", "c")
    desk.report(quick, [1, 0, 0, 0])
    desk.pass_time(60)
    record = store.rounds(task)[0]
    assert (record.state, record.assigned, record.reported) == (RoundState.COMMITTED, 3, 1)
    assert {seat.state for seat in store.cohort(task, 1)} == {AssignmentState.REPORTED, AssignmentState.EXPIRED}
    with pytest.raises(NoLongerNeeded):
        desk.report(silent[0])
    assert desk.give_up(silent[0]) is None


def test_too_few_reports_abandon_the_round_and_leave_the_model(store, register, desk):
    task = register(goal=2)
    quick, late = desk.assign("a", "b")
    desk.report(quick, [1, 0, 0, 0])
    desk.pass_time(600)
    with pytest.raises(NoLongerNeeded):
        desk.report(late)
    for assignment in desk.assign("c", "d"):
        assert assignment.attempt == 2
        desk.report(assignment, [0, 0, 0, 4])
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([0, 0, 0, 4]))
    assert states(store, task) == [(1, 1, "abandoned", "too-few-reports"), (1, 2, "committed", "")]


def test_report_beyond_the_goal_is_refused(store, register, desk):
    task = register(goal=1, over_selection=2)
    first, second = desk.assign("a", "b")
    one = CountReport(first.assignment, "1" * 64, report_vector([1, 0, 0, 0], 1))
    two = CountReport(second.assignment, "2" * 64, report_vector([5, 0, 0, 0], 1))
    taken, refused = desk.turn(one, two)
    assert taken.result(timeout=0).sha256 == "1" * 64
    assert isinstance(refused.exception(timeout=0), NoLongerNeeded)
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([1, 0, 0, 0]))


@pytest.mark.promise("No report counts twice, and none with a receipt is missing from a committed round")
def test_replayed_report_counts_once_and_another_one_conflicts(store, register, desk):
    task = register(goal=2)
    first, second = desk.assign("a", "b")
    one = CountReport(first.assignment, "1" * 64, report_vector([8, 0, 0, 0], 1))
    receipts = [future.result(timeout=0) for future in desk.turn(one, one)] + [desk.ask(one)]
    assert receipts == [receipts[0]] * 3
    with pytest.raises(ConflictingReport, match="111111111111"):
        desk.ask(CountReport(first.assignment, "2" * 64, one.vector))
    with pytest.raises(ConflictingReport):
        desk.give_up(first)
    desk.report(second, [0, 0, 0, 0])
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([4, 0, 0, 0]))
    assert desk.ask(one) == receipts[0]


def test_aborted_assignment_cannot_report_and_may_be_aborted_again(store, register, desk):
    task = register(goal=2)
    first, _ = desk.assign("a", "b")
    assert desk.give_up(first) is None
    assert desk.give_up(first) is None
    with pytest.raises(NoLongerNeeded, match="aborted"):
        desk.report(first)
    seat = next(seat for seat in store.cohort(task, 1) if seat.id == first.assignment)
    assert (seat.state, seat.reason) == (AssignmentState.ABORTED, "runtime-failed")


def test_aborts_are_counted_by_reason_in_each_round(store, register, desk):
    task = register(goal=3, minimum=1)
    reasons = ("plan-refused", "runtime-failed", "plan-refused")
    for assignment, reason in zip(desk.assign("a", "b", "c"), reasons, strict=True):
        desk.ask(AbortAssignment(assignment.assignment, Abort(reason)))
    again = desk.assign("d", "e", "f")
    desk.give_up(again[0])
    for assignment in again[1:]:
        desk.report(assignment)
    counts = [record.abort_reasons for record in store.rounds(task)]
    assert counts[0] == {"plan-refused": 2, "runtime-failed": 1}
    assert [record.aborted for record in store.rounds(task)] == [sum(found.values()) for found in counts]


def test_giving_up_at_the_deadline_is_as_good_as_expiring(store, register, desk):
    task = register(goal=1, reporting_deadline_s=60)
    (assignment,) = desk.assign("a")
    desk.now = 60
    assert desk.give_up(assignment) is None
    assert [seat.state for seat in store.cohort(task, 1)] == [AssignmentState.EXPIRED]


def test_unknown_assignment_is_refused(register, desk):
    register()
    vector = report_vector([0, 0, 0, 0], 1)
    for request in (CountReport("nobody", "1" * 64, vector), AbortAssignment("nobody", Abort("runtime-failed"))):
        with pytest.raises(UnknownAssignment):
            desk.ask(request)


def test_restart_runs_the_running_round_again_from_the_same_model(store, register, new_desk):
    task = register(goal=2, rounds=1)
    before = new_desk()
    first, second = before.assign("a", "b")
    receipt = before.report(first, [100, 0, 0, 0])
    after = new_desk()
    with pytest.raises(NoLongerNeeded):
        after.report(second)
    assert after.report(first, [100, 0, 0, 0]) == receipt
    for assignment in after.assign("a", "b"):
        assert (assignment.round, assignment.attempt, assignment.checkpoint) == (1, 2, first.checkpoint)
        after.report(assignment, [0, 1, 0, 0])
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([0, 1, 0, 0]))
    assert states(store, task) == [(1, 1, "abandoned", "driver-lost"), (1, 2, "committed", "")]


def test_paused_task_finishes_its_round_and_opens_no_other(store, register, desk):
    task = register(goal=1)
    (running,) = desk.assign("a")
    waiting = desk.wait("b")
    store.pause(task)
    desk.pass_time(0.3)
    assert bare(desk.arrive("c")) == Rejected("no-task", RETRY)
    desk.report(running)
    desk.pass_time(0.3)
    assert bare(waiting.result(timeout=0)) == Rejected("no-task", RETRY)
    assert states(store, task) == [(1, 1, "committed", ""), (2, 1, "abandoned", "paused")]
    store.resume(task)
    desk.pass_time(0.3)
    (next_,) = desk.assign("c")
    assert (next_.round, next_.attempt) == (2, 2)


def test_cancelled_task_abandons_its_round(store, register, desk):
    task = register(goal=1)
    (running,) = desk.assign("a")
    store.cancel(task)
    desk.pass_time(0.3)
    assert states(store, task) == [(1, 1, "abandoned", "cancelled")]
    with pytest.raises(NoLongerNeeded):
        desk.report(running)


def test_round_of_a_task_cancelled_since_the_last_look_is_not_committed(store, register, desk):
    task = register(goal=1)
    (running,) = desk.assign("a")
    store.cancel(task)
    desk.report(running, [1, 0, 0, 0])
    assert states(store, task) == [(1, 1, "abandoned", "cancelled")]
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START)


def test_model_that_is_no_longer_finite_pauses_the_task_and_says_so(store, register, desk, tmp_path):
    task = register(make_bundle(tmp_path / "huge", settings={"server_lr": 1e38}), goal=1)
    desk.report(*desk.assign("a"), delta=[100, 0, 0, 0])
    paused = store.task(task)
    assert (paused.state, states(store, task)) == (TaskState.PAUSED, [(1, 1, "abandoned", "non-finite-state")])
    assert paused.reason.startswith("round 1: after the update, vector 'params'")
    assert paused.reason in store.progress_of(task).sentence
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START)
    store.resume(task)
    desk.turn()
    assert len(desk.assign("b")) == 1


def test_sum_without_weight_abandons_the_round_only(store, register, desk):
    task = register(goal=1)
    desk.report(*desk.assign("a"), weight=0.0)
    assert states(store, task) == [(1, 1, "abandoned", "invalid-aggregate")]
    assert store.task(task).state is TaskState.ACTIVE


def test_failed_commit_counts_nothing_and_the_same_report_counts_later(store, register, desk, failing_commit):
    task = register(goal=2)
    first, second = desk.assign("a", "b")
    failing_commit["failing"] = True
    with pytest.raises(Unavailable):
        desk.report(first, [100, 0, 0, 0])
    with pytest.raises(Unavailable):
        desk.give_up(second)
    failing_commit["failing"] = False
    desk.report(first, [2, 0, 0, 0])
    desk.report(second, [4, 0, 0, 0])
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([3, 0, 0, 0]))


def test_selection_that_could_not_be_stored_leaves_the_devices_waiting(store, register, desk, failing_commit):
    task = register(goal=1)
    desk.pass_time(1)
    failing_commit["failing"] = True
    waiting = desk.wait("a")
    desk.pass_time(1)
    assert not waiting.done()
    failing_commit["failing"] = False
    desk.pass_time(1)
    assert waiting.result(timeout=0).attempt == 1
    assert len(store.rounds(task)) == 1


def test_round_that_failed_to_commit_keeps_its_sum_for_later(store, register, desk, monkeypatch):
    task = register(goal=1)
    (assignment,) = desk.assign("a")

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store.blobs, "put", full)
        desk.report(assignment, [1, 0, 0, 0])
        assert states(store, task) == [(1, 1, "aggregating", "")]
    desk.pass_time(1)
    np.testing.assert_array_equal(store.checkpoint(task, 1)["params"], START + np.array([1, 0, 0, 0]))


def test_second_coordinator_on_a_store_is_noticed_and_counts_nothing(store, register, new_desk):
    register(goal=1)
    first = new_desk()
    (assignment,) = first.assign("a")
    new_desk()
    for error in (Unavailable, NoLongerNeeded):
        with pytest.raises(error):
            first.report(assignment)
    with store.database.engine.connect() as connection:
        assert list(connection.scalars(sqlalchemy.select(ROUNDS.c.state))) == ["abandoned"]


def test_two_tasks_of_a_population_take_turns(store, register, desk):
    tasks = {register(goal=1, rounds=5), register(goal=1, rounds=5)}
    served = []
    for _ in range(4):
        (assignment,) = desk.assign("a")
        served.append(assignment.task)
        desk.report(assignment)
    assert set(served[:2]) == set(served[2:]) == tasks


def test_every_change_of_state_leaves_a_transition(store, register, desk):
    task = register(goal=1, over_selection=2, rounds=1)
    first, second = desk.assign("a", "b")
    desk.report(first)
    assert [row[1:3] for row in transitions(store, "round")] == [
        ("", "selecting"),
        ("selecting", "configuring"),
        ("configuring", "reporting"),
        ("reporting", "aggregating"),
        ("aggregating", "committed"),
    ]
    assert transitions(store, "task") == [
        (task, "", "active", "created by an operator on the store"),
        (task, "active", "completed", "its last round was committed"),
    ]
    assert {row[:3] for row in transitions(store, "assignment")} == {
        (first.assignment, "", "assigned"),
        (second.assignment, "", "assigned"),
        (first.assignment, "assigned", "reported"),
        (second.assignment, "assigned", "not-needed"),
    }


def test_draining_sends_devices_away_and_still_takes_reports(store, register, desk):
    task = register(goal=1)
    (assignment,) = desk.assign("a")
    waiting = desk.wait("b")
    desk.driver.drain()
    desk.turn()
    assert bare(waiting.result(timeout=0)) == Rejected("shutting-down", RETRY)
    assert bare(desk.arrive("c")) == Rejected("shutting-down", RETRY)
    desk.report(assignment)
    assert states(store, task)[0] == (1, 1, "committed", "")


@pytest.mark.promise("Overload is shed, with the time to come back")
def test_full_queue_is_refused_at_once(desk):
    for _ in range(16):
        desk.driver.submit(CancelWait("s", Future()))
    with pytest.raises(Unavailable, match="too many"):
        desk.driver.submit(CancelWait("s", Future()))


@pytest.mark.parametrize("gone", ["plan", "state"])
def test_a_task_pauses_while_a_blob_is_gone_and_others_run_on(store, register, desk, tmp_path, gone):
    plan = make_plan(weighting="uniform")
    made = make_bundle(tmp_path / "lost", plan, settings={"weighting": "uniform"}, start=START + 1)
    lost, kept = register(made, goal=1, population="tablets"), register(goal=1, rounds=1)
    record = store.task(lost)
    sha256 = {"plan": record.plan_sha256, "state": record.initial.state_sha256}[gone]
    blob = tmp_path / "blobs" / sha256
    data = blob.read_bytes()
    blob.unlink()
    desk.report(*desk.assign("a"))
    assert (store.task(lost).state, store.task(kept).state) == (TaskState.PAUSED, TaskState.COMPLETED)
    assert f"there is no blob {sha256[:12]}" in store.task(lost).reason
    store.resume(lost)
    desk.pass_time(1)
    assert store.task(lost).state is TaskState.PAUSED  # still gone
    blob.write_bytes(data)
    store.resume(lost)
    desk.pass_time(1)
    assert desk.wait("b", population="tablets").result(timeout=0).round == 1


def test_a_state_lost_in_mid_round_pauses_its_task_alone(store, register, desk, tmp_path):
    task, other = register(goal=1, rounds=1), register(goal=1, rounds=1, population="tablets")
    (given,), there = desk.assign("a"), desk.wait("b", population="tablets")
    blob = tmp_path / "blobs" / store.task(task).initial.state_sha256
    data = blob.read_bytes()
    blob.unlink()
    desk.report(given)
    assert states(store, task) == [(1, 1, "abandoned", "blob-unreadable")]
    shown = store.progress_of(task)
    assert (shown.reason, shown.stalled, store.task(task).state) == ("paused-after-failures", True, TaskState.PAUSED)
    assert "the server state before round 1: there is no blob" in shown.sentence
    blob.write_bytes(data)
    store.resume(task)
    desk.pass_time(1)
    desk.report(*desk.assign("c"))
    desk.report(there.result(timeout=0))
    assert {store.task(one).state for one in (task, other)} == {TaskState.COMPLETED}


def test_a_running_round_goes_on_while_its_resumed_task_lacks_a_blob(store, register, desk, tmp_path):
    task = register(goal=1, rounds=1)
    (given,) = desk.assign("a")
    store.pause(task)
    desk.pass_time(1)
    graphs = store.plan(store.task(task).plan_sha256).graphs["onnx"]
    (tmp_path / "blobs" / next(iter(graphs.values())).sha256).unlink()
    store.resume(task)
    desk.pass_time(1)
    desk.pass_time(1)
    assert store.task(task).state is TaskState.PAUSED
    desk.report(given)
    assert states(store, task) == [(1, 1, "committed", "")]
