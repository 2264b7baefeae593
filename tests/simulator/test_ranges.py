"""Algorithms whose reports have ranges: exported, run as on a device, and simulated."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch

from coordinator.rules.task_settings import Secagg
from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.runner import execute
from export.build import build_plan
from export.model import Model
from export.models import load
from fedcore.algorithms.clipped import Clipped, Clipping
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.batching import StreamKey
from fedcore.codecs.compression import Compression
from fedcore.errors import ReportError
from fedcore.ranges import Range
from fedcore.report import LOSS_COUNTS
from simulator.compressed import CompressedReports
from simulator.engine import Engine
from simulator.engines.sums import RoundSums, SumsLayout, layouts_of
from simulator.masked_sums import MaskedSum, secure_task
from simulator.private_training import Cohorts
from tests.simulator.test_engine import uneven

FAR = Range(-0.5, 0.25, 20)
SIZES = (8, 17, 5, 12, 9, 3, 4, 6)


@dataclass(frozen=True, slots=True)
class Far(FedAvg):
    """Averaging that keeps the mean of 30 times the first of each update, most of which are beyond their range."""

    name: ClassVar[str] = "far"

    @property
    def ranges(self):
        return {"far": FAR}

    def init(self, params_D):
        return {"params": params_D, "far": 0.0 * params_D[..., :100]}

    def broadcast(self, state):
        return {"params": state["params"]}

    def report(self, broadcast, carries):
        report = FedAvg.report(self, broadcast, carries)
        return {**report, "far": 30.0 * report["delta"][..., :100]}

    def update(self, state, mean, step=None):
        return {"params": state["params"] + mean["delta"], "far": mean["far"]}


ALGORITHM = Far(weighting="uniform", batch_size=5, client_lr=0.3)


@pytest.fixture(scope="module")
def model():
    return Model(load("logreg", (1, 8, 8), 10), 3)


@pytest.fixture(scope="module")
def users():
    return uneven(SIZES)


@pytest.fixture(scope="module")
def expected(model, users):
    """The mean of "far" over what devices report."""
    plan, blobs = build_plan(model, ALGORITHM)
    total = np.zeros(100)
    for slot, _ in enumerate(SIZES):
        runtime = OnnxRuntime()
        graphs = {name: runtime.load(blobs[ref], name) for name, ref in plan.graphs["onnx"].items()}
        found = execute(plan, graphs, {"params": model.initial}, users.shard(slot), StreamKey(0, 1, slot))
        _, at, *_ = plan.report.slices()
        total += found.values[at[1]]
    return total / len(SIZES)


def far(model, users, **options):
    engine = Engine(model, ALGORITHM, users, seed=0, **options)
    engine.run_round(1, range(len(SIZES)))
    return engine.state["far"]


def far_away(model, users):
    """The first values of the update after the same round."""
    engine = Engine(model, ALGORITHM, users, seed=0)
    engine.run_round(1, range(len(SIZES)))
    return (engine.state["params"] - model.initial)[:100]


def test_a_plan_has_the_ranges_of_its_algorithm(model):
    plan, _ = build_plan(model, ALGORITHM, targets=())
    assert {one.name: one.range for one in plan.report.segments if one.ranged and one != LOSS_COUNTS} == {"far": FAR}
    clipped, _ = build_plan(model, Clipped(ALGORITHM, Clipping()), targets=())
    assert clipped.report.bounded
    assert not any(one.ranged for one in clipped.report.segments)


def test_the_engine_clamps_as_devices_do(model, users, expected):
    """Values beyond the range count as its ends, one device after the other."""
    assert np.abs(30 * far_away(model, users)).max() > 1
    np.testing.assert_allclose(far(model, users), expected, atol=1e-5)


def test_a_masked_sum_in_the_engine_has_the_precision_of_the_range(model, users, expected):
    layouts = [
        CompressedReports(Compression(), model.schema, 0, "uniform").layout(one.report, one.ranges)
        for one in layouts_of(model, ALGORITHM)
    ]
    masked = secure_task(Secagg(clip_norm=10.0, bits=4), Cohorts(len(SIZES)), 1, layouts)
    np.testing.assert_allclose(far(model, users, masked=partial(MaskedSum, masked)), expected, atol=1e-5)


def test_compression_in_the_engine_leaves_ranges_as_they_are(model, users, expected):
    for steps in ("rotation,subsample=0.1", "rotation,bits=1"):
        compressed = far(model, users, compression=Compression.parse(steps))
        np.testing.assert_allclose(compressed, expected, atol=1e-5)


def test_a_client_with_an_infinite_value_is_left_out_and_not_clamped():
    layout = SumsLayout({"far": 2}, {}, ranges={"far": FAR})
    sums = RoundSums(layout, torch.empty(layout.size, dtype=torch.float64))
    finite = sums.add({"far": torch.tensor([[9.0, -9.0], [torch.inf, 0.0]])}, {}, torch.ones(2), {})
    assert finite.tolist() == [True, False]
    assert sums.report["far"].tolist() == [FAR.high, FAR.low]
    assert not layout.adds_up


def test_a_range_under_weighting_by_examples_makes_no_plan(model):
    with pytest.raises(ReportError, match="'far' has a range, and is multiplied by a weight"):
        build_plan(model, Far(), targets=())
