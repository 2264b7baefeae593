"""Masked reports in the engine: their rounding, the noise of devices, and what no secure round can be."""

import numpy as np
import pytest
from scipy.stats import chi2

from coordinator.rules.aggregation import held_sum
from coordinator.rules.private_sums import packed_segments
from coordinator.rules.task_settings import Secagg
from fedcore.batching import StreamKey
from fedcore.codecs.codec import RoundKey
from fedcore.codecs.compression import Compression
from fedcore.errors import PrivacyError
from fedcore.masking import least_square
from fedcore.params import ParamSchema, TensorSpec
from fedcore.privacy.accounting import spent
from fedcore.privacy.settings import LedgerEntry, Noise, Privacy
from fedcore.release import SumBounds
from fedcore.report import WEIGHT, ReportLayout, Segment
from secagg.masking import noise_share
from secagg.parameters import least_honest
from simulator import SimulationConfig, simulate
from simulator.configuration import PrivateTraining
from simulator.errors import EngineError
from simulator.masked_sums import MaskedSum, secure_task, square_of
from simulator.private_training import Cohorts

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
