from __future__ import annotations

import random
from concurrent.futures import Future

import numpy as np
import pytest
import sqlalchemy

from coordinator.eligibility import OnDevice, Requires
from coordinator.errors import (
    ConflictingReport,
    NoLongerNeeded,
    Unavailable,
    UnknownAssignment,
    UnknownPopulation,
    UnknownSession,
)
from coordinator.rounds import AssignmentState, RoundState, TaskState
from coordinator.store.tables import ROUNDS, TRANSITIONS
from coordinator.submissions import Arrive, GiveUp, HangUp, Report, Wait
from fedcore.signing import SigningKey, verify
from fedcore.wire.messages import Abort, Accepted, CheckIn, Offer, Rejected, StatedConditions
from tests.coordinator.bundles import START, make_bundle, make_plan, report_vector
from tests.coordinator.conftest import CAPABILITIES, RETRY

pytestmark = pytest.mark.every_engine


def states(store, task):
    return [(r.number, r.attempt, r.state.value, r.reason) for r in store.rounds(task)]


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


def test_server_state_is_carried_between_rounds(store, register, desk, tmp_path):
    task = register(make_bundle(tmp_path / "adam", algorithm="fedadam", settings={"server_lr": 1.0}), goal=1)
    for _ in range(2):
        desk.report(*desk.assign("a"), delta=[1, 1, 1, 1])
    m, v, expected = 0.0, 1e-6, START.astype(np.float64)
    for _ in range(2):
        m, v = np.float32(0.9 * m + 0.1), np.float32(0.99 * v + 0.01)
        expected = (expected + m / (np.sqrt(np.float64(v)) + 1e-3)).astype(np.float32)
    np.testing.assert_allclose(store.checkpoint(task)["params"], expected, rtol=1e-6)


def writes(observer):
    """A number that grows with every transaction of another connection that writes."""
    sqlite = observer.dialect.name == "sqlite"
    query = "PRAGMA data_version" if sqlite else "SELECT pg_snapshot_xmax(pg_current_snapshot())"
    value = observer.exec_driver_sql(query).scalar()
    observer.rollback()  # within one transaction an SQLite reader sees nothing of later ones
    return value


def test_idle_task_and_rejected_check_ins_write_nothing(store, register, desk):
    task = register(min_examples=50)
    with store.database.engine.connect() as observer:
        desk.pass_time(1)
        before = writes(observer)
        assert desk.arrive("a") == Rejected("not-eligible", RETRY)
        assert desk.arrive("a", formats=("other",)) == Rejected("not-eligible", RETRY)
        enough = {"default": 50}
        assert desk.arrive("a", formats=("other",), examples=enough).reason == "unsupported-format"
        desk.pass_time(50)
        assert writes(observer) == before
        assert desk.arrive("a", examples=enough).session
        desk.wait("b", examples=enough)
        assert writes(observer) > before
    assert store.rounds(task)[0].number == 1


def test_device_that_lacks_only_a_format_is_told_which_ones_would_get_it_work(store, register, desk, tmp_path):
    register(make_bundle(tmp_path / "both", plan=make_plan(formats=("onnx", "executorch"))), formats=("executorch",))
    large = register(make_bundle(tmp_path / "other", plan=make_plan(formats=("coreml",))), formats=("coreml",))
    unsupported = Rejected("unsupported-format", RETRY, ("coreml", "executorch", "onnx"))
    assert desk.arrive("a", formats=("tflite",)) == unsupported
    assert isinstance(desk.arrive("a", formats=("tflite", "executorch")), Accepted)
    store.pause(large)
    desk.pass_time(1)
    assert desk.arrive("a", formats=("tflite",)).formats == ("executorch", "onnx")
    assert desk.arrive("a", formats=("tflite",), examples={"default": 0}) == Rejected("not-eligible", RETRY)


def test_device_is_offered_the_tasks_whose_rules_it_meets_with_what_it_checks_alone(register, desk):
    alone = OnDevice(charging=True, min_examples=3, max_example_age_s=60)
    asking = register(on_device=alone)
    register(requires=Requires(unmetered=True))
    (offer,) = desk.arrive("a").offers
    wanted = Offer(task=asking, collection="default", charging=True, min_examples=3, max_example_age_s=60)
    assert offer == wanted
    assert len(desk.arrive("a", conditions=StatedConditions(unmetered=True)).offers) == 2


def test_device_that_does_not_say_what_a_rule_wants_is_not_eligible(register, desk):
    register(requires=Requires(charging=True))
    assert desk.arrive("a") == Rejected("not-eligible", RETRY)
    assert desk.arrive("a", conditions=StatedConditions(charging=False)) == Rejected("not-eligible", RETRY)
    assert isinstance(desk.arrive("a", conditions=StatedConditions(charging=True)), Accepted)


def test_device_is_drawn_for_no_task_that_it_is_not_willing_for(store, register, desk):
    unwanted, wanted = register(goal=1), register(goal=1)
    (waiting,) = desk.turn(Wait(desk.arrive("a").session, "a", 10, frozenset({wanted})))
    assert waiting.result(timeout=0).task == wanted
    (nowhere,) = desk.turn(Wait(desk.arrive("b").session, "b", 10, frozenset({"another"})))
    assert not nowhere.done()
    assert store.rounds(unwanted) == []


def test_check_in_to_an_unknown_population_is_refused_until_it_exists(store, register, desk):
    with pytest.raises(UnknownPopulation, match="phones"):
        desk.arrive("a")
    task = register(goal=1)
    assert isinstance(desk.arrive("a"), Accepted)
    store.cancel(task)
    desk.pass_time(0.3)
    assert desk.arrive("a") == Rejected("no-task", RETRY)


def test_check_ins_to_unknown_populations_cost_one_look_up_a_turn(store, desk):
    statements = []
    for engine in (store.database.engine, store.database._engines.writer):
        sqlalchemy.event.listen(engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    message = CheckIn(capabilities=CAPABILITIES, examples={})
    answers = desk.turn(*(Arrive(f"made up {number}", "a", message) for number in range(16)))
    assert all(isinstance(one.exception(timeout=0), UnknownPopulation) for one in answers)
    assert len([text for text in statements if "SELECT" in text]) == 1


def test_device_is_answered_from_memory_while_the_database_cannot_be_read(store, register, desk, monkeypatch):
    register(goal=2)
    desk.turn()
    waiting = desk.wait("a", seconds=5)

    def unreadable():
        raise sqlalchemy.exc.OperationalError("SELECT", {}, Exception("the server closed the connection"))

    with monkeypatch.context() as patch:
        patch.setattr(store.database, "reading", unreadable)
        desk.pass_time(1)
        assert isinstance(desk.arrive("b"), Accepted)
        desk.pass_time(5)
        assert waiting.result(timeout=0).reason == "not-selected"
    desk.pass_time(1)
    assert {assignment.round for assignment in desk.assign("a", "b")} == {1}


def test_wait_that_runs_out_is_answered_and_ends_the_session(register, desk):
    register()
    session = desk.arrive("a").session
    (answer,) = desk.turn(Wait(session, "a", 5))
    assert not answer.done()
    desk.pass_time(5)
    assert answer.result(timeout=0) == Rejected("not-selected", RETRY)
    with pytest.raises(UnknownSession):
        desk.ask(Wait(session, "a", 5))


def test_newer_visit_of_a_device_supersedes_the_older(store, register, desk):
    task = register(goal=1, minimum=1, over_selection=2, selection_timeout_s=3)
    older, newer = desk.wait("a"), desk.wait("a")
    assert older.result(timeout=0) == Rejected("superseded", RETRY)
    desk.pass_time(3)
    assert newer.result(timeout=0).slot == 0
    assert [seat.device for seat in store.cohort(task, 1)] == ["a"]


def test_device_that_hung_up_is_not_selected_and_may_wait_again(register, desk):
    register(goal=2)
    session = desk.arrive("a").session
    (gone,) = desk.turn(Wait(session, "a", 10))
    desk.ask(HangUp(session, gone))
    other = desk.wait("b")
    assert not other.done()
    (again,) = desk.turn(Wait(session, "a", 10))
    assert {again.result(timeout=0).slot, other.result(timeout=0).slot} == {0, 1}


def test_whoever_hangs_up_on_a_refused_wait_ends_no_other(register, desk):
    register(goal=2)
    session = desk.arrive("a").session
    (waiting,) = desk.turn(Wait(session, "a", 10))
    for device in ("b", "a"):  # another device that knows the session's id; its owner, on a second connection
        (refused,) = desk.turn(Wait(session, device, 10))
        assert refused.exception(timeout=0) is not None
        desk.ask(HangUp(session, refused))
    desk.wait("c")
    assert waiting.result(timeout=0).round == 1


def test_lost_assignment_is_told_again_with_the_time_that_is_left(register, desk):
    register(goal=1, reporting_deadline_s=60)
    session = desk.arrive("a").session
    first = desk.ask(Wait(session, "a", 1))
    desk.pass_time(20)
    again = desk.ask(Wait(session, "a", 1))
    assert (again.assignment, first.report_within_s, again.report_within_s) == (first.assignment, 60, 40)


def test_next_round_collects_devices_while_one_reports_and_starts_when_it_commits(store, register, desk):
    task = register(goal=1)
    (running,) = desk.assign("a")
    pipelined = desk.wait("b", seconds=1000)
    desk.pass_time(500)
    assert not pipelined.done()
    assert states(store, task) == [(1, 1, "reporting", ""), (2, 1, "selecting", "")]
    desk.report(running, [1, 0, 0, 0])
    desk.turn()
    assert (pipelined.result(timeout=0).round, pipelined.result(timeout=0).attempt) == (2, 1)
    assert pipelined.result(timeout=0).checkpoint.sha256 == store.rounds(task)[0].checkpoint_sha256
    assert store.rounds(task)[0].seconds is not None


def test_round_that_waited_behind_an_abandoned_one_becomes_its_next_attempt(store, register, desk):
    task = register(goal=1, rounds=3)
    (first,) = desk.assign("a")
    waiting = desk.wait("b", seconds=1000)
    desk.pass_time(600)
    desk.turn()
    again = waiting.result(timeout=0)
    assert (again.round, again.attempt, again.checkpoint) == (1, 2, first.checkpoint)
    desk.report(again, [0, 1, 0, 0])
    (third,) = desk.assign("c")
    desk.report(third)
    assert states(store, task) == [
        (1, 1, "abandoned", "too-few-reports"),
        (1, 2, "committed", ""),
        (2, 1, "committed", ""),
    ]
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([0, 1, 0, 0]))


def test_nobody_waits_for_a_round_after_the_last(store, register, desk):
    task = register(goal=1, rounds=1)
    (running,) = desk.assign("a")
    waiting = desk.wait("b")
    assert states(store, task) == [(1, 1, "reporting", "")]
    desk.report(running)
    desk.turn()
    assert waiting.result(timeout=0).reason == "no-task"
    assert states(store, task) == [(1, 1, "committed", "")]


def test_selection_that_outlasted_its_timeout_behind_a_round_takes_who_is_there(store, register, desk):
    register(goal=4, minimum=2, selection_timeout_s=60, rounds=3)
    first = desk.assign("a", "b", "c", "d")
    waiting = [desk.wait(name, seconds=1000) for name in ("e", "f", "g")]
    desk.pass_time(61)
    for assignment in first:
        desk.report(assignment)
    desk.turn()
    assert {future.result(timeout=0).round for future in waiting} == {2}


def test_selection_with_too_few_behind_a_round_has_its_whole_timeout_when_it_may_begin(store, register, desk):
    register(goal=2, selection_timeout_s=60, rounds=3)
    first = desk.assign("a", "b")
    early = desk.wait("c", seconds=1000)
    desk.pass_time(100)
    for assignment in first:
        desk.report(assignment)
    desk.pass_time(59)
    late = desk.wait("d")
    assert {early.result(timeout=0).round, late.result(timeout=0).round} == {2}


def test_cancelling_ends_the_round_that_runs_and_the_one_behind_it(store, register, desk):
    task = register(goal=1)
    desk.assign("a")
    desk.wait("b")
    store.cancel(task)
    desk.pass_time(0.3)
    assert {row[2:] for row in states(store, task)} == {("abandoned", "cancelled")}
    assert len(states(store, task)) == 2


def test_device_of_the_running_round_is_not_drawn_again_before_it_reports_or_is_let_go(store, register, desk):
    register(goal=1, over_selection=2, rounds=9)
    register(goal=1, over_selection=2, rounds=9)
    first = desk.assign("a", "b")
    again = [desk.wait(name, seconds=1000) for name in ("a", "b")]
    assert not any(future.done() for future in again)
    desk.give_up(first[0])
    assert not any(future.done() for future in again)
    desk.report(first[1])
    desk.turn()
    assert all(future.done() for future in again)


def fail(desk, *devices):
    for assignment in desk.assign(*devices):
        desk.give_up(assignment)


def test_failing_attempts_come_ever_slower_and_then_the_task_is_paused_with_a_reason(store, register, desk):
    task = register(goal=1, max_attempts=4)
    fail(desk, "a")
    fail(desk, "a")
    for pause in (15, 30):
        waiting = desk.wait("a", seconds=100)
        desk.pass_time(pause - 0.1)
        assert not waiting.done()
        desk.pass_time(0.1)
        desk.give_up(waiting.result(timeout=0))
    paused = store.task(task)
    assert (paused.state, len(store.rounds(task))) == (TaskState.PAUSED, 4)
    assert "round 1 failed 4 times in a row, at last with too-few-reports" in paused.reason
    desk.pass_time(1)
    assert desk.arrive("a").reason == "no-task"


def test_task_that_its_last_allowed_failure_pauses_draws_nobody_for_the_round_behind(store, register, desk):
    task = register(goal=1, max_attempts=1)
    (only,) = desk.assign("a")
    waiting = desk.wait("b", seconds=1000)
    desk.give_up(only)
    desk.turn()
    assert not waiting.done()
    assert states(store, task) == [(1, 1, "abandoned", "too-few-reports"), (2, 1, "abandoned", "paused")]


@pytest.mark.parametrize(("end", "reason"), [("pause", "paused"), ("cancel", "cancelled")])
def test_nobody_is_drawn_for_a_task_that_was_paused_or_cancelled_since_the_last_look(
    store, register, desk, end, reason
):
    task = register(goal=1)
    (running,) = desk.assign("a")
    waiting = desk.wait("b", seconds=1000)
    getattr(store, end)(task)
    desk.give_up(running)
    desk.turn()
    assert not waiting.done()
    assert states(store, task)[-1] == (2, 1, "abandoned", reason)


def test_operator_who_resumes_a_failing_task_gets_all_attempts_again(store, register, desk):
    task = register(goal=1, max_attempts=2)
    fail(desk, "a")
    fail(desk, "a")
    store.resume(task)
    desk.pass_time(60)
    fail(desk, "a")
    assert store.task(task).state is TaskState.ACTIVE
    fail(desk, "a")
    assert store.task(task).state is TaskState.PAUSED


def test_lack_of_devices_and_restarts_never_pause_a_task(store, register, new_desk):
    task = register(goal=2, max_attempts=1, selection_timeout_s=5)
    for _ in range(2):
        desk = new_desk()
        for _ in range(3):
            desk.wait("a")
            desk.pass_time(5)
    assert store.task(task).state is TaskState.ACTIVE
    assert {row[3] for row in states(store, task)} == {"too-few-devices", "driver-lost", ""}


def test_same_source_draws_the_same_cohorts(register, store, new_desk):
    register(goal=2, over_selection=1, rounds=99, selection_timeout_s=3, minimum=2)
    drawn = []
    for _ in range(2):
        desk = new_desk(random.Random(5))
        waiting = {name: desk.wait(name) for name in "ab"}
        drawn.append({name: future.result(timeout=0).slot for name, future in waiting.items()})
    assert drawn[0] == drawn[1]


def test_selection_timeout_with_too_few_is_tried_again_as_the_next_attempt(store, register, desk):
    task = register(goal=2, selection_timeout_s=5)
    alone = desk.wait("a")
    desk.pass_time(5)
    assert alone.result(timeout=0) == Rejected("not-selected", RETRY)
    assert [a.attempt for a in desk.assign("a", "b")] == [2, 2]
    assert states(store, task) == [(1, 1, "abandoned", "too-few-devices"), (1, 2, "reporting", "")]


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
    for assignment in desk.assign("a", "b"):
        assert assignment.attempt == 2
        desk.report(assignment, [0, 0, 0, 4])
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([0, 0, 0, 4]))
    assert states(store, task) == [(1, 1, "abandoned", "too-few-reports"), (1, 2, "committed", "")]


def test_report_beyond_the_goal_is_refused(store, register, desk):
    task = register(goal=1, over_selection=2)
    first, second = desk.assign("a", "b")
    one = Report(first.assignment, "1" * 64, report_vector([1, 0, 0, 0], 1))
    two = Report(second.assignment, "2" * 64, report_vector([5, 0, 0, 0], 1))
    taken, refused = desk.turn(one, two)
    assert taken.result(timeout=0).sha256 == "1" * 64
    assert isinstance(refused.exception(timeout=0), NoLongerNeeded)
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([1, 0, 0, 0]))


def test_replayed_report_counts_once_and_another_one_conflicts(store, register, desk):
    task = register(goal=2)
    first, second = desk.assign("a", "b")
    one = Report(first.assignment, "1" * 64, report_vector([8, 0, 0, 0], 1))
    receipts = [future.result(timeout=0) for future in desk.turn(one, one)] + [desk.ask(one)]
    assert receipts == [receipts[0]] * 3
    with pytest.raises(ConflictingReport, match="111111111111"):
        desk.ask(Report(first.assignment, "2" * 64, one.vector))
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
        desk.ask(GiveUp(assignment.assignment, Abort(reason)))
    again = desk.assign("a", "b", "c")
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
    for request in (Report("nobody", "1" * 64, vector), GiveUp("nobody", Abort("runtime-failed"))):
        with pytest.raises(UnknownAssignment):
            desk.ask(request)


def test_restart_abandons_the_running_round_and_runs_it_again_from_the_same_model(store, register, new_desk):
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
    assert desk.arrive("c") == Rejected("no-task", RETRY)
    desk.report(running)
    desk.pass_time(0.3)
    assert waiting.result(timeout=0) == Rejected("no-task", RETRY)
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


def test_model_that_is_no_longer_finite_fails_the_task_and_says_so(store, register, desk, tmp_path):
    bundle = make_bundle(tmp_path / "huge", start=np.full(4, 3e38, np.float32))
    task = register(bundle, goal=1)
    desk.report(*desk.assign("a"), delta=[3e38, 0, 0, 0])
    failed = store.task(task)
    assert (failed.state, states(store, task)) == (TaskState.FAILED, [(1, 1, "abandoned", "non-finite-state")])
    assert "'params'" in failed.reason
    np.testing.assert_array_equal(store.checkpoint(task)["params"], np.full(4, 3e38, np.float32))


def test_sum_without_weight_abandons_the_round_only(store, register, desk):
    task = register(goal=1)
    desk.report(*desk.assign("a"), weight=0.0)
    assert states(store, task) == [(1, 1, "abandoned", "invalid-aggregate")]
    assert store.task(task).state is TaskState.ACTIVE


@pytest.fixture
def failing_commit(store):
    """While `failing` is set, COMMIT raises, as on a full disk."""
    switch = {"failing": False}

    def fail(_):
        if switch["failing"]:
            raise sqlalchemy.exc.OperationalError("COMMIT", {}, Exception("database or disk is full"))

    sqlalchemy.event.listen(store.database._engines.writer, "commit", fail)
    return switch


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


def test_round_that_could_not_be_committed_keeps_its_sum_and_is_committed_later(store, register, desk, monkeypatch):
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


def test_another_coordinator_on_the_same_store_is_noticed_and_counts_nothing(store, register, new_desk):
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
        (second.assignment, "assigned", "expired"),
    }


def test_draining_sends_devices_away_and_still_takes_reports(store, register, desk):
    task = register(goal=1)
    (assignment,) = desk.assign("a")
    waiting = desk.wait("b")
    desk.driver.drain()
    desk.turn()
    assert waiting.result(timeout=0) == Rejected("shutting-down", RETRY)
    assert desk.arrive("c") == Rejected("shutting-down", RETRY)
    desk.report(assignment)
    assert states(store, task)[0] == (1, 1, "committed", "")


def test_full_queue_is_refused_at_once(desk):
    for _ in range(16):
        desk.driver.submit(HangUp("s", Future()))
    with pytest.raises(Unavailable, match="too many"):
        desk.driver.submit(HangUp("s", Future()))


def test_task_whose_plan_is_gone_fails_and_the_others_run_on(store, register, desk, tmp_path):
    lost = register(
        make_bundle(tmp_path / "lost", plan=make_plan(weighting="uniform"), settings={"weighting": "uniform"})
    )
    kept = register(goal=1, rounds=1)
    (tmp_path / "blobs" / store.task(lost).plan_sha256).unlink()
    desk.report(*desk.assign("a"))
    assert (store.task(lost).state, store.task(kept).state) == (TaskState.FAILED, TaskState.COMPLETED)
    assert "there is no blob" in store.task(lost).reason
