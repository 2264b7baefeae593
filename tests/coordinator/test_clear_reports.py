"""A single report in the clear does not decide the model, and an operator undoes what false reports did."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.errors import InvalidTask, TaskEnded, UnknownRound, UnknownTask
from coordinator.rules.aggregation import ReportSum, aggregate, bounded_report
from coordinator.rules.states import RoundState, TaskState
from coordinator.rules.task_settings import MOST_COUNT, ClearReports
from coordinator.store.garbage_collection import Retention, collect
from fedcore import algorithms
from fedcore.codecs import RoundKey
from tests.coordinator.bundles import START, make_bundle, make_plan, report_vector
from tests.coordinator.conftest import states

LAYOUT, KEY = make_plan().report, RoundKey(0, 1)


def mean_of(clear, *reports):
    """The mean delta, and the metrics, of reports within the bounds."""
    total = ReportSum(LAYOUT.size)
    total.add(*(bounded_report(clear, report, LAYOUT, KEY) for report in reports))
    made = aggregate(LAYOUT, algorithms.create("fedavg"), {"params": np.zeros(4, np.float32)}, total.total_L)
    return made.state["params"], made.metrics


def moved(*delta):
    """The model after such an update of the start."""
    return START + np.array(delta, np.float32)


def run_round(desk, *deltas):
    """One round in which a device reports each of these."""
    given = desk.assign(*(f"{desk.now}-{number}" for number, _ in enumerate(deltas)))
    for one, delta in zip(given, deltas, strict=True):
        desk.report(one, delta)
    desk.pass_time(1)


def test_one_finite_report_of_1e30_does_not_end_a_fedadam_task(store, register, desk, tmp_path):
    task = register(make_bundle(tmp_path / "adam", algorithm="fedadam"), goal=2, rounds=3)
    run_round(desk, [0.1, 0, 0, 0], [1e30, 1e30, 1e30, 1e30])
    run_round(desk, [0.1, 0, 0, 0], [3e38, 3e38, 3e38, 3e38])
    assert states(store, task) == [(1, 1, "committed", ""), (2, 1, "committed", "")]
    assert store.task(task).state is TaskState.ACTIVE
    assert np.isfinite(store.checkpoint(task)["params"]).all()


def test_report_within_bounds_is_added_as_it_came():
    honest = report_vector([600, 0, -800, 0], 3.0, loss=2.0)
    assert bounded_report(ClearReports(), honest, LAYOUT, KEY) is honest


@pytest.mark.security("A report in the clear is scaled down to max_norm and max_weight")
@pytest.mark.parametrize("size", [11.0, 1e18, 1e30, 3e37])
def test_longer_update_is_scaled_to_the_bound_in_its_direction(size):
    delta, _ = mean_of(ClearReports(max_norm=10.0), report_vector([0.6 * size, 0, -0.8 * size, 0], 4.0))
    np.testing.assert_allclose(delta, [6, 0, -8, 0], rtol=1e-6)


@pytest.mark.parametrize("weight", [1e-28, 1e-30])
def test_small_weight_hides_no_long_update(weight):
    """The squares of such values are subnormal or 0 as float32."""
    delta, _ = mean_of(ClearReports(), report_vector([6e6, 0, -8e6, 0], weight))
    np.testing.assert_allclose(delta, [600, 0, -800, 0], rtol=1e-6)


@pytest.mark.security("A report in the clear is scaled down to max_norm and max_weight")
def test_greater_weight_counts_as_the_bound_in_means_and_metrics():
    honest, greedy = report_vector([1, 0, 0, 0], 10.0, loss=20.0), report_vector([0, 1, 0, 0], 1e30, loss=4e30)
    delta, metrics = mean_of(ClearReports(max_weight=30.0), honest, greedy)
    np.testing.assert_allclose(delta, [0.25, 0.75, 0, 0], rtol=1e-6)
    assert metrics["train.loss"] == pytest.approx((20 + 4 * 30) / 40)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_norm": 0}, "max_norm must be a number from 1e-06 to 1,000,000, not 0"),
        ({"max_norm": float("nan")}, "max_norm"),
        ({"max_weight": 0.5}, "max_weight must be a number from 1 to"),
    ],
)
def test_bounds_that_cannot_be_are_refused_by_name(wrong, says):
    with pytest.raises(InvalidTask, match=says):
        ClearReports(**wrong)


@pytest.mark.security("muster task rollback goes back to an earlier model")
@pytest.mark.every_engine
def test_rollback_goes_on_from_an_earlier_model_under_new_numbers(store, register, desk):
    task = register(goal=1, rounds=3)
    for delta in ([1, 0, 0, 0], [0, 900, 0, 0]):
        run_round(desk, delta)
    store.pause(task)
    desk.pass_time(1)
    store.roll_back(task, 1, "operator alice, token 1")
    np.testing.assert_array_equal(store.checkpoint(task)["params"], moved(1, 0, 0, 0))
    assert store.task(task).settings.rounds == 5
    assert states(store, task)[-1] == (
        3, 1, "committed", "rolled back to the model after round 1 by operator alice, token 1"
    )  # fmt: skip
    assert store.history(task)[-1].cause.endswith("after round 1 by operator alice, token 1")
    store.resume(task)
    desk.pass_time(1)
    for _ in range(2):
        run_round(desk, [0, 0, 1, 0])
    assert (store.task(task).state, store.rounds(task)[-1].number) == (TaskState.COMPLETED, 5)
    np.testing.assert_array_equal(store.checkpoint(task)["params"], moved(1, 0, 2, 0))


def test_rollback_to_the_start_needs_no_round(store, register, desk):
    task = register(goal=1, rounds=3)
    run_round(desk, [1, 0, 0, 0])
    store.pause(task)
    store.roll_back(task, 0)
    np.testing.assert_array_equal(store.checkpoint(task)["params"], START)


@pytest.mark.every_engine
def test_rollback_of_a_task_of_the_most_rounds_leaves_it_readable(store, register, desk):
    task = register(goal=1, rounds=MOST_COUNT)
    run_round(desk, [1, 0, 0, 0])
    store.pause(task)
    for _ in range(2):
        store.roll_back(task, 0)
    assert [one.settings.rounds for one in store.tasks()] == [MOST_COUNT]


def test_rollback_is_refused_while_the_task_or_a_round_runs(store, register, desk):
    task = register(goal=1, rounds=3)
    run_round(desk, [1, 0, 0, 0])
    with pytest.raises(TaskEnded, match="is active; pause it"):
        store.roll_back(task, 1)
    (running,) = desk.assign("late")
    store.pause(task)
    with pytest.raises(TaskEnded, match=r"round 2 of .* still runs"):
        store.roll_back(task, 1)
    desk.report(running, [0, 1, 0, 0])
    assert store.rounds(task)[-1].state is RoundState.COMMITTED
    store.roll_back(task, 1)
    with pytest.raises(UnknownTask):
        store.roll_back("nope", 1)


@pytest.mark.every_engine
def test_rollback_is_refused_when_the_model_was_collected(store, register, desk):
    task = register(goal=1, rounds=9)
    for _ in range(4):
        run_round(desk, [1, 0, 0, 0])
    store.pause(task)
    collect(store, Retention(models=2, grace_s=0.0))
    for number in (1, 9):
        with pytest.raises(UnknownRound, match=f"has not committed a round {number}, or its model is no longer kept"):
            store.roll_back(task, number)
    store.roll_back(task, 3)
    collect(store, Retention(models=1, grace_s=0.0))
    np.testing.assert_array_equal(store.checkpoint(task)["params"], moved(3, 0, 0, 0))
    with store.database.reading() as records:
        gone = records.snapshot(store.task(task), 5).state_sha256
    store.blobs.delete([gone])
    with pytest.raises(UnknownRound, match="not among the blobs any more"):
        store.roll_back(task, 5)
