from __future__ import annotations

import pytest

from coordinator.errors import NoLongerNeeded, Unavailable
from coordinator.rules.states import RoundState
from tests.coordinator.disk import Disk
from tests.coordinator.one_hot import operations, play
from tests.coordinator.one_hot_world import BufferedWorld
from tests.coordinator.shared_world import SharedBufferedWorld, SharedWorld


@pytest.mark.promise("No report counts twice, and none with a receipt is missing from a committed round")
@pytest.mark.security("A report is counted once or refused with a reason")
@pytest.mark.every_engine
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_whatever_happens_exactly_the_holders_of_receipts_are_counted(seed, tmp_path, database):
    done = play(operations(seed, 500), tmp_path, database)
    assert done["rounds committed"] >= 3


@pytest.mark.promise("A replica that is killed while it sums reports loses no receipt")
@pytest.mark.every_engine
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))])
def test_sums_of_three_replicas_count_exactly_the_holders_of_receipts(seed, tmp_path, database):
    done = play(operations(seed, 500, SharedWorld), tmp_path, database, SharedWorld)
    assert done["rounds committed"] >= 3
    assert done["reports from other replicas in them"] >= 3


@pytest.mark.promise("After `kill -9` every version of a buffered model has exactly the reports in its rows")
@pytest.mark.every_engine
def test_a_buffered_model_moves_by_the_reports_with_receipts_alone(tmp_path, database):
    done = play(operations(0, 400), tmp_path, database, BufferedWorld)
    assert done["rounds committed"] >= 3
    assert done["old reports in them"] >= 3


@pytest.mark.promise("In buffered mode a killed replica loses no receipt, and devices at work continue")
@pytest.mark.every_engine
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))])
def test_buffers_of_three_replicas_move_by_the_reports_with_receipts(seed, tmp_path, database):
    done = play(operations(seed, 500, SharedBufferedWorld), tmp_path, database, SharedBufferedWorld)
    assert done["rounds committed"] >= 3
    assert done["reports from other replicas in them"] >= 3


@pytest.mark.promise("A transaction that may or may not have committed loses nothing and doubles nothing")
def test_report_whose_commit_is_in_doubt_costs_the_attempt(store, register, desk):
    task = register(goal=3, minimum=2, rounds=1)
    first, second, _ = desk.assign("a", "b", "c")
    disk = Disk(store.database, lambda: desk.now)
    disk.faults = ["is lost"]
    with pytest.raises(Unavailable):
        desk.report(first)
    assert desk.report(first).assignment == first.assignment  # its row is there, the sum without it is gone
    with pytest.raises(NoLongerNeeded):
        desk.report(second)
    for assignment in desk.assign("a", "b", "c"):
        desk.report(assignment)
    ended = [(one.attempt, one.state, one.reason, one.reported) for one in store.rounds(task)]
    assert ended == [(1, RoundState.ABANDONED, "driver-lost", 1), (2, RoundState.COMMITTED, "", 3)]


@pytest.mark.promise("A transaction that may or may not have committed loses nothing and doubles nothing")
def test_round_whose_commit_is_in_doubt_is_committed_once(store, register, desk):
    task = register(goal=1, rounds=2)
    (assignment,) = desk.assign("a")
    Disk(store.database, lambda: desk.now).faults = ["", "is lost"]
    desk.report(assignment)
    desk.pass_time(2)
    desk.report(*desk.assign("a"))
    assert [(one.number, one.attempt, one.state) for one in store.rounds(task)] == [
        (1, 1, RoundState.COMMITTED),
        (2, 1, RoundState.COMMITTED),
    ]
