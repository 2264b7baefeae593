"""Evaluations against closed formulas on quadratics: what devices report, what follows, and what is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fedcore.algorithms import create
from fedcore.algorithms.algorithm import ServerStep, with_carries
from fedcore.algorithms.check import check
from fedcore.algorithms.facts import for_model
from fedcore.batching import StreamKey
from fedcore.errors import InvalidSetting
from fedcore.params import ParamSchema, TensorSpec
from tests.fedcore.quadratics import (
    gradient_oracle,
    mean_report,
    measure_oracle,
    run_cohort,
    run_device,
    run_round,
)

D, MOST = 5, 8
SCHEMA = ParamSchema((TensorSpec("w", (D,)),))
METRICS = "loss=0..40,near=0..1"
SIZES = (6, 4, 9, 1, 3)
EVALUATIONS = [
    create("evaluate", {"metrics": METRICS, "max_examples": MOST, "batch_size": 4}),
    create("compare", {"metrics": METRICS, "max_examples": MOST, "batch_size": 4}),
    create("personalisation", {"metrics": METRICS, "max_examples": MOST, "batch_size": 4, "client_lr": 0.3}),
]
EVALUATE, COMPARE, PERSONALISATION = EVALUATIONS


@pytest.fixture
def clients():
    rng = np.random.default_rng(5)
    return [rng.normal(0.5 * k, 1, (n, D)) for k, n in enumerate(SIZES)]


@pytest.fixture
def x0():
    return np.linspace(-0.5, 0.5, D)


def levels(x, examples):
    """The device's own means of both metrics, in their ranges."""
    square = ((x - examples) ** 2).sum(1)
    return np.array([min((0.5 * square).mean() / 40, 1), (square < 4).mean()])


def report_of(algorithm, state, examples, slot=0):
    return run_device(algorithm, algorithm.broadcast(state), examples, StreamKey(0, 0, slot))


def figures_of(algorithm, state, clients):
    reports = [report_of(algorithm, state, examples, slot) for slot, examples in enumerate(clients)]
    mean = mean_report(algorithm, reports, [len(examples) for examples in clients])
    return algorithm.figures(mean, ServerStep(devices=len(clients)))


def check_means(figures, prefix, v, n, width):
    """Both means and both intervals, from every device's own value and number of examples."""
    count, x = len(v), np.minimum(n, MOST)
    half = 1.96 * np.std(v, ddof=1) / math.sqrt(count)
    mean = {".devices": v.mean(), ".devices.low": v.mean() - half, ".devices.high": v.mean() + half}
    ratio = (v * x).sum() / x.sum()
    half = 1.96 * math.sqrt(count / (count - 1) * ((v * x - ratio * x) ** 2).sum()) / x.sum()
    mean |= {"": ratio, ".low": ratio - half, ".high": ratio + half}
    for name, value in mean.items():
        assert figures[f"{prefix}{name}"] == pytest.approx(width * value, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("algorithm", EVALUATIONS, ids=lambda one: one.name)
def test_it_keeps_the_contract_alone_and_clipped(algorithm):
    check(algorithm)
    check(create(algorithm.name, {"metrics": METRICS, "clip_norm": 3.0, "clip_quantile": 0.5}))


@pytest.mark.parametrize("algorithm", EVALUATIONS, ids=lambda one: one.name)
def test_an_evaluation_leaves_the_state_as_it_is(algorithm, x0, clients):
    state = algorithm.init(x0)
    after = run_round(algorithm, state, clients)
    assert {name: vector.tolist() for name, vector in after.items()} == {
        name: vector.tolist() for name, vector in state.items()
    }


def test_a_device_reports_its_mean_metrics_and_the_bins_they_lie_in(x0, clients):
    report = report_of(EVALUATE, EVALUATE.init(x0), clients[0])
    m, x = levels(x0, clients[0]), 6 / MOST
    expected = {"examples": [x], "examples_squared": [x * x], "mean": m, "mean_squared": m**2}
    expected |= {"total": m * x, "total_examples": m * x * x, "total_squared": (m * x) ** 2}
    for index, name in enumerate(("loss", "near")):
        expected[f"bins_{name}"] = np.arange(20) == min(int(20 * m[index] + 1e-9), 19)
    assert set(report) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(report[name], value, rtol=1e-12, err_msg=name)


def test_examples_above_the_most_count_as_the_most(x0, clients):
    assert len(clients[2]) > MOST
    assert report_of(EVALUATE, EVALUATE.init(x0), clients[2])["examples"] == 1


def test_values_outside_their_range_count_as_its_end(x0, clients):
    narrow = replace(EVALUATE, metrics="loss=0..0.1,near=-3..-1")
    report = report_of(narrow, narrow.init(x0), clients[3])
    assert (report["mean"].tolist(), report["bins_loss"][-1], report["bins_near"][-1]) == ([1, 1], 1, 1)
    high = replace(EVALUATE, metrics="loss=90..99,near=2..3")
    report = report_of(high, high.init(x0), clients[3])
    assert (report["mean"].tolist(), report["bins_loss"][0], report["bins_near"][0]) == ([0, 0], 1, 1)


def test_a_share_at_an_edge_lies_in_the_bin_above_whatever_the_rounding(x0):
    clients = [np.concatenate([np.zeros((k, D)), np.full((20 - k, D), 9.0)]) for k in range(21)]
    for dtype in (np.float32, np.float64):
        algorithm = replace(EVALUATE, metrics="loss=0..500,near=0..1")
        state = algorithm.init(x0.astype(dtype))
        for k, examples in enumerate(clients):
            bins = report_of(algorithm, state, examples.astype(dtype))["bins_near"]
            assert bins.tolist() == [float(index == min(k, 19)) for index in range(20)]


def test_means_and_intervals_are_those_of_every_devices_own_values(x0, clients):
    figures = figures_of(EVALUATE, EVALUATE.init(x0), clients)
    m, n = np.array([levels(x0, examples) for examples in clients]), np.array(SIZES)
    check_means(figures, "evaluate.loss", m[:, 0], n, 40)
    for name, value in (("", m[:, 1] @ np.minimum(n, MOST) / np.minimum(n, MOST).sum()), (".devices", m[:, 1].mean())):
        assert figures[f"evaluate.near{name}"] == pytest.approx(value)
    assert figures["evaluate.devices"] == 5
    assert figures["evaluate.examples"] == pytest.approx(np.minimum(n, MOST).sum())


def test_percentiles_are_known_to_one_bin(x0):
    clients = [np.random.default_rng(k).normal(0.04 * k, 0.5, (7, D)) for k in range(60)]
    figures = figures_of(EVALUATE, EVALUATE.init(x0), clients)
    own = 40 * np.array([levels(x0, examples)[0] for examples in clients])
    for percent in (10, 25, 50, 75, 90):
        assert abs(figures[f"evaluate.loss.p{percent}"] - np.percentile(own, percent)) <= 40 / 20


def test_a_comparison_is_of_paired_differences(x0, clients):
    other = x0 + 0.7
    figures = figures_of(COMPARE, COMPARE.init(x0) | {"other": other}, clients)
    d = np.array([levels(x0, examples) - levels(other, examples) for examples in clients])
    assert d[:, 0].min() < 0 < d[:, 0].max()
    check_means(figures, "compare.loss", d[:, 0], np.array(SIZES), 40)
    check_means(figures, "compare.near", d[:, 1], np.array(SIZES), 1)
    improved = figures["compare.loss.improved"], figures["compare.near.improved"]
    assert improved == pytest.approx(((d[:, 0] < 0).mean(), (d[:, 1] > 0).mean()))


def test_a_model_compared_with_itself_differs_nowhere(x0, clients):
    figures = figures_of(COMPARE, COMPARE.init(x0), clients)
    assert {value for name, value in figures.items() if name.startswith(("compare.loss", "compare.near"))} == {0.0}


def test_personalisation_is_the_gain_by_local_steps(x0, clients):
    figures = figures_of(PERSONALISATION, PERSONALISATION.init(x0), clients)
    gains = []
    for examples in clients:
        whole, x = replace(PERSONALISATION, batch_size=64), x0
        x = x - whole.client_lr * (x - examples.mean(0))
        gains.append(levels(x, examples) - levels(x0, examples))
    whole = figures_of(whole, whole.init(x0), clients)
    check_means(whole, "personalisation.loss", np.array(gains)[:, 0], np.array(SIZES), 40)
    assert whole["personalisation.loss.improved"] == 1
    assert figures["personalisation.loss"] < whole["personalisation.loss"] < 0  # more steps, more gain


@pytest.mark.parametrize("algorithm", EVALUATIONS, ids=lambda one: one.name)
def test_evaluating_a_cohort_at_once_is_a_loop_over_its_clients(algorithm, x0):
    examples_KND = np.random.default_rng(8).normal(size=(3, 7, D))
    broadcast = algorithm.broadcast(algorithm.init(x0))
    together = run_cohort(algorithm, broadcast, examples_KND, lambda k: StreamKey(0, 1, k))
    for k, examples in enumerate(examples_KND):
        for name, value in run_device(algorithm, broadcast, examples, StreamKey(0, 1, k)).items():
            np.testing.assert_allclose(together[name][k], value, rtol=1e-12, atol=1e-15, err_msg=name)


@pytest.mark.parametrize("algorithm", EVALUATIONS, ids=lambda one: one.name)
def test_an_evaluation_in_float32_stays_there(algorithm, x0, clients):
    state, carries = algorithm.init(x0.astype(np.float32)), {}
    batch = clients[0].astype(np.float32), np.ones(len(clients[0]), np.float32)
    for stage in algorithm.passes:
        received = with_carries(algorithm.broadcast(state), carries)
        oracle = measure_oracle(*batch) if stage.forward else gradient_oracle(*batch)
        carries[stage.name] = stage.step(stage.begin(received), received, oracle)
    report = algorithm.report(algorithm.broadcast(state), carries)
    for vectors in (state, *carries.values(), report, algorithm.update(state, report)):
        assert {str(value.dtype) for value in vectors.values()} == {"float32"}


@pytest.mark.parametrize("algorithm", EVALUATIONS, ids=lambda one: one.name)
def test_every_value_of_a_report_is_within_one(algorithm, x0, clients):
    state = algorithm.init(x0)
    for examples in [*clients, np.full((3, D), 1e6), np.repeat(x0[None], 3 * MOST, 0)]:
        values = np.concatenate(list(report_of(algorithm, state, examples).values()))
        assert np.abs(values).max() <= 1
        assert np.linalg.norm(values) <= math.sqrt(2 + 6 * 2)


def test_ranges_are_filled_in_from_the_metrics_of_the_model():
    made = for_model(create("evaluate"), ("loss", "accuracy", "top_5"), SCHEMA)
    assert made.metrics == "loss=0..10,accuracy=0..1,top_5=0..1"
    clipped = for_model(create("compare", {"clip_norm": 2}), ("loss", "accuracy"), SCHEMA)
    assert clipped.inner.metrics == "loss=0..10,accuracy=0..1"
    given = for_model(create("evaluate", {"metrics": "accuracy=0.5..1, loss=0..3"}), ("loss", "accuracy"), SCHEMA)
    assert given.metrics == "loss=0..3,accuracy=0.5..1"
    assert for_model(create("fedavg"), ("loss",), SCHEMA) == create("fedavg")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("loss=0..10,accuracy=0..1", "the model has no metric 'accuracy'; there are loss, near"),
        ("loss=0..10", "metrics gives no range for 'near': add near=low..high"),
    ],
)
def test_ranges_that_are_not_those_of_the_model_are_refused_by_name(text, says):
    with pytest.raises(InvalidSetting, match=f"evaluate: {says}"):
        for_model(create("evaluate", {"metrics": text}), ("loss", "near"), SCHEMA)


def test_a_metric_whose_name_no_vector_can_have_is_refused():
    with pytest.raises(InvalidSetting, match="the metric 'top-5' cannot be reported"):
        for_model(create("evaluate"), ("loss", "top-5"), SCHEMA)


@pytest.mark.parametrize(
    "text", ["", "loss", "loss=1", "loss=0..0", "loss=1..0", "loss=0..inf", "loss=nan..1", "a b=0..1", "a=0..1,a=0..1"]
)
def test_ranges_that_make_no_sense_are_refused(text):
    with pytest.raises(InvalidSetting, match="evaluate: metrics must be ranges of metrics"):
        create("evaluate", {"metrics": text})
