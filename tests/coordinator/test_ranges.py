"""Segments with ranges in rounds: exact counts and fine means under masks, and clamped reports in the clear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from coordinator.commands import CountReport
from coordinator.rules.aggregation import bounded_report, collector, in_words
from coordinator.rules.private_sums import packed_segments
from coordinator.rules.release import check_masked_rounding
from coordinator.rules.task_settings import ClearReports, TaskSettings
from fedcore.algorithms import ALGORITHMS
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.codecs import RoundKey
from fedcore.params import VectorSpec
from fedcore.report import ReportLayout, Segment
from fedcore.schedule import Range
from secagg import packing
from secagg.errors import HeadroomError
from secagg.packing import check_headroom
from tests.coordinator.bundles import make_bundle, make_plan
from tests.coordinator.conftest import states
from tests.coordinator.test_secure import BOUNDS, NAMES, PHASES, SECURE, Device, run

SHARE, BINS, COUNT = Range(-1, 1, 20), Range(0, 1, 1), Range(0, 2**20 - 1, 20)
RANGES = {"moments": SHARE, "bins": BINS, "count": COUNT}
SIZES = {"moments": 3, "bins": 4, "count": 1}
METRICS = Segment("train.metrics", 3, "sum", ("examples", "loss", "other"))
RANGED = tuple(Segment(name, SIZES[name], "mean", range=one) for name, one in RANGES.items())
LAYOUT = ReportLayout((Segment("delta", 4, "mean"), *RANGED, Segment("weight", 1, "sum"), METRICS), "uniform")
KEY, CLEAR = RoundKey(0, 1), ClearReports(max_norm=1.0)


@dataclass(frozen=True, slots=True)
class Measuring(FedAvg):
    """Averaging that keeps the means of what devices measure."""

    name: ClassVar[str] = "measuring"

    @property
    def ranges(self):
        return RANGES

    def init(self, params_D):
        return {"params": params_D, **{name: 0.0 * params_D[:size] for name, size in SIZES.items()}}

    def broadcast(self, state):
        return state

    def report(self, broadcast, carries):
        measured = {name: 0.0 * broadcast["params"][..., :size] for name, size in SIZES.items()}
        return {**FedAvg.report(self, broadcast, carries), **measured}

    def update(self, state, mean, step=None):
        return {"params": state["params"] + mean["delta"], **{name: mean[name] for name in SIZES}}


def parts_of(number):
    """What device `number` reports."""
    return {
        "delta": np.zeros(4, np.float32),
        "moments": np.array([number / 7, -((number / 7) ** 2), 1 / 3], np.float32),
        "bins": np.eye(4, dtype=np.float32)[number % 4],
        "count": np.array([2**20 - 1 - number], np.float32),
        "train.metrics": np.array([70_001 + number, 12_345.678 * (number + 1), -3.3 * number], np.float32),
    }


def mean(name, devices=8):
    return np.mean([parts_of(number)[name].astype(np.float64) for number in range(devices)], axis=0)


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "measuring", Measuring)
    sent = (VectorSpec("params", 4), *(VectorSpec(name, size) for name, size in SIZES.items()))
    plan = msgspec.structs.replace(make_plan(), broadcast=sent, report=LAYOUT)
    return make_bundle(tmp_path / "measuring", plan, "measuring", {"weighting": "uniform"})


@pytest.fixture
def seats(bundle, register, desk, monkeypatch):
    """A task, and eight devices in its secure round, each with the report of `parts_of` its slot."""
    task = register(bundle, **SECURE)
    monkeypatch.setattr(
        "tests.coordinator.test_secure.report_values", lambda parts, *_: LAYOUT.concatenate(parts, weight=1.0)
    )
    return task, [Device(desk, given, parts_of(given.slot), plan=bundle.plan) for given in desk.assign(*NAMES)]


def upload_as(liar, monkeypatch, encode):
    """Upload what a device packs that does it in its own way."""
    with monkeypatch.context() as patched:
        patched.setattr(packing, "encode", encode)
        liar.upload()


def test_counts_of_a_secure_round_are_exact_and_means_fine(seats, store):
    task, devices = seats
    run(devices)
    after = store.checkpoint(task, 1)
    np.testing.assert_array_equal(after["bins"], mean("bins"))
    assert after["count"][0] == np.float32(mean("count")[0])
    np.testing.assert_allclose(after["moments"], mean("moments"), atol=2e-6)


def test_metrics_of_a_secure_round_are_fine_and_examples_exact(seats, store):
    task, devices = seats
    run(devices)
    examples, loss, other = mean("train.metrics")
    found = store.rounds(task)[0].metrics
    assert found["train.loss"] == pytest.approx(loss / examples, abs=1e-9)
    assert found["train.other"] == pytest.approx(other / examples, abs=1e-9)


def test_a_device_beyond_its_range_moves_a_secure_mean_by_the_range(seats, store, monkeypatch):
    """Its values are clamped where they are packed, however great they are."""
    task, [liar, *honest] = seats
    run([liar, *honest], PHASES[:3])
    run(honest, ("upload",))
    loud = np.concatenate([np.zeros(4), np.full(8, 3e38), np.zeros(6)]).astype(np.float32)
    encode = packing.encode
    upload_as(liar, monkeypatch, lambda segments, _, *rest: encode(segments, loud, *rest))
    run([liar, *honest], PHASES[4:])
    after, others = store.checkpoint(task, 1), [parts_of(device.given.slot) for device in honest]
    for name, within in RANGES.items():
        expected = (sum(one[name].astype(np.float64) for one in others) + within.high) / 8
        np.testing.assert_allclose(after[name], expected, atol=2e-6 * within.high)


def test_a_sum_beyond_the_range_of_all_devices_is_dropped(seats, store, monkeypatch):
    """A device that packs otherwise than the invitation says: nobody sees its report, but everybody the sum."""
    task, [liar, *honest] = seats
    run([liar, *honest], PHASES[:3])
    run(honest, ("upload",))
    encode = packing.encode

    def greedy(*given):
        words = encode(*given)
        words[5] += np.uint64(9)  # to the first bin: after the weight, two words of delta and two of moments
        words[-1] = packing._check_word(words[:-1])
        return words

    upload_as(liar, monkeypatch, greedy)
    run([liar, *honest], PHASES[4:])
    [attempt, *_] = store.rounds(task)
    assert (attempt.state.value, attempt.reason) == ("abandoned", "sum-out-of-range")


def test_groups_with_too_many_devices_for_their_fields_are_refused():
    check_headroom(packed_segments(LAYOUT, BOUNDS, 4096), 4096)
    with pytest.raises(HeadroomError, match="segment 1: 4098 values of 20 bits do not fit into fields of 32 bits"):
        check_headroom(packed_segments(LAYOUT, msgspec.structs.replace(BOUNDS, bits=8), 4098), 4098)


def report(parts=None, **changes):
    """A weighted report in the clear, without the device's own clamps."""
    values = np.concatenate([(parts or parts_of(3) | changes)[one.name] for one in LAYOUT.unweighted])
    return LAYOUT.weigh(values.astype(np.float32), 1.0)


def test_a_report_in_the_clear_within_its_ranges_is_added_as_it_came():
    honest = report()
    assert bounded_report(CLEAR, honest, LAYOUT, KEY) is honest


def test_a_report_in_the_clear_is_clamped_to_its_ranges():
    false = report(moments=np.array([7, -1e30, 0.5]), bins=np.full(4, 2), count=np.array([-5]))
    parts = LAYOUT.split(bounded_report(CLEAR, false, LAYOUT, KEY))
    assert (parts["moments"].tolist(), parts["bins"].tolist(), parts["count"].tolist()) == ([1, -1, 0.5], [1] * 4, [0])
    np.testing.assert_array_equal(parts["train.metrics"], parts_of(3)["train.metrics"])


def test_max_norm_does_not_count_segments_with_ranges():
    long = report(delta=np.array([3, 0, 4, 0]), count=np.array([2**20 - 1]))
    parts = LAYOUT.split(bounded_report(CLEAR, long, LAYOUT, KEY))
    np.testing.assert_allclose(parts["delta"], [0.6, 0, 0.8, 0])
    assert parts["count"].tolist() == [2**20 - 1]


def test_a_false_report_moves_a_round_in_the_clear_by_the_range(bundle, store, register, desk):
    task = register(bundle, goal=2, rounds=1, over_selection=1.0)
    for given, one in zip(desk.assign("a", "b"), [report(), report(moments=np.full(3, -3e38))], strict=True):
        desk.ask(CountReport(given.assignment, f"{given.slot:064}", one))
    desk.pass_time(1)
    assert states(store, task) == [(1, 1, "committed", "")]
    np.testing.assert_allclose(store.checkpoint(task)["moments"], (parts_of(3)["moments"] - 1) / 2, rtol=1e-6)


def test_robust_estimates_are_of_what_has_no_range():
    """The median of one-hot vectors would be no histogram."""
    kept = collector(LAYOUT, ClearReports(estimator="median"))
    for number, bin_ in enumerate((0, 1, 1, 2)):
        delta = np.full(4, [0, 1, 3, 100][number])
        kept.add(report(delta=delta, bins=np.eye(4)[bin_]))
    parts = LAYOUT.split(kept.total())
    np.testing.assert_array_equal(parts["bins"], [0.25, 0.5, 0.25, 0])
    np.testing.assert_array_equal(parts["delta"], np.full(4, 2))


def test_a_task_may_have_segments_with_ranges_alone():
    layout = ReportLayout((*RANGED, Segment("weight", 1, "sum")), "uniform")
    settings = TaskSettings(population="p", over_selection=1.0, **SECURE)
    check_masked_rounding(settings, Measuring(), [layout], 1000)
    plan = msgspec.structs.replace(make_plan(), report=layout)
    assert in_words(plan, settings) == in_words(plan, TaskSettings(population="p", goal=1, rounds=1)) == ""
