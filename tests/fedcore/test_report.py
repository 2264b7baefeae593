import numpy as np
import pytest

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
