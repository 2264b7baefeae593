"""Reports with codecs are bounded by what they are decoded to, in the clear and in the sums of secure rounds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from coordinator.commands import CountReport
from coordinator.rules.aggregation import bounded_report
from coordinator.rules.task_settings import ClearReports
from coordinator.store.tasks import Secagg
from fedcore.codecs import RoundKey
from fedcore.compression import Compression
from fedcore.params import ParamSchema, TensorSpec
from fedcore.report import Segment
from secagg import packing
from tests.coordinator.bundles import make_bundle, make_plan, report_vector
from tests.coordinator.test_secure import NAMES, SECURE, Device, run

SHAPE = (1024, 4)
SIZE = math.prod(SHAPE)
SCHEMA = ParamSchema((TensorSpec("w", SHAPE),))
SEED = 5
GROWTHS = {
    "rotation": 1,
    "subsample=0.5": 2,
    "subsample=0.01": 100,
    "rotation,subsample=0.01": 100,
    "low_rank=1": 1024,
    "low_rank=1,rotation,subsample=0.25": 4096,
    "count_sketch=0.03": math.pi / 2 * SIZE / 120,
}
"""How many times as many values a report has as travel, at least; of a sketch π/2 times that."""
SINGLE = 1e-5
LIE = RoundKey(SEED, 1)


def bound(steps):
    """How long an update may be decoded that is 1 long before it is encoded."""
    return min(GROWTHS[steps], 2 * math.sqrt(GROWTHS[steps]))


def coded(steps):
    """A plan with a matrix of SIZE values, whose reports take these steps."""
    codecs = Compression.parse(steps).codecs(SIZE, SCHEMA)
    metrics = Segment("train.metrics", 2, "sum", ("examples", "loss"))
    return make_plan(
        SIZE, segments=(Segment("delta", SIZE, "mean", codecs=codecs), Segment("weight", 1, "sum"), metrics)
    )


def decoded(plan, values_C, key=LIE):
    return plan.report.decode(report_vector(values_C, 1.0, plan=plan), key)[:SIZE]


def lie(plan, length):
    """Values as they travel, that long, which are decoded to something as long as can be found."""
    size = plan.report.segments[0].coded_size
    sparse = np.eye(min(size, 32), size, dtype=np.float32)
    even = np.full(size, 1 / math.sqrt(size), np.float32)
    return length * max([*sparse, even], key=lambda values_C: np.linalg.norm(decoded(plan, values_C)))


def begin(register, tmp_path, plan, **settings):
    return register(make_bundle(tmp_path / "coded", plan, start=np.zeros(SIZE, np.float32)), seed=SEED, **settings)


def report(desk, plan, *reports):
    """One round in which a device reports each of these values that travel."""
    for given, values_C in zip(desk.assign(*(f"d{number}" for number, _ in enumerate(reports))), reports, strict=True):
        desk.ask(CountReport(given.assignment, f"{given.slot:064}", report_vector(values_C, 1.0, plan=plan)))
    desk.pass_time(1)


@pytest.mark.parametrize("length", [1.0, 100.0, 3e38])
@pytest.mark.parametrize("steps", GROWTHS)
def test_one_liar_moves_a_model_by_its_share_of_the_bound_at_most(register, store, desk, tmp_path, steps, length):
    plan = coded(steps)
    task = begin(register, tmp_path, plan, goal=3, clear=ClearReports(max_norm=1.0))
    false = lie(plan, length)
    report(desk, plan, false, 0 * false, 0 * false)
    assert np.linalg.norm(store.checkpoint(task)["params"]) <= bound(steps) / 3 * (1 + SINGLE)


@pytest.mark.parametrize("length", [1.0, 1e30])
def test_two_liars_who_share_a_sketchs_rows_move_no_more_than_two(register, store, desk, tmp_path, length):
    """Each has a row for itself, of which the median of three rows alone shows nothing."""
    steps = "count_sketch=0.03"
    plan = coded(steps)
    task = begin(register, tmp_path, plan, goal=3, clear=ClearReports(max_norm=1.0))
    rows = np.eye(3, dtype=np.float32).repeat(plan.report.segments[0].coded_size // 3, axis=1)
    report(desk, plan, length * rows[0], length * rows[1], 0 * rows[2])
    assert np.linalg.norm(store.checkpoint(task)["params"]) <= 2 * bound(steps) / 3 * (1 + SINGLE)


HONEST = ("subsample=0.01", "rotation,subsample=0.01", "low_rank=2", "low_rank=2,rotation,subsample=0.5")
SKETCHES = ("count_sketch=0.03", "rotation,count_sketch=0.5")


@pytest.mark.parametrize("steps", [*HONEST, *SKETCHES])
def test_honest_updates_of_max_norm_lose_nothing_on_average(steps):
    plan, clear, source = coded(steps), ClearReports(max_norm=1.0), np.random.default_rng(0)
    update = source.standard_normal(SIZE).astype(np.float32)
    update /= np.linalg.norm(update) * (1 + SINGLE)
    along, of_bounded = 0.0, 0.0
    for number in range(1, 200):
        key = RoundKey(SEED, number)
        honest = report_vector(plan.report.encode({"delta": update}, key)["delta"], 1.0, plan=plan)
        along += update @ plan.report.decode(honest, key)[:SIZE]
        of_bounded += update @ plan.report.decode(bounded_report(clear, honest, plan.report, key), key)[:SIZE]
    assert 0.998 * along < of_bounded <= along


@pytest.mark.parametrize("steps", ["subsample=0.01", "low_rank=1"])
def test_one_liar_in_a_secure_sum_moves_it_by_the_bound_at_most(register, store, desk, tmp_path, monkeypatch, steps):
    """Its values are in their range, and the sum is no longer than that of eight may be: nobody sees that it lies."""
    plan = coded(steps)
    greatest = np.ones(plan.report.segments[0].coded_size, np.float32)
    secagg = Secagg(clip_norm=1.0, max_examples=1, phase_s=5.0)
    task = begin(register, tmp_path, plan, **SECURE | {"secagg": secagg})
    liar, *honest = [Device(desk, given, greatest * (given.slot == 0), plan=plan) for given in desk.assign(*NAMES)]
    run([liar, *honest], ("advertise", "share", "open"))
    run(honest, ("upload",))
    with monkeypatch.context() as patched:
        encode = packing.encode
        patched.setattr(packing, "encode", lambda parts, *rest: encode([loud(one) for one in parts], *rest))
        liar.upload()
    run([liar, *honest], ("confirm", "reveal"))
    moved = np.linalg.norm(store.checkpoint(task, 1)["params"])
    step = 2 / (2**secagg.bits - 1)
    rounding = GROWTHS[steps] * step * math.sqrt(greatest.size / len(NAMES))
    assert moved <= bound(steps) * (1 + SINGLE) + rounding


def loud(segment):
    """The segment for a device that does not clip."""
    return replace(segment, norm=8 * segment.norm)
