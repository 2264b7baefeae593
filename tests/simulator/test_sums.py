"""Sums in simulations: blocks, ranges, masks, and rounds of one step."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from coordinator.rules.aggregation import held_sum
from coordinator.rules.private_sums import packed_segments
from coordinator.rules.task_settings import Secagg
from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.runner import execute
from export.build import build_plan
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import trips_of
from fedcore.algorithms.clipped import Clipped, Clipping
from fedcore.algorithms.fed_avg import FedAvg
from fedcore.batching import StreamKey
from fedcore.codecs import RoundKey
from fedcore.compression import Compression
from fedcore.errors import PrivacyError, ReportError
from fedcore.masking import least_square
from fedcore.params import ParamSchema, TensorSpec
from fedcore.privacy.accounting import spent
from fedcore.privacy.settings import LedgerEntry, Noise, Privacy
from fedcore.release import SumBounds
from fedcore.report import LOSS_COUNTS, WEIGHT, ReportLayout, Segment
from fedcore.schedule import Range
from secagg.masking import noise_share
from secagg.parameters import least_honest
from simulator import SimulationConfig, simulate
from simulator.configuration import PrivateTraining
from simulator.engine import CompressedReports, Engine
from simulator.engines.oracle import CohortOracle, NotAffine, one_step
from simulator.engines.sums import RoundSums, SumsLayout, layouts_of
from simulator.errors import EngineError
from simulator.masked_sums import MaskedSum, secure_task, square_of
from simulator.private_training import Cohorts
from tests.fedcore.variants import VARIANTS
from tests.simulator.reference import reference_round
from tests.simulator.test_engine import uneven


def test_bounded_reports_are_held_to_the_bound_as_on_devices():
    layout = SumsLayout({"delta": 2, "gradient": 1}, {}, bounded=True)
    sums = RoundSums(layout, torch.empty(layout.size, dtype=torch.float64))
    report = {
        "delta": torch.tensor([[3.0, 0.0], [0.0, 0.5], [math.nan, 1.0]]),
        "gradient": torch.tensor([[4.0], [0.0], [0.0]]),
    }
    finite = sums.add(report, {}, torch.ones(3), {}, torch.tensor([1.0]))
    assert finite.tolist() == [True, True, False]
    torch.testing.assert_close(sums.report["delta"], torch.tensor([0.6, 0.5], dtype=torch.float64))
    torch.testing.assert_close(sums.report["gradient"], torch.tensor([0.8], dtype=torch.float64))
    assert (float(sums.weight), float(sums.contributors)) == (3, 2)


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


LAYOUT = ReportLayout((Segment("delta", 500, "mean"), Segment(WEIGHT, 1, "sum")), "uniform")
MASKED = Secagg(clip_norm=2.0, bits=8)
CLIPPED = {"weighting": "uniform", "clip_norm": 0.5}


def config(**values):
    base = {"model": "logreg", "clients": 30, "rounds": 2, "cohort": 16, "engine": "torch", "processes": 1}
    return SimulationConfig(**base | values)


def total(masked, values_KV, number=1, seed=0):
    summed = MaskedSum(masked, LAYOUT, number)
    for slot, values_V in enumerate(values_KV):
        summed.add(values_V.astype(np.float32), 1.0, StreamKey(seed, number, slot))
    return summed.total(RoundKey(seed, number))


def test_a_masked_sum_is_the_sum_but_for_rounding():
    values_KV = np.random.default_rng(0).normal(size=(40, 500)) / 30
    masked = secure_task(Secagg(clip_norm=2.0, bits=12, group_size=16), Cohorts(40), 1, [LAYOUT])
    summed_L = total(masked, values_KV)
    assert summed_L[-1] == 40
    step = 4 / (2**12 - 1)
    assert np.abs(summed_L[:-1] - values_KV.sum(0)).max() < 40 * step
    assert np.abs(summed_L[:-1] - values_KV.sum(0)).mean() == pytest.approx(step * np.sqrt(40 / 6 * 2 / np.pi), rel=0.2)


@pytest.mark.parametrize("bits", [2, 4, 20])
@pytest.mark.parametrize("steps", ["subsample=0.1", "rotation,subsample=0.1", "low_rank=2"])
def test_honest_masked_reports_as_long_as_the_clip_norm_are_never_held(steps, bits, monkeypatch):
    """Before they are encoded; few bits make the sum longer, also of devices whose updates all point the same way."""
    schema, source = ParamSchema((TensorSpec("w", (100, 5)),)), np.random.default_rng(bits)
    layout = Compression.parse(steps).coded(LAYOUT, schema)
    masked = secure_task(Secagg(clip_norm=2.0, bits=bits), Cohorts(16), 30, [layout])
    monkeypatch.setattr("simulator.masked_sums.held_sum", lambda settings, layout, decoded_L, devices: decoded_L)
    update_V = source.normal(size=500)
    update_V *= 2 / np.linalg.norm(update_V)
    for number in range(1, 31):
        key, summed = RoundKey(0, number), MaskedSum(masked, layout, number)
        coded = layout.encode({"delta": update_V.astype(np.float32)}, key)
        for slot in range(16):
            summed.add(layout.concatenate(coded, 1.0), 1.0, StreamKey(0, number, slot))
        decoded_L = summed.total(key)
        np.testing.assert_array_equal(held_sum(masked, layout, decoded_L, 16), decoded_L)


def test_rounding_depends_on_the_seed_alone():
    values_KV, masked = np.full((16, 500), 0.01), secure_task(MASKED, Cohorts(16), 1, [LAYOUT])
    np.testing.assert_array_equal(total(masked, values_KV), total(masked, values_KV))
    assert (total(masked, values_KV) != total(masked, values_KV, seed=1)).any()


def test_a_sum_has_the_noise_of_all_its_devices():
    promise = Privacy(epsilon=9.0, delta=1e-6, users=100, noise_multiplier=1.5, mechanism="distributed")
    masked = secure_task(MASKED, Cohorts(16), 1, [LAYOUT], promise)
    noise_NV = np.array([total(masked, np.zeros((16, 500)), number)[:-1] for number in range(1, 41)])
    square, honest = square_of(MASKED, LAYOUT), least_honest(16, 16)
    step = 2.0 / (2**7 - 1)
    variance = 16 * noise_share(1.5, square, honest) * step**2
    statistic = float((noise_NV**2).sum() / variance)
    assert chi2.ppf(1e-4, noise_NV.size) < statistic < chi2.ppf(1 - 1e-4, noise_NV.size)
    assert variance >= (1.5 * 2.0) ** 2 * 16 / honest


def test_a_simulation_with_fine_masks_reaches_the_model_of_one_in_clear():
    settings = {"weighting": "uniform"}
    plain = simulate(config(settings=settings))
    masked = simulate(config(settings=settings, secagg=Secagg(bits=20)))
    again = simulate(config(settings=settings, secagg=Secagg(bits=20)))
    assert masked.test_loss == pytest.approx(plain.test_loss, rel=1e-4)
    assert masked.params_sha256 == again.params_sha256 != plain.params_sha256


def test_weights_by_examples_are_capped_under_masks():
    plain = simulate(config())
    masked = simulate(config(secagg=Secagg(bits=20, max_examples=1000)))
    uniform = simulate(config(secagg=Secagg(bits=20, max_examples=1)))
    assert masked.test_loss == pytest.approx(plain.test_loss, rel=1e-3)
    assert uniform.test_loss == pytest.approx(simulate(config(settings={"weighting": "uniform"})).test_loss, rel=1e-3)


@pytest.mark.parametrize(("bits", "warned"), [(4, True), (16, False)])
def test_rounding_that_a_task_is_refused_for_is_logged(bits, warned, caplog):
    simulate(config(rounds=1, secagg=Secagg(bits=bits)))
    assert ("a task with these settings would be refused: secure aggregation rounds" in caplog.text) == warned


@pytest.mark.parametrize("bits", [3, 12])
def test_noise_of_devices_spends_the_budget_in_the_last_round(bits):
    private = PrivateTraining(epsilon=30.0, delta=1e-4, mechanism="distributed")
    masked = Secagg(clip_norm=0.5, bits=bits)
    result = simulate(config(settings=CLIPPED, privacy=private, secagg=masked, compress="rotation,subsample=0.5"))
    assert 29.9 < result.epsilon <= 30.0


def test_coarse_steps_cost_a_little_epsilon():
    noise = Noise(noise_multiplier=1.0, mechanism="distributed")
    parts = {name: getattr(noise, name) for name in Noise.__struct_fields__}
    row = LedgerEntry(**parts, round=0, clip=1.0, devices=0, square=square_of(Secagg(bits=2), LAYOUT))
    assert spent([row] * 3, 1e-5) > spent([noise] * 3, 1e-5)


def test_the_square_is_that_of_segments_whatever_the_noise():
    bounds = SumBounds(clip_norm=2.0, bits=8, max_examples=9, min_sum=16, noise_multiplier=0.7, honest=12)
    assert packed_segments(LAYOUT, bounds, 20)[0].most_square == square_of(MASKED, LAYOUT) >= least_square(8)


PRIVATE = PrivateTraining(noise_multiplier=1.0, delta=1e-4, mechanism="distributed")


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"secagg": None}, EngineError, "set secagg too"),
        (
            {"privacy": PrivateTraining(noise_multiplier=1.0, delta=1e-4)},
            EngineError,
            "must be distributed with secagg",
        ),
        ({"cohort": 7}, EngineError, "goal must be at least 8"),
        ({"settings": CLIPPED | {"clip_quantile": 0.5}}, PrivacyError, "leave clip_quantile out"),
        ({"compress": "rotation,bits=4"}, EngineError, "leave bits out"),
        ({"secagg": Secagg(bits=20, clip_norm=0.5)}, EngineError, "cannot add the noise"),
        ({"baseline": "pooled", "privacy": PrivateTraining()}, EngineError, "secagg is for federated training"),
    ],
)
def test_what_no_secure_round_can_be_is_refused(changed, error, said):
    with pytest.raises(error, match=said):
        simulate(
            config(**{"privacy": PRIVATE, "secagg": Secagg(clip_norm=0.5, bits=12), "settings": CLIPPED} | changed)
        )


COUNT_K1, WEIGHT_K = torch.tensor([[2.0], [3.0], [5.0]]), torch.tensor([2.0, 3.0, 5.0])


def test_an_affine_report_gives_the_sum_of_the_reports_of_clients():
    torch.manual_seed(0)
    centres_KD, affine = torch.randn(3, 4), set()

    def grad(params_D):
        gradient_KD = params_D - centres_KD
        return gradient_KD.sum(-1, keepdim=True), gradient_KD, COUNT_K1

    for algorithm in VARIANTS:
        (trip,) = trips_of(algorithm)
        received = trip.broadcast(algorithm.init(torch.randn(4)))
        try:
            found = one_step(trip, received, COUNT_K1)
            gradient_D = found.gradient_weights(WEIGHT_K) @ grad(found.point)[1]
        except (NotAffine, ValueError):
            continue
        affine.add(algorithm.name)
        carry = trip.passes[0].step(trip.passes[0].begin(received), received, grad)
        expected = trip.report(received, {trip.passes[0].name: carry})
        sums = found.sums(gradient_D, WEIGHT_K)
        assert sums.keys() == expected.keys()
        for name, one in expected.items():
            torch.testing.assert_close(sums[name], WEIGHT_K @ one.expand(3, -1), atol=1e-5, rtol=1e-5)
    assert {"fedavg", "fedsgd", "fedprox", "fednova", "fedbuff", "fedadam", "fedyogi", "fedlamb"} <= affine


@pytest.mark.parametrize(
    "how",
    [abs, lambda v: v * v, lambda v: v**2, lambda v: 1 / v, lambda v: v == 0, lambda v: v or 0.0, lambda v: None],
)
def test_a_report_that_is_not_affine_is_found_out(how):
    class Odd(FedAvg):
        def report(self, broadcast, carries):
            return {"delta": how(carries["train"]["params"] - broadcast["params"])}

    with pytest.raises(NotAffine):
        one_step(Odd(), {"params": torch.ones(4)}, COUNT_K1)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("fedavg", {"client_optimizer": "momentum", "weighting": "uniform"}), ("fedprox", {}), ("fedsgd", {})],
)
def test_one_gradient_trains_clients_of_one_step_as_the_reference_does(name, settings, monkeypatch):
    monkeypatch.setattr(CohortOracle, "__call__", None)  # the gradient of each client
    population, model = uneven(), Model(load("digits_cnn"))
    algorithm = create(name, {"batch_size": 17, **settings})
    engine = Engine(model, algorithm, population, seed=7)
    state = engine.state
    for number, cohort in enumerate([[0, 1, 2, 3], [2, 0, 1]], start=1):
        engine.run_round(number, cohort)
        state = reference_round(model, algorithm, state, [population.shard(c) for c in cohort], number, 7)
        for key, vector in state.items():
            np.testing.assert_allclose(engine.state[key], vector, atol=1e-6)
