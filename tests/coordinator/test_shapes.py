"""What operators see of sessions: how many went which way, and nothing of a single device."""

from __future__ import annotations

import sqlalchemy

from coordinator.store.tables import SESSION_SHAPES
from coordinator.submissions import GiveUp, HangUp
from fedcore.wire.messages import Abort


def shapes(store, task):
    return {(bool(one.task), one.shape): one.count for one in store.sessions(task)}


def test_sessions_are_counted_by_what_they_went_through(store, register, desk):
    task = register(goal=1, over_selection=3, rounds=9, min_examples=5)
    for name in "xyz":
        desk.arrive(name, examples={"default": 1})
    desk.turn(HangUp(desk.arrive("left").session))
    reported, gave_up, silent = desk.assign("a", "b", "c")
    desk.driver.fetched(seat(store, task, reported), reported.plan.sha256)
    desk.driver.fetched(seat(store, task, reported), reported.checkpoint.sha256)
    desk.driver.fetched(seat(store, task, gave_up), "0" * 64)
    desk.ask(GiveUp(gave_up.assignment, Abort("conditions")))
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
        (True, "accepted > waited > assigned > expired"): 1,
    }


def seat(store, task, given):
    return next(one.device for one in store.cohort(task, given.round) if one.id == given.assignment)


def test_rejections_are_counted_without_a_transaction_of_their_own_and_survive_one_that_fails(store, register, desk):
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
