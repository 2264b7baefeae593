"""Few false reports do not move a robust estimate far, and what a round cannot keep is refused before it begins."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.errors import InvalidTask
from coordinator.rules.aggregation import MOST_KEPT_BYTES, KeptReports, collector
from coordinator.rules.task_settings import ClearReports, Secagg, TaskSettings
from tests.coordinator.bundles import START, make_bundle, make_plan, report_vector
from tests.coordinator.conftest import states

SIZE = 70_001
ROBUST = [("trimmed-mean", 2), ("median", 0), ("krum", 2)]


def estimate(clear, deltas, weights):
    """The estimate of the mean that a round makes of such reports."""
    plan = make_plan(size=deltas.shape[1])
    kept = collector(plan.report, clear)
    for delta, weight in zip(deltas, weights, strict=True):
        kept.add(report_vector(delta, weight, plan=plan))
    return plan.report.split(kept.total())["delta"]


def slow(name, tolerate, deltas):
    """The same by the definition, one coordinate or one pair at a time."""
    count = len(deltas)
    if name == "krum":
        scores = []
        for one in deltas:
            distances = sorted(float(((one - other) ** 2).sum()) for other in deltas)
            scores.append(sum(distances[1 : count - tolerate - 1]))
        return deltas[int(np.argmin(scores))]
    cut = tolerate if name == "trimmed-mean" else (count - 1) // 2
    return np.array([np.mean(sorted(column)[cut : count - cut]) for column in deltas.T])


@pytest.mark.parametrize(("name", "tolerate"), ROBUST)
@pytest.mark.parametrize("count", [7, 8])
def test_estimate_is_the_definitions_whatever_the_weights(name, tolerate, count):
    source = np.random.default_rng(0)
    deltas = source.standard_normal((count, SIZE), np.float32).astype(np.float64)
    weights = source.integers(1, 50, count).astype(float)
    found = estimate(ClearReports(estimator=name, tolerate=tolerate), deltas, weights)
    np.testing.assert_allclose(found, slow(name, tolerate, deltas), rtol=1e-5, atol=1e-6)


@pytest.mark.security("--estimator keeps a few false reports from moving the model far")
@pytest.mark.parametrize(("name", "tolerate"), ROBUST)
def test_two_false_reports_of_seven_move_a_robust_estimate_little(name, tolerate):
    source = np.random.default_rng(1)
    honest = 1 + 0.1 * source.standard_normal((5, 40))
    false = np.full((2, 40), -100.0)
    deltas, weights = np.concatenate([honest, false]), [10.0] * 5 + [10_000.0] * 2
    assert np.abs(estimate(ClearReports(estimator=name, tolerate=tolerate), deltas, weights) - 1).max() < 0.5
    assert estimate(ClearReports(), deltas, weights).max() < -90


@pytest.mark.security("--estimator keeps a few false reports from moving the model far")
def test_round_commits_the_median_of_its_reports(store, register, desk, tmp_path):
    task = register(make_bundle(tmp_path / "robust"), goal=3, rounds=2, clear=ClearReports(estimator="median"))
    for _ in range(2):
        given = desk.assign(*(f"{desk.now}-{number}" for number in range(3)))
        for one, delta in zip(given, ([1, 1, 0, 0], [3, 0, 0, 0], [900, -900, 0, 0]), strict=True):
            desk.report(one, delta, loss=2.0)
        desk.pass_time(1)
    assert states(store, task) == [(1, 1, "committed", ""), (2, 1, "committed", "")]
    np.testing.assert_allclose(store.checkpoint(task)["params"], START + np.array([6, 0, 0, 0], np.float32))
    assert store.rounds(task)[0].metrics == {"train.loss": 2.0}


def test_kept_reports_are_copies():
    plan = make_plan()
    kept = KeptReports(plan.report, ClearReports(estimator="median"))
    report = report_vector([1, 2, 3, 4], 1.0)
    kept.add(report)
    report[:] = 7
    np.testing.assert_array_equal(plan.report.split(kept.total())["delta"], [1, 2, 3, 4])


def test_an_estimate_is_computed_once_for_the_same_reports():
    """A locked database makes the driver close a round again and again."""
    plan = make_plan()
    kept = KeptReports(plan.report, ClearReports(estimator="median"))
    kept.add(report_vector([1, 2, 3, 4], 1.0))
    first = kept.total()
    assert kept.total() is first
    kept.add(report_vector([3, 4, 5, 6], 1.0))
    np.testing.assert_array_equal(plan.report.split(kept.total())["delta"], [2, 3, 4, 5])


@pytest.mark.security("Robust estimators need every report in the clear")
@pytest.mark.parametrize(
    ("clear", "more", "says"),
    [
        ({"estimator": "mode"}, {}, "estimator must be one of mean, trimmed-mean, median, krum, not 'mode'"),
        ({"estimator": "krum"}, {}, "tolerate must be at least 1 with krum"),
        ({"tolerate": 1}, {}, "tolerate must be 0 with mean"),
        ({"estimator": "trimmed-mean", "tolerate": 2}, {"goal": 4}, "goal must be at least 5 with estimator trimmed"),
        ({"estimator": "krum", "tolerate": 2}, {"goal": 9, "minimum": 6}, "minimum must be at least 7"),
        ({"estimator": "median"}, {"goal": 9, "secagg": Secagg()}, "estimator must be mean with secagg"),
    ],
)
def test_estimator_that_cannot_be_is_refused_by_name(clear, more, says):
    with pytest.raises(InvalidTask, match=says):
        TaskSettings(**{"population": "p", "goal": 9, "rounds": 1} | more, clear=ClearReports(**clear))


def test_more_reports_than_memory_may_keep_are_refused(store, register, tmp_path):
    size = 200_000
    plan = make_plan(size=size)
    most = MOST_KEPT_BYTES // (4 * plan.report.size)
    bundle = make_bundle(tmp_path / "large", plan, start=np.zeros(size, np.float32))
    with pytest.raises(InvalidTask, match=f"it may keep {most}: lower the goal from {most + 1}"):
        register(bundle, goal=most + 1, clear=ClearReports(estimator="median"))
    register(bundle, goal=most, clear=ClearReports(estimator="median"))
    register(bundle, goal=most + 1)
    with pytest.raises(InvalidTask, match="it may keep 500: lower the goal from 501"):
        register(goal=501, clear=ClearReports(estimator="median"))
