"""The reports of one turn: written together, and as if they had come one after the other."""

from __future__ import annotations

import queue
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import sqlalchemy

from coordinator.commands import AbortAssignment, AwaitAssignment, CancelWait, CountReport, Inbox
from coordinator.errors import ConflictingReport, NoLongerNeeded, UnknownAssignment
from coordinator.rules.states import AssignmentState
from coordinator.store.tables import ROUNDS
from fedcore.wire.messages import Abort
from tests.coordinator.bundles import START, report_vector
from tests.coordinator.conftest import states
from tests.coordinator.test_driver import transitions

pytestmark = pytest.mark.every_engine


def report_of(assignment, delta=(0, 0, 0, 0), sha256="1" * 64):
    return CountReport(assignment.assignment, sha256, report_vector(delta, 1))


def test_a_turn_takes_as_many_statements_for_eight_reports_as_for_two(store, register, desk):
    register(goal=12, rounds=1)
    given, statements = desk.assign(*"abcdefghijkl"), []
    sqlalchemy.event.listen(store.database.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    counts = []
    for part in (given[:1], given[1:3], given[3:11]):
        statements.clear()
        answers = desk.turn(*map(report_of, part))
        assert [one.result(timeout=0).assignment for one in answers] == [one.assignment for one in part]
        counts.append(len(statements))
    assert counts[1] == counts[2]  # from the second turn on, each also adds the counts of sessions


@pytest.mark.security("A report is counted once or refused with a reason")
def test_what_a_turn_brings_is_counted_in_its_order(store, register, desk):
    task = register(goal=3, over_selection=2, rounds=1)
    a, b, c, d, e, _ = desk.assign(*"abcdef")
    stranger = CountReport("nobody", "1" * 64, report_vector([9, 9, 9, 9], 1))
    answers = desk.turn(
        report_of(a, [3, 0, 0, 0]),
        stranger,
        AbortAssignment(b.assignment, Abort("runtime-failed")),
        report_of(b, [9, 9, 9, 9]),
        report_of(c, [0, 3, 0, 0]),
        report_of(a, [3, 0, 0, 0]),
        report_of(a, [9, 9, 9, 9], "2" * 64),
        report_of(d, [0, 0, 3, 0]),
        report_of(e, [9, 9, 9, 9]),
    )
    kinds = [type(one.exception(timeout=0)) if one.exception(timeout=0) else None for one in answers]
    late = NoLongerNeeded
    assert kinds == [None, UnknownAssignment, None, late, None, None, ConflictingReport, None, late]
    assert answers[0].result() == answers[5].result()
    ended = ["reported", "aborted", "reported", "reported", "not-needed", "not-needed"]
    assert [seat.state.value for seat in store.cohort(task, 1)] == ended
    record = store.rounds(task)[0]
    assert (record.reported, record.aborted, states(store, task)) == (3, 1, [(1, 1, "committed", "")])
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START + np.array([1, 1, 1, 0]))
    moves = [cause for _, _, to, cause in transitions(store, "assignment") if to == AssignmentState.REPORTED]
    assert moves == ["report accepted"] * 3


def test_rows_say_how_many_reports_a_round_has_while_it_waits_for_more(store, register, desk):
    register(goal=4, rounds=1)
    given = desk.assign(*"abcd")
    desk.turn(*map(report_of, given[:3]))
    with store.database.engine.connect() as connection:
        assert connection.scalar(sqlalchemy.select(ROUNDS.c.reported)) == 3


def test_reports_and_other_requests_share_a_turn_and_a_limit():
    inbox = Inbox(4)
    first = inbox.put(CountReport("a", "1" * 64, report_vector([0, 0, 0, 0], 1)))
    second = inbox.put(CountReport("b", "1" * 64, report_vector([0, 0, 0, 0], 1)))
    hangs_up = inbox.put(CancelWait("s", Future()))
    inbox.put(AwaitAssignment("s", "d", 0)).cancel()
    with pytest.raises(queue.Full):
        inbox.put(CancelWait("s", Future()))
    assert [one.future for one in inbox.take(2, 60.0)] == [first, hangs_up]
    assert [one.future for one in inbox.take(2, 60.0)] == [second]
    assert len(inbox) == 0


@pytest.mark.parametrize("asleep", [False, True])
def test_a_report_wakes_only_a_driver_that_sleeps(asleep):
    inbox, report = Inbox(4), CountReport("a", "1" * 64, report_vector([0, 0, 0, 0], 1))
    with ThreadPoolExecutor(1) as driver:
        taken = driver.submit(inbox.take, 2, 600.0, asleep=asleep)
        while inbox._asleep != asleep or not taken.running():
            time.sleep(0.001)
        counted = inbox.put(report)
        if not asleep:
            with pytest.raises(TimeoutError):
                taken.result(0.1)
            inbox.wake()
        assert [one.future for one in taken.result(60)] == [counted]
    assert len(inbox) == 0
