"""What operators see of sessions: how many went which way, and nothing of a single device."""

from __future__ import annotations

import sqlalchemy

from coordinator.commands import AbortAssignment, CheckInDevice
from coordinator.rules.selection import Eligibility
from coordinator.store.tables import SESSION_SHAPES
from fedcore.wire.messages import Abort, CheckIn
from tests.coordinator.devices import CAPABILITIES


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
