"""How far apart two participations of a device in a task are."""

from __future__ import annotations

import pytest
import sqlalchemy

from coordinator.rules.selection import Participation, Participations
from coordinator.rules.task_settings import Separation
from fedcore.wire.messages import Accepted
from tests.coordinator.conftest import RETRY


def run(desk, *devices):
    for assignment in desk.assign(*devices):
        desk.report(assignment)


def seated(desk, *devices):
    """Their assignments, in the order of the devices."""
    waiting = [desk.wait(device) for device in devices]
    return [future.result(timeout=0) for future in waiting]


def outcome(answer):
    return "accepted" if isinstance(answer, Accepted) else answer.reason


def test_device_rests_for_the_seconds_that_the_task_asks(register, desk):
    register(goal=1, rounds=9, min_separation_s=100)
    run(desk, "a")
    assert desk.arrive("a").reason == "resting"
    desk.pass_time(99.9)
    assert (outcome(desk.arrive("a")), outcome(desk.arrive("b"))) == ("resting", "accepted")
    desk.pass_time(0.1)
    assert outcome(desk.arrive("a")) == "accepted"


def test_device_rests_for_the_rounds_that_the_task_asks(register, desk):
    register(goal=1, rounds=9, min_separation_rounds=3)
    served = []
    for name in "abcabc":
        assert outcome(desk.arrive(name)) == "accepted"
        (assignment,) = desk.assign(name)
        # Whoever comes now waits for the round after this one.
        assert {outcome(desk.arrive(other)) for other in [*served[-1:], name]} == {"resting"}
        desk.report(assignment)
        served.append(name)


def test_device_behind_a_round_is_not_drawn_for_its_retry_too_soon(register, desk):
    register(goal=1, rounds=9, min_separation_rounds=2)
    run(desk, "d")
    desk.assign("silent")
    resting = desk.wait("d", seconds=2000)
    desk.pass_time(600)
    desk.turn()
    assert not resting.done()  # it may take part in round 3, and this is round 2 again
    (again,) = desk.assign("y")
    assert (again.round, again.attempt) == (2, 2)
    desk.report(again)
    desk.turn()
    assert resting.result(timeout=0).round == 3


def test_device_waiting_for_a_task_is_not_drawn_for_one_it_rests_from(store, register, desk):
    resting = register(goal=1, rounds=9, min_separation_s=1000)
    run(desk, "a")
    register(goal=2, rounds=9)
    desk.pass_time(1)
    waiting = desk.wait("a", seconds=500)
    desk.pass_time(10)
    assert not waiting.done()
    assert [record.number for record in store.rounds(resting)] == [1]


def test_participation_while_its_round_still_runs_counts(register, desk):
    register(goal=2, rounds=9, min_separation_s=1000)
    first, _ = seated(desk, "a", "b")
    desk.report(first)
    assert [outcome(desk.arrive(name)) for name in ("a", "c")] == ["resting", "accepted"]


def test_device_whose_report_was_not_counted_may_come_at_once(register, desk):
    register(goal=2, minimum=1, over_selection=1, rounds=9, min_separation_s=1000)
    first, second = seated(desk, "a", "b")
    desk.give_up(first)
    assert outcome(desk.arrive("a")) == "accepted"
    desk.give_up(second)
    assert [outcome(desk.arrive(name)) for name in ("a", "b")] == ["accepted", "accepted"]


def test_device_that_was_drawn_and_never_reported_rests_too(register, desk):
    register(goal=2, minimum=1, rounds=9, min_separation_s=1000)
    first, _ = seated(desk, "a", "b")
    desk.report(first)
    desk.pass_time(600)
    assert [outcome(desk.arrive(name)) for name in ("a", "b", "c")] == ["resting", "resting", "accepted"]


@pytest.mark.parametrize("asked", [{"min_separation_s": 1000}, {"min_separation_rounds": 3}])
def test_separation_outlives_a_restart(register, new_desk, asked):
    register(goal=2, minimum=1, over_selection=1, rounds=9, **asked)
    desk = new_desk()
    first, second = seated(desk, "a", "b")
    desk.give_up(second)
    desk.report(first)
    after = new_desk()
    assert [outcome(after.arrive(name)) for name in ("a", "b", "c")] == ["resting", "accepted", "accepted"]


def test_rest_from_one_task_is_no_rest_from_another(register, desk):
    resting = register(goal=1, rounds=9, min_separation_s=1000)
    run(desk, "a")
    other = register(goal=1, rounds=9)
    desk.pass_time(1)
    answer = desk.arrive("a")
    assert [offer.task for offer in answer.offers] == [other]
    assert {offer.task for offer in desk.arrive("b").offers} == {resting, other}


def test_resting_device_is_sent_away_without_a_transaction(store, register, desk):
    register(goal=1, rounds=9, min_separation_s=1000)
    run(desk, "a")
    desk.turn()
    with store.database.engine.connect() as observer:
        before = observer.exec_driver_sql("PRAGMA data_version").scalar()
        assert desk.arrive("a").retry == RETRY
        assert observer.exec_driver_sql("PRAGMA data_version").scalar() == before


def test_participations_are_found_by_an_index(store):
    """Among a million assignments those of one task's last rounds are looked up, never searched for."""
    statements = []
    sqlalchemy.event.listen(store.database.engine, "before_cursor_execute", lambda *args: statements.append(args[2:4]))
    with store.database.reading() as records:
        records.cohorts.participations("t", range(5, 9), 1e9)
    text, values = statements[-1]
    with store.database.engine.connect() as connection:
        plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values)]
    assert any("SEARCH assignments USING" in step for step in plan)
    assert not any(step.startswith("SCAN") for step in plan)


def test_what_is_kept_in_memory_is_only_who_still_rests():
    known = [Participation(f"d{number}", 0.0, number) for number in range(1, 8)]
    apart = Participations(Separation(seconds=0, rounds=3), 7, known)
    apart.add(["x"], 5.0)
    apart.end(6.0, committed=True)
    assert [name for name in ("d6", "d7", "x", "d5") if apart.is_resting(name, 7.0)] == ["d7", "x"]
    assert len(apart._last) == 2
