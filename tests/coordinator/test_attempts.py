"""Attempts at rounds, and what devices' visits are counted as."""

from __future__ import annotations

import numpy as np
import pytest
import sqlalchemy

from coordinator.commands import AbortAssignment, CheckInDevice
from coordinator.driver.writing.transaction import Transaction
from coordinator.rules.selection import Eligibility
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import Secagg
from coordinator.store.tables import SESSION_SHAPES
from fedcore.wire.messages import Abort, CheckIn
from tests.coordinator.bundles import START
from tests.coordinator.conftest import states
from tests.coordinator.devices import CAPABILITIES

every_engine = pytest.mark.every_engine


def test_next_round_collects_devices_while_one_reports(store, register, desk):
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


@every_engine
def test_round_behind_an_abandoned_one_becomes_its_next_attempt(store, register, desk):
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


def test_selection_timed_out_behind_a_round_takes_who_is_there(store, register, desk):
    register(goal=4, minimum=2, selection_timeout_s=60, rounds=3)
    first = desk.assign("a", "b", "c", "d")
    waiting = [desk.wait(name, seconds=1000) for name in ("e", "f", "g")]
    desk.pass_time(61)
    for assignment in first:
        desk.report(assignment)
    desk.turn()
    assert {future.result(timeout=0).round for future in waiting} == {2}


def test_selection_with_too_few_behind_a_round_has_its_whole_timeout(store, register, desk):
    register(goal=2, selection_timeout_s=60, rounds=3)
    first = desk.assign("a", "b")
    early = desk.wait("c", seconds=1000)
    desk.pass_time(100)
    for assignment in first:
        desk.report(assignment)
    desk.pass_time(59)
    late = desk.wait("d")
    assert {early.result(timeout=0).round, late.result(timeout=0).round} == {2}


@every_engine
def test_cancelling_ends_the_round_that_runs_and_the_one_behind_it(store, register, desk):
    task = register(goal=1)
    desk.assign("a")
    desk.wait("b")
    store.cancel(task)
    desk.pass_time(0.3)
    assert {row[2:] for row in states(store, task)} == {("abandoned", "cancelled")}
    assert len(states(store, task)) == 2


def test_device_of_a_running_round_is_not_drawn_again_meanwhile(store, register, desk):
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


@every_engine
def test_failing_attempts_slow_down_and_then_pause_the_task(store, register, desk):
    task = register(goal=1, max_attempts=4)
    fail(desk, "a")
    fail(desk, "b")
    for device, pause in (("c", 15), ("d", 30)):
        waiting = desk.wait(device, seconds=100)
        desk.pass_time(pause - 0.1)
        assert not waiting.done()
        desk.pass_time(0.1)
        desk.give_up(waiting.result(timeout=0))
    paused = store.task(task)
    assert (paused.state, len(store.rounds(task))) == (TaskState.PAUSED, 4)
    assert "round 1 failed 4 times in a row, at last with too-few-reports" in paused.reason
    desk.pass_time(1)
    assert desk.arrive("a").reason == "no-task"


@every_engine
def test_task_paused_by_its_last_failure_draws_nobody_behind_it(store, register, desk):
    task = register(goal=1, max_attempts=1)
    (only,) = desk.assign("a")
    waiting = desk.wait("b", seconds=1000)
    desk.give_up(only)
    desk.turn()
    assert not waiting.done()
    assert states(store, task) == [(1, 1, "abandoned", "too-few-reports"), (2, 1, "abandoned", "paused")]


@every_engine
@pytest.mark.parametrize(("end", "reason"), [("pause", "paused"), ("cancel", "cancelled")])
def test_nobody_is_drawn_for_a_task_just_paused_or_cancelled(store, register, desk, end, reason):
    task = register(goal=1)
    (running,) = desk.assign("a")
    waiting = desk.wait("b", seconds=1000)
    getattr(store, end)(task)
    desk.give_up(running)
    desk.turn()
    assert not waiting.done()
    assert states(store, task)[-1] == (2, 1, "abandoned", reason)


@every_engine
def test_operator_who_resumes_a_failing_task_gets_all_attempts_again(store, register, desk):
    task = register(goal=1, max_attempts=2)
    fail(desk, "a")
    fail(desk, "b")
    store.resume(task)
    desk.pass_time(60)
    fail(desk, "c")
    assert store.task(task).state is TaskState.ACTIVE
    fail(desk, "d")
    assert store.task(task).state is TaskState.PAUSED


@every_engine
def test_lack_of_devices_and_restarts_never_pause_a_task(store, register, new_desk):
    task = register(goal=2, max_attempts=1, selection_timeout_s=5)
    for _ in range(2):
        desk = new_desk()
        for _ in range(3):
            desk.wait("a")
            desk.pass_time(5)
    assert store.task(task).state is TaskState.ACTIVE
    assert {row[3] for row in states(store, task)} == {"too-few-devices", "driver-lost", ""}


@pytest.mark.parametrize("kind", [{}, {"goal": 8, "secagg": Secagg(phase_s=1e-20)}])
def test_a_deadline_too_short_for_the_clock_stops_no_other_task(store, register, desk, kind):
    hasty = register(**{"goal": 1, "rounds": 9, "population": "hasty", "reporting_deadline_s": 1e-18} | kind)
    register(goal=1)
    desk.now = 1000.0
    for name in "abcdefgh":
        desk.wait(name, population="hasty", seconds=1e9)
    other = desk.wait("p", seconds=1e9)
    desk.live(60)
    assert other.result(timeout=0).round == 1
    assert states(store, hasty)[:1] == [(1, 1, "abandoned", "too-few-reports")]


@every_engine
def test_a_task_that_cannot_go_on_stops_no_other_one(store, register, desk, monkeypatch):
    def advance(self, task_id, task):
        if task_id == broken:
            tries.append(desk.now)
            raise KeyError(task_id)
        return advanced(self, task_id, task)

    advanced, tries = Transaction.advance, []
    broken = register(goal=1, population="broken")
    other = register(goal=1)
    monkeypatch.setattr(Transaction, "advance", advance)
    desk.now = 1000.0
    desk.wait("a", population="broken", seconds=1e9)
    device = desk.wait("b", seconds=1e9)
    desk.live(10)
    assert device.result(timeout=0).task == other
    desk.live(120)
    assert len(tries) == 1 + (desk.now - tries[0]) // 60  # once a minute


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_task_whose_transaction_lost_its_connection_does_not_rest(register, desk, monkeypatch):
    def advance(self, task_id, task):
        if not broken:
            broken.append(desk.now)
            self._records._connection.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")
        return advanced(self, task_id, task)

    advanced, broken = Transaction.advance, []
    register(goal=1)
    monkeypatch.setattr(Transaction, "advance", advance)
    device = desk.wait("a", seconds=1e9)
    desk.live(5)
    assert broken
    assert device.result(timeout=0).round == 1


def shapes(store, task):
    return {(bool(one.task), one.shape): one.count for one in store.sessions(task)}


def test_sessions_are_counted_by_what_they_went_through(store, register, desk):
    task = register(goal=1, over_selection=3, rounds=9, min_examples=5)
    for name in "xyz":
        desk.arrive(name, examples={"default": 1})
    desk.arrive("left")
    reported, gave_up, silent = desk.assign("a", "b", "c")
    desk.driver.fetched(seat(store, task, reported), reported.plan.sha256)
    desk.driver.fetched(seat(store, task, reported), reported.checkpoint.sha256)
    desk.driver.fetched(seat(store, task, gave_up), "0" * 64)
    desk.ask(AbortAssignment(gave_up.assignment, Abort("conditions")))
    desk.report(reported)
    desk.pass_time(61)
    desk.assign("d", "e", "f")
    desk.turn()
    assert silent.slot in (0, 1, 2)
    assert shapes(store, task) == {
        (False, "rejected: not-eligible"): 3,
        (False, "accepted > left"): 1,
        (True, "accepted > waited > assigned > fetched plan > fetched checkpoint > reported"): 1,
        (True, "accepted > waited > assigned > aborted: conditions"): 1,
        (True, "accepted > waited > assigned > not needed"): 1,
    }


def seat(store, task, given):
    return next(one.device for one in store.cohort(task, given.round) if one.id == given.assignment)


def test_device_back_during_its_round_is_counted_by_its_assignment(store, register, desk):
    task = register(goal=3, rounds=9)
    by_device = {seat(store, task, given): given for given in desk.assign("a", "b", "c")}
    desk.report(by_device["a"])
    for name in "ab":  # "a" for the next round, "b" because it restarted
        desk.arrive(name)
    desk.driver.fetched("b", by_device["b"].plan.sha256)
    desk.report(by_device["b"])
    desk.pass_time(600)
    desk.pass_time(60)
    assert shapes(store, task) == {
        (True, "accepted > waited > assigned > reported"): 1,
        (True, "accepted > waited > assigned > fetched plan > reported"): 1,
        (True, "accepted > waited > assigned > expired"): 1,
        (False, "accepted > left"): 2,
    }


def test_device_in_two_populations_at_once_is_counted_in_each(store, register, desk):
    tasks = {name: register(population=name, goal=2, rounds=9) for name in ("phones", "tablets")}
    given = {}
    for name in tasks:
        waiting = [desk.wait(device, population=name) for device in ("a", name)]
        given[name] = [future.result(timeout=0) for future in waiting]
    desk.driver.fetched("a", given["phones"][0].plan.sha256)
    for name in tasks:
        for assignment in given[name]:
            desk.report(assignment)
    desk.pass_time(60)
    for task in tasks.values():
        assert shapes(store, task) == {
            (True, "accepted > waited > assigned > fetched plan > reported"): 1,
            (True, "accepted > waited > assigned > reported"): 1,
        }


def test_counts_of_a_quiet_coordinator_are_written_after_a_minute(store, register, desk):
    task = register(min_examples=50)
    desk.arrive("a")
    desk.pass_time(60)
    assert shapes(store, task) == {(False, "rejected: not-eligible"): 1}


def test_a_clean_stop_loses_no_count(store, register, desk):
    task = register(min_examples=5, goal=1, rounds=9)
    desk.assign("at work")
    desk.wait("b")
    desk.driver.start()
    message = CheckIn(capabilities=CAPABILITIES, examples={})
    desk.driver.submit(CheckInDevice("phones", "a", Eligibility.of("a", message))).result(timeout=10)
    desk.driver.stop()
    assert shapes(store, task) == {
        (True, "accepted > waited > assigned > not needed"): 1,
        (False, "accepted > waited > rejected: shutting-down"): 1,
        (False, "rejected: not-eligible"): 1,
    }


def test_rejections_are_counted_in_other_transactions_and_not_lost(store, register, desk):
    task = register(min_examples=50, goal=1, rounds=9)
    with store.database.engine.connect() as observer:
        before = observer.exec_driver_sql("PRAGMA data_version").scalar()
        for _ in range(5):
            desk.arrive("a")
            desk.pass_time(1)
        assert observer.exec_driver_sql("PRAGMA data_version").scalar() == before
    assert store.sessions(task) == []

    def fail(connection):
        raise sqlalchemy.exc.OperationalError("COMMIT", {}, Exception("disk is full"))

    sqlalchemy.event.listen(store.database.engine, "commit", fail)
    waiting = desk.wait("b", examples={"default": 50})
    sqlalchemy.event.remove(store.database.engine, "commit", fail)
    desk.pass_time(2)
    desk.pass_time(2)
    assert waiting.done()
    assert shapes(store, task)[False, "rejected: not-eligible"] == 5


def test_table_of_shapes_has_no_column_for_a_device():
    assert set(SESSION_SHAPES.c.keys()) == {"population", "task", "shape", "count"}
