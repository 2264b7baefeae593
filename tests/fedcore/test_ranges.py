"""Segments with a range and bits of their own, and how sums without one are split: plan §5.3, wire §8."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from fedcore import masking
from fedcore.algorithms.algorithm import Exchange, ranges_of
from fedcore.algorithms.check import check
from fedcore.algorithms.clipped import Clipped, Clipping
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.batching import StreamKey
from fedcore.compression import Compression, dequantise, quantise
from fedcore.errors import InvalidAlgorithm, PlanError, ReportError
from fedcore.params import ParamSchema, TensorSpec
from fedcore.plan import Plan
from fedcore.release import SumBounds
from fedcore.report import ReportLayout, Segment
from fedcore.schedule import Range
from tests.device_runtime import linear

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "device.json").read_text())
COUNTS, SHARES = Range(0, 2**20 - 1, 20), Range(-1, 1, 20)
LAYOUT = ReportLayout(
    (
        Segment("delta", 100, "mean"),
        Segment("share", 2, "mean", range=SHARES),
        Segment("weight", 1, "sum"),
        Segment("counted", 2, "sum", range=COUNTS),
        Segment("train.metrics", 2, "sum", ("examples", "loss")),
    ),
    "uniform",
)
BOUNDS = SumBounds(clip_norm=2.0, bits=16, max_examples=100, min_sum=8)
MOST = 2**23
"""Up to where a sum without a range reaches."""


def parts(share, counted=(3, 4)):
    return {
        "delta": np.zeros(100, np.float32),
        "share": np.array(share, np.float32),
        "counted": np.array(counted, np.float32),
        "train.metrics": np.array([5, 6.5], np.float32),
    }


@pytest.mark.parametrize(
    ("low", "high", "bits"),
    [
        (0.5, 1, 8), (-1, -0.5, 8), (1, -1, 8), (0, 0, 8), (0, 1e-31, 8), (0, 1e31, 8), (-1e300, 1e300, 8),
        (float("nan"), 1, 8), (0, float("nan"), 8), (0, float("inf"), 8), (0, 1, 0), (0, 1, 21),
    ],
)  # fmt: skip
def test_a_range_that_cannot_be_is_refused(low, high, bits):
    with pytest.raises(ReportError, match="a range"):
        Range(low, high, bits)


@pytest.mark.parametrize("wrong", VECTORS["refused_layouts"])
def test_a_plan_with_a_wrong_range_is_refused(wrong):
    plan = json.loads(linear.plan().encode())
    text = json.dumps(plan | {"report": VECTORS["refused_layouts"][wrong]}).encode()
    with pytest.raises(PlanError, match="range"):
        Plan.decode(text)


def test_a_plan_with_ranges_is_read_as_it_was_written():
    plan = replace(linear.plan(), report=LAYOUT)
    assert Plan.decode(plan.encode()) == plan
    assert Plan.decode(plan.encode()).encode() == plan.encode()


def test_a_segment_without_a_range_is_written_as_before():
    assert b"range" not in linear.plan().encode()
    assert msgspec.json.encode(Segment("delta", 4, "mean")) == (
        b'{"name":"delta","size":4,"reduction":"mean","labels":[],"codecs":[]}'
    )


def test_a_device_clamps_values_to_their_range():
    values = LAYOUT.concatenate(parts([1.5, -7], [-3, 2e6]), 1.0)
    assert values[100:104].tolist() == [1, -1, 0, 2**20 - 1]
    inside = LAYOUT.concatenate(parts([0.3, -1]), 1.0)
    assert inside[100:104].tolist() == [np.float32(0.3), -1, 3, 4]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_and_never_clamped(bad):
    with pytest.raises(ReportError, match="segment 'share' holds a non-finite value"):
        LAYOUT.concatenate(parts([0, bad]), 1.0)


def test_compression_leaves_segments_with_ranges_as_they_are():
    layout = replace(LAYOUT, segments=(replace(LAYOUT.segments[1], size=500), *LAYOUT.segments[2:], LAYOUT.segments[0]))
    coded = Compression.parse("rotation,subsample=0.1,bits=2").coded(layout, ParamSchema((TensorSpec("w", (100,)),)))
    assert coded.segments[:-1] == layout.segments[:-1]
    assert coded.segments[-1].coded_size == 10


def test_values_with_a_range_are_not_rounded_in_the_clear():
    layout = replace(LAYOUT, bits=2)
    report = layout.weigh(layout.concatenate(parts([0.3, -0.123]), 1.0), 1.0)
    np.testing.assert_array_equal(
        dequantise(memoryview(quantise(layout, report, StreamKey(1, 2, 3))), layout)[100:], report[100:]
    )


def test_a_range_decides_the_fixed_point_numbers_of_its_segment():
    delta, share, counted, *metrics = masking.fixed_points(LAYOUT, BOUNDS)
    assert (delta.norm, delta.bits, delta.weighted) == (2.0, 16, True)
    assert (share.low, share.high, share.bits, share.norm, share.weighted) == (-1, 1, 20, 0, False)
    assert (counted.low, counted.step) == (0, 1)
    assert [one.size for one in metrics] == [2, 2]


def test_with_noise_all_means_are_one_vector_whatever_their_ranges():
    noisy = replace(BOUNDS, noise_multiplier=1.0, honest=5)
    [point] = masking.fixed_points(LAYOUT, noisy)
    assert (point.size, point.norm) == (102, 2.0)
    assert masking.summed_values(LAYOUT, noisy, np.ones(LAYOUT.size - 1, np.float32)).size == 102


@pytest.mark.parametrize(
    "value", [0, 1, -1, 15.99, 16, 127, 2**20 - 1, MOST - 1, -MOST, 1 / 3, -1e-7, 1e-30, 70_000.3, -5_000_000.5]
)
def test_a_sum_without_a_range_is_whole_in_two_numbers(value):
    layout = ReportLayout((Segment("weight", 1, "sum"), Segment("a.metrics", 1, "sum", ("examples",))), "uniform")
    given = np.array([value], np.float32)
    units, rest = masking.fixed_points(layout, BOUNDS)
    summed = masking.summed_values(layout, BOUNDS, given)
    assert all(point.low <= one <= point.high for point, one in zip((units, rest), summed, strict=True))
    rounded = np.round(summed / [units.step, rest.step]) * [units.step, rest.step]
    joined = masking.join_weight(layout, 1, rounded.astype(np.float64))
    assert joined[0] == 1
    assert abs(joined[1] - float(given[0])) <= masking.METRIC_STEP / 2


@pytest.mark.parametrize("value", [1e8, 3e38])
def test_a_sum_that_is_too_great_counts_as_the_greatest(value):
    layout = ReportLayout((Segment("weight", 1, "sum"), Segment("a.metrics", 1, "sum", ("examples",))), "uniform")
    units, rest = masking.fixed_points(layout, BOUNDS)
    summed = masking.summed_values(layout, BOUNDS, np.array([value], np.float32)).astype(np.float64)
    held = np.clip(summed, [units.low, rest.low], [units.high, rest.high])
    assert masking.join_weight(layout, 1, held)[1] == pytest.approx(MOST, abs=2 * masking.METRIC_UNIT)


def test_a_layouts_hash_covers_its_ranges():
    hashes = {
        masking.layout_hash(replace(LAYOUT, segments=(LAYOUT.segments[0], *changed, *LAYOUT.segments[2:])), 0)
        for changed in (
            [Segment("share", 2, "mean")],
            *([Segment("share", 2, "mean", range=one)] for one in (SHARES, Range(-1, 1, 19), Range(-1, 2, 20))),
        )
    }
    assert len(hashes) == 4


@dataclass(frozen=True, slots=True)
class Shares(FedAvg):
    """Averaging that also reports a share."""

    name: ClassVar[str] = "shares"

    @property
    def ranges(self):
        return {"share": SHARES}

    def report(self, broadcast, carries):
        return {**FedAvg.report(self, broadcast, carries), "share": 0.0 * broadcast["params"][..., :1] + 0.5}


@dataclass(frozen=True, slots=True)
class Misnamed(Shares):
    name: ClassVar[str] = "misnamed"

    @property
    def ranges(self):
        return {"shares": SHARES}


def test_an_algorithm_gives_the_ranges_of_its_report():
    algorithm = Shares(weighting="uniform")
    check(algorithm)
    assert ranges_of(algorithm) == {"share": SHARES}
    assert ranges_of(FedAvg()) == {}
    assert ranges_of(Exchange((), dict, dict, dict)) == {}


def test_a_clipped_algorithm_has_no_ranges():
    [trip] = Clipped(Shares(weighting="uniform"), Clipping()).trips
    assert ranges_of(trip) == {}


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [(Shares(), "needs weighting='uniform'"), (Misnamed(weighting="uniform"), "for 'shares'; it maps names")],
)
def test_ranges_that_no_report_can_have_are_refused(algorithm, says):
    with pytest.raises(InvalidAlgorithm, match=says):
        check(algorithm)
