"""Reports, their figures, and facts about them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.evaluation import Ranged, Sums, means, percentiles
from fedcore.algorithms.facts import Size, facts_of, total
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.algorithms.settings import positive
from fedcore.errors import ReportError
from fedcore.params import VectorSpec
from fedcore.report import ReportLayout, Segment

LAYOUT = ReportLayout(
    (
        Segment("delta", 2, "mean"),
        Segment("weight", 1, "sum"),
        Segment("train.metrics", 3, "sum", ("examples", "loss", "correct")),
    ),
    "examples",
)
DELTA, METRICS = np.array([1, -2], np.float32), np.array([4, 2, 1], np.float32)


def report(scale=1.0, weight=4.0):
    return LAYOUT.weigh(
        LAYOUT.concatenate({"delta": DELTA * np.float32(scale), "train.metrics": METRICS}, weight), weight
    )


def test_means_are_weighted_and_sums_are_not():
    vector = report()
    assert vector.dtype == np.float32
    assert vector.tolist() == [4, -8, 4, 4, 2, 1]
    assert LAYOUT.wire == (VectorSpec("report", 6),)


def test_a_report_is_kept_unweighted_until_it_is_weighed():
    values = LAYOUT.concatenate({"delta": DELTA, "train.metrics": METRICS}, 4.0)
    assert values.dtype == np.float32
    assert values.tolist() == [1, -2, 4, 2, 1]
    assert LAYOUT.weigh(values, 4.0).tolist() == report().tolist()
    assert values.tolist() == [1, -2, 4, 2, 1]


def test_the_weight_is_the_examples_or_one():
    assert LAYOUT.weight(17) == 17
    assert ReportLayout(LAYOUT.segments, "uniform").weight(17) == 1


def test_a_sum_of_reports_gives_the_weighted_mean_and_the_plain_sum():
    parts = LAYOUT.split(report(scale=1, weight=1) + report(scale=5, weight=3))
    np.testing.assert_allclose(parts["delta"], DELTA * (1 * 1 + 5 * 3) / 4)
    np.testing.assert_allclose(parts["train.metrics"], 2 * METRICS)
    assert parts["weight"].tolist() == [4]


def test_split_leaves_the_sum_as_it_was():
    summed = report()
    before = summed.copy()
    LAYOUT.split(summed)
    np.testing.assert_array_equal(summed, before)


def test_metrics_are_means_per_example_named_by_pass():
    assert LAYOUT.metrics(LAYOUT.split(report() + report())) == {"train.loss": 0.5, "train.correct": 0.25}


def test_metrics_of_no_examples_are_zero():
    empty = np.array([0, 0, 1, 0, 0, 0], np.float32)
    assert LAYOUT.metrics(LAYOUT.split(empty)) == {"train.loss": 0, "train.correct": 0}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("segment", ["delta", "train.metrics"])
def test_a_non_finite_value_is_refused_by_segment(segment, bad):
    values = {"delta": DELTA.copy(), "train.metrics": METRICS.copy()}
    values[segment][-1] = bad
    with pytest.raises(ReportError, match=f"segment '{segment}' holds a non-finite value"):
        LAYOUT.concatenate(values, 4.0)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_value_that_overflows_under_its_weight_is_refused():
    values = {"delta": np.array([3e38, 0], np.float32), "train.metrics": METRICS}
    with pytest.raises(ReportError, match="segment 'delta' holds a non-finite value"):
        LAYOUT.concatenate(values, 10.0)


@pytest.mark.parametrize("delta", [None, np.zeros(3, np.float32), np.zeros((2, 1), np.float32)])
def test_a_missing_or_misshapen_segment_is_refused_by_name(delta):
    values = {"train.metrics": METRICS} | ({} if delta is None else {"delta": delta})
    with pytest.raises(ReportError, match=r"segment 'delta' must be float32\[2\]"):
        LAYOUT.concatenate(values, 1.0)


@pytest.mark.parametrize("shape", [(5,), (7,), (1, 6), ()])
def test_a_sum_of_another_length_is_refused(shape):
    with pytest.raises(ReportError, match="a report has 6 values"):
        LAYOUT.split(np.ones(shape, np.float32))


@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan])
def test_a_summed_weight_that_is_not_positive_is_refused(weight):
    summed = report()
    summed[2] = weight
    with pytest.raises(ReportError, match=r"the summed weight is .*, expected a positive number"):
        LAYOUT.split(summed)


@pytest.mark.parametrize(
    "segments",
    [
        (),
        (Segment("delta", 2, "mean"),),
        (Segment("weight", 1, "sum"), Segment("weight", 1, "sum")),
        (Segment("weight", 1, "sum"), Segment("delta", 1, "mean"), Segment("delta", 1, "mean")),
        (Segment("weight", 2, "sum"),),
        (Segment("weight", 1, "mean"),),
    ],
)
def test_a_layout_without_exactly_one_summed_weight_is_refused(segments):
    with pytest.raises(ReportError, match="segment"):
        ReportLayout(segments, "uniform")


def test_every_finite_report_is_taken_and_no_other():
    layout = ReportLayout((Segment("delta", 3, "mean"), Segment("weight", 1, "sum")), "uniform")
    largest = np.finfo(np.float32).max
    layout.check(np.array([largest, largest, largest, 1], np.float32))
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(ReportError, match="not finite"):
            layout.check(np.array([largest, bad, -largest, 1], np.float32))
    with pytest.raises(ReportError, match="not finite"):
        layout.check(np.array([np.inf, -np.inf, 0, 1], np.float32))


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
@pytest.mark.parametrize("weight", [0.0, -1.0, np.nan, np.inf])
def test_a_devices_report_with_an_impossible_weight_is_refused(weighting, weight):
    layout = ReportLayout((Segment("delta", 2, "mean"), Segment("weight", 1, "sum")), weighting)
    layout.check(np.array([0, 0, 1], np.float32))
    with pytest.raises(ReportError, match=r"cannot weigh|not finite"):
        layout.check(np.array([0, 0, weight], np.float32))


def test_under_uniform_weighting_no_device_weighs_more_than_another():
    layout = ReportLayout((Segment("delta", 2, "mean"), Segment("weight", 1, "sum")), "uniform")
    with pytest.raises(ReportError, match=r"cannot weigh 7\.0 under 'uniform'"):
        layout.check(np.array([0, 0, 7], np.float32))
    with pytest.raises(ReportError, match="3 values, not"):
        layout.check(np.zeros(4, np.float32))


ACCURACY = Ranged("accuracy", 0.0, 1.0)


def summed(v, x):
    sums = (v, v**2, v * x, v * x**2, v**2 * x**2, x, x**2)
    return Sums(len(v), *(float(one.sum()) for one in sums))


def test_both_intervals_hold_the_truth_in_nineteen_of_twenty_cohorts():
    random, held, cohorts = np.random.default_rng(0), np.zeros(2), 2000
    for _ in range(cohorts):
        x = random.uniform(0.01, 0.2, 80)
        v = np.clip(random.normal(0.3 + x, 0.1), 0, 1)  # devices with more examples have greater values
        sums = summed(v, x)
        # E[v] = 0.3 + E[x]; E[vx] / E[x] = 0.3 + E[x²] / E[x]
        truths = 0.3 + 0.105, 0.3 + (0.105**2 + 0.19**2 / 12) / 0.105
        for index, (one, truth) in enumerate(zip((sums.over_devices, sums.over_examples), truths, strict=True)):
            held[index] += abs(one.value - truth) <= one.half
    assert (np.abs(held / cohorts - 0.95) < 0.02).all()


def test_one_device_has_no_interval():
    mean = {"examples": [0.5], "examples_squared": [0.25], "mean": [0.2], "mean_squared": [0.04]}
    mean |= {"total": [0.1], "total_examples": [0.05], "total_squared": [0.01]}
    assert means("evaluate", (ACCURACY,), mean, 1) == pytest.approx(
        {"evaluate.accuracy": 0.2, "evaluate.accuracy.devices": 0.2}
    )


def test_noise_that_leaves_no_examples_leaves_no_mean_over_examples():
    sums = Sums(5, 1.0, 0.1, -0.2, 0.0, 0.0, -0.1, 0.0)
    assert sums.over_examples is None
    assert (sums.over_devices.value, sums.over_devices.half) == (0.2, 0.0)  # nor is a variance below 0


def test_an_interval_ends_where_the_range_does():
    sums = summed(np.array([0.0, 0.0, 1.0]), np.ones(3))
    figures = sums.over_devices.figures("accuracy", Ranged("accuracy", 2.0, 6.0))
    assert figures == pytest.approx({"accuracy": 2 + 4 / 3, "accuracy.low": 2.0, "accuracy.high": 2 + 4 * 0.98666667})


def test_percentiles_lie_between_the_edges_that_hold_them():
    # A quarter of devices in each of the bins 1, 2, 2 and 4 of four.
    found = percentiles("evaluate", Ranged("loss", 0.0, 8.0), [0.25, 0.5, 0.0, 0.25])
    assert found == pytest.approx(
        {
            "evaluate.loss.p10": 0.8,
            "evaluate.loss.p25": 2.0,
            "evaluate.loss.p50": 3.0,
            "evaluate.loss.p75": 4.0,
            "evaluate.loss.p90": 7.2,
        }
    )


def test_percentiles_of_noisy_counts_are_in_order_and_in_the_range():
    random = np.random.default_rng(3)
    for _ in range(200):
        noisy = np.full(20, 0.05) + random.normal(0, 0.2, 20)
        found = list(percentiles("evaluate", ACCURACY, noisy).values())
        assert found == sorted(found)
        assert all(0 <= value <= 1 and math.isfinite(value) for value in found)


@dataclass(frozen=True)
class Counted(FedAvg):
    """One more scalar goes each way.

    pull: how strong it is, in words that take
        two lines.
    """

    name: ClassVar[str] = "counted"

    pull: float = positive(0.5)

    def init(self, params_D):
        return {"params": params_D, "round": 0.0 * params_D[:1]}

    def broadcast(self, state):
        return dict(state)

    def report(self, broadcast, carries: Mapping):
        return super().report(broadcast, carries) | {"count": broadcast["round"] + 1}

    def update(self, state, mean, step=None):
        return {"params": state["params"] + mean["delta"], "round": state["round"] + mean["count"]}


def test_sizes_follow_from_the_vectors_that_go_down_and_come_up():
    facts = facts_of(Counted())
    (trip,) = facts.trips
    assert trip.down == {"params": Size(1), "round": Size(0, 1)}
    assert trip.up == {"delta": Size(1), "count": Size(0, 1)}
    assert list(map(str, (*facts.down, *facts.up, total(facts.state)))) == ["d + 1"] * 3


def test_sizes_are_those_of_the_settings():
    momentum, adam = (facts_of(create("mimelite", {"optimizer": name})) for name in ("momentum", "adam"))
    assert [str(one.down[0]) for one in (momentum, adam)] == ["2d", "3d"]
    assert adam.state == {"params": Size(1), "m": Size(1), "v": Size(1)}
    assert [one.name for one in adam.trips[0].passes] == ["train", "sweep"]


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_facts_of_an_algorithm_that_was_fitted_to_a_model(name):
    facts = facts_of(create(name, {"local": "2816..3206"}))
    assert facts.kept == {"own": Size(1)}
    assert "2816..3206" in {setting.value for setting in facts.settings}


@pytest.mark.parametrize(("size", "words"), [(Size(), "0"), (Size(1), "d"), (Size(3, 2), "3d + 2"), (Size(0, 4), "4")])
def test_a_size_is_said_in_parameters(size, words):
    assert str(size) == words


def test_a_setting_has_its_value_its_range_and_its_meaning():
    settings = {one.name: one for one in facts_of(Counted(pull=2.0, epochs=3)).settings}
    assert (settings["pull"].value, settings["pull"].values) == (2.0, "a number above 0")
    assert settings["pull"].meaning == "how strong it is, in words that take two lines."
    assert settings["epochs"].value == 3
    assert settings["epochs"].meaning == settings["batch_size"].meaning == "E and B of the paper."


def test_the_paper_is_the_citation_that_opens_a_paragraph():
    assert facts_of(create("fedadam")).paper == "Reddi, ICLR 2021, Algorithm 2"
    assert facts_of(Counted()).paper == ""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_setting_of_every_algorithm_has_a_meaning(name):
    facts = facts_of(create(name))
    assert [one.name for one in facts.settings if not one.meaning] == []
    assert facts.summary.endswith(".")
    assert facts.family


def test_a_clipped_algorithm_has_the_facts_of_its_inner_one_and_its_bound():
    facts = facts_of(create("mimelite", {"clip_norm": 0.5, "clip_quantile": 0.8}))
    (trip,) = facts.trips
    assert (facts.name, facts.paper) == ("mimelite", facts_of(create("mimelite")).paper)
    assert (trip.down["clip"], trip.up["clip_indicator"], facts.state["clip_1"]) == (Size(0, 1),) * 3
    assert [one.name for one in facts.settings if one.name.startswith("clip_")] == [
        "clip_norm",
        "clip_quantile",
        "clip_lr",
    ]
