"""Sums of reports: means, and those that outliers cannot move."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from coordinator.errors import InvalidTask, NonFiniteState
from coordinator.rules import aggregation
from coordinator.rules.task_settings import ClearReports, Secagg, TaskSettings
from fedcore import algorithms
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.errors import InvalidSetting, ReportError
from fedcore.params import ParamSchema, TensorSpec, VectorSpec
from fedcore.plan import BlobRef
from fedcore.report import Segment
from tests.coordinator.bundles import GRAPHS, START, make_bundle, make_plan, report_vector
from tests.coordinator.conftest import states

PLAN = make_plan()
FEDAVG = algorithms.create("fedavg")


def test_sum_is_float64_so_small_reports_are_not_lost_beside_large():
    total = aggregation.ReportSum(2)
    for _ in range(1000):
        total.add(np.array([1.0, 1e-9], np.float32))
    total.add(np.array([2.0**30, 1.0], np.float32))
    assert total.total_L[0] == 1000 + 2.0**30
    assert total.total_L[1] == pytest.approx(1 + 1e-6, rel=1e-12)


def test_reports_added_at_once_make_the_sum_of_those_added_one_by_one():
    reports = np.random.default_rng(0).standard_normal((3, 70_001), np.float32)
    at_once, one_by_one = aggregation.ReportSum(70_001), aggregation.ReportSum(70_001)
    at_once.add(*reports)
    for one in reports:
        one_by_one.add(one)
    np.testing.assert_array_equal(at_once.total_L, one_by_one.total_L)
    np.testing.assert_array_equal(at_once.total_L, reports.astype(np.float64)[0] + reports[1] + reports[2])


def test_fedavg_is_the_weighted_mean_of_deltas():
    total = aggregation.ReportSum(PLAN.report.size)
    total.add(report_vector([1, 0, 0, 0], 1, loss=2.0))
    total.add(report_vector([0, 4, 0, 0], 3, loss=6.0))
    made = aggregation.aggregate(PLAN.report, FEDAVG, {"params": START}, total.total_L)
    np.testing.assert_array_equal(made.state["params"], START + np.array([0.25, 3, 0, 0], np.float32))
    assert made.state["params"].dtype == np.float32
    assert made.metrics == {"train.loss": 2.0}


def test_state_that_overflows_is_refused_and_named():
    huge = np.full(PLAN.report.size, 1e300)
    huge[4] = 1.0
    with pytest.raises(NonFiniteState, match=r"'params' .* largest value of their mean was 1e\+300: training diverged"):
        aggregation.aggregate(PLAN.report, FEDAVG, {"params": START}, huge)


def test_sum_without_weight_is_refused():
    with pytest.raises(ReportError, match="weight"):
        aggregation.aggregate(PLAN.report, FEDAVG, {"params": START}, np.zeros(PLAN.report.size))


@pytest.mark.parametrize(
    ("plan", "algorithm", "says"),
    [
        (make_plan(weighting="uniform"), "fedavg", "weighs by uniform"),
        (make_plan(), "mimelite", "weighs by examples"),
        (make_plan(weighting="uniform"), "mimelite", "broadcasts"),
        (make_plan(segments=(Segment("d", 4, "mean"), Segment("weight", 1, "sum"))), "fedavg", "delta"),
        (make_plan(segments=(Segment("delta", 3, "mean"), Segment("weight", 1, "sum"))), "fedavg", "broadcast"),
    ],
)
def test_plan_that_does_not_fit_its_algorithm_is_refused_before_any_round(plan, algorithm, says):
    algorithm = algorithms.create(algorithm)
    with pytest.raises(InvalidTask, match=says):
        aggregation.check_fit(plan, algorithm, algorithm.init(START))


class Told(FedAvg):
    """FedAvg whose model becomes what `update` was told of the round."""

    name = "told"

    def update(self, state, mean, step):
        told = [step.devices, step.layers[0].stop, step.layers[-1].stop, step.lr_scale]
        return {"params": np.array(told, np.float64)}


def test_update_is_told_how_many_devices_and_which_layers(store, register, desk, tmp_path, monkeypatch):
    monkeypatch.setitem(algorithms.ALGORITHMS, "told", Told)
    schema = ParamSchema((TensorSpec("w", (3,)), TensorSpec("b", (1,))))
    bundle = make_bundle(tmp_path / "told", msgspec.structs.replace(PLAN, schema=schema), algorithm="told")
    task = register(bundle, goal=2, rounds=2)
    for _ in range(2):
        for given in desk.assign("a", "b"):
            desk.report(given)
        desk.pass_time(1)
    np.testing.assert_array_equal(store.checkpoint(task)["params"], [2, 3, 4, 1])


def test_state_specs_name_the_algorithms_vectors():
    assert [(spec.name, spec.size) for spec in aggregation.state_specs(PLAN, algorithms.create("fedadam"))] == [
        ("params", 4),
        ("m", 4),
        ("v", 4),
    ]


TWO = ParamSchema((TensorSpec("body", (3,)), TensorSpec("head", (1,))), ("head",))


@pytest.mark.parametrize(
    ("schema", "algorithm", "says"),
    [
        (TWO, algorithms.create("fedper", {"local": "0..1"}), "local is 0..1, and the model's is 3..4"),
        (TWO, algorithms.create("fedper", {"local": "3..9"}), "local is 3..9, and the model's is 3..4"),
        (TWO, algorithms.create("fedper"), "fedper does not say which parameters are local: export the model again"),
        (TWO, algorithms.create("fedavg"), "fedavg shares all parameters, and of this model head stay on clients"),
        (
            msgspec.structs.replace(TWO, local=()),
            algorithms.create("fedrep", {"local": "3..4"}),
            "and this model names none",
        ),
    ],
)
def test_an_algorithm_that_keeps_other_parameters_than_its_model_fails(schema, algorithm, says):
    plan = msgspec.structs.replace(make_plan(), schema=schema)
    with pytest.raises((InvalidTask, InvalidSetting), match=says):
        aggregation.check_fit(plan, algorithm, algorithm.init(START))


def test_an_algorithm_that_keeps_the_local_parameters_of_the_model_fits():
    graphs = {name: BlobRef.of(name.encode()) for name in (*GRAPHS, "kept.first", "kept.next")}
    more = {"kept": (VectorSpec("own", 1),), "graphs": {"onnx": graphs}}
    plan = msgspec.structs.replace(make_plan(), schema=TWO, **more)
    algorithm = algorithms.create("fedper", {"local": "3..4"})
    aggregation.check_fit(plan, algorithm, algorithm.init(START))


SIZE = 70_001
ROBUST = [("trimmed-mean", 2), ("median", 0), ("krum", 2)]


def estimate(clear, deltas, weights):
    """The estimate of the mean that a round makes of such reports."""
    plan = make_plan(size=deltas.shape[1])
    kept = aggregation.collector(plan.report, clear)
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
    kept = aggregation.KeptReports(plan.report, ClearReports(estimator="median"))
    report = report_vector([1, 2, 3, 4], 1.0)
    kept.add(report)
    report[:] = 7
    np.testing.assert_array_equal(plan.report.split(kept.total())["delta"], [1, 2, 3, 4])


def test_an_estimate_is_computed_once_for_the_same_reports():
    """A locked database makes the driver close a round again and again."""
    plan = make_plan()
    kept = aggregation.KeptReports(plan.report, ClearReports(estimator="median"))
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
    most = aggregation.MOST_KEPT_BYTES // (4 * plan.report.size)
    bundle = make_bundle(tmp_path / "large", plan, start=np.zeros(size, np.float32))
    with pytest.raises(InvalidTask, match=f"it may keep {most}: lower the goal from {most + 1}"):
        register(bundle, goal=most + 1, clear=ClearReports(estimator="median"))
    register(bundle, goal=most, clear=ClearReports(estimator="median"))
    register(bundle, goal=most + 1)
    with pytest.raises(InvalidTask, match="it may keep 500: lower the goal from 501"):
        register(goal=501, clear=ClearReports(estimator="median"))
