"""Clipping of whole reports: its equations, what hostile reports can move, and the bound that follows a quantile."""

import numpy as np
import pytest

from fedcore.algorithms import create, name_of, settings_of
from fedcore.algorithms.algorithm import trips_of
from fedcore.algorithms.check import check
from fedcore.batching import StreamKey
from fedcore.errors import InvalidSetting, ReportError
from fedcore.report import ReportLayout, Segment
from tests.fedcore.quadratics import run_device

INNERS = [
    ("fedavg", {"weighting": "uniform"}),
    ("fedadam", {"weighting": "uniform"}),
    ("mimelite", {}),
    ("mime", {}),
    ("feddane", {"weighting": "uniform"}),
]
EXAMPLES_ND = np.random.default_rng(7).normal(3.0, 1.0, (12, 5))
DIMENSIONS = 5


class Reporting:
    """An inner trip that reports what it is told to."""

    passes = ()

    def __init__(self, **vectors):
        self._vectors = {name: np.asarray(vector, np.float32) for name, vector in vectors.items()}

    def report(self, broadcast, carries):
        return self._vectors


def clipped_report(clip, quantile=0.0, **vectors):
    trip = trips_of(create("fedavg", {"weighting": "uniform", "clip_norm": clip, "clip_quantile": quantile}))[0]
    hostile = type(trip)(Reporting(**vectors), trip.clipping, trip.keys, trip.key)
    with np.errstate(all="ignore"):
        return hostile.report({"params": np.zeros(3), "clip": np.float32([clip])}, {})


def norm(report):
    return float(np.sqrt(sum((np.asarray(one, np.float64) ** 2).sum() for one in report.values())))


@pytest.mark.parametrize(("name", "settings"), INNERS)
@pytest.mark.parametrize("quantile", [0.0, 0.7])
def test_clipping_keeps_the_contract_and_is_made_again_from_its_settings(name, settings, quantile):
    algorithm = create(name, settings | {"clip_norm": "0.5", "clip_quantile": quantile})
    check(algorithm)
    assert create(name_of(algorithm), settings_of(algorithm)) == algorithm
    assert settings_of(algorithm)["clip_norm"] == 0.5


@pytest.mark.parametrize(("name", "settings"), INNERS)
@pytest.mark.parametrize("clip", [0.1, 1e6])
def test_all_vectors_of_a_report_are_scaled_together(name, settings, clip):
    inner, algorithm = create(name, settings), create(name, settings | {"clip_norm": clip})
    x_D = np.zeros(DIMENSIONS)
    for plain, trip in zip(trips_of(inner), trips_of(algorithm), strict=True):
        whole = run_device(plain, plain.broadcast(inner.init(x_D)), EXAMPLES_ND, StreamKey(1, 1, 0))
        ours = run_device(trip, trip.broadcast(algorithm.init(x_D)), EXAMPLES_ND, StreamKey(1, 1, 0))
        for key, vector in whole.items():
            np.testing.assert_allclose(ours[key], vector * min(1, clip / max(norm(whole), 1e-300)), rtol=1e-12)


@pytest.mark.parametrize(("name", "settings"), INNERS)
def test_a_bound_that_nobody_reaches_changes_no_bit_of_the_model(name, settings):
    inner, clipped = create(name, settings), create(name, settings | {"clip_norm": 1e9})
    states = []
    for algorithm in (inner, clipped):
        state = algorithm.init(np.zeros(DIMENSIONS))
        for number in range(1, 5):
            trip = trips_of(algorithm)[(number - 1) % len(trips_of(algorithm))]
            report = run_device(trip, trip.broadcast(state), EXAMPLES_ND, StreamKey(1, number, 0))
            state = trip.update(state, report)
        states.append(state)
    for key, vector in states[0].items():
        np.testing.assert_array_equal(states[1][key], vector)


@pytest.mark.parametrize("quantile", [0.0, 0.8])
@pytest.mark.parametrize("clip", [1e-3, 0.5, 30.0])
@pytest.mark.parametrize(
    "vectors",
    [
        {"delta": np.ones(10_000)},
        {"delta": np.full(10, 1e18), "gradient": np.full(5, -1e18)},
        {"delta": np.full(10, 1e-30)},
        {"delta": np.zeros(4)},
        {"delta": np.full(3, 3e38)},
        {"delta": [0.3, -0.4], "gradient": [1e-9]},
    ],
)
def test_no_report_is_longer_than_the_bound_whatever_it_holds(vectors, clip, quantile):
    report = clipped_report(clip, quantile, **vectors)
    assert norm(report) <= clip * (1 + 1e-6)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_bounded_report_that_is_not_finite_is_sent_as_zeros(wrong):
    report = clipped_report(1.0, 0.8, delta=[1.0, wrong, 2.0])
    segments = (*(Segment(name, one.size, "mean") for name, one in report.items()), Segment("weight", 1, "sum"))
    sent = ReportLayout(segments, "uniform", bounded=True).concatenate(report, 1.0)
    np.testing.assert_array_equal(sent, np.zeros(4))


@pytest.mark.parametrize("clip", [0.7, 1e-3, 30.0])
def test_a_report_that_its_graph_left_too_long_is_held_to_the_bound(clip):
    delta = np.full(100_000, 1.02 * clip / 100_000**0.5, np.float32)
    layout = ReportLayout((Segment("delta", delta.size, "mean"), Segment("weight", 1, "sum")), "uniform", bounded=True)
    sent = layout.concatenate({"delta": delta}, 1.0, float(np.float32(clip)))
    assert clip * (1 - 1e-6) < norm({"sent": sent}) <= np.float32(clip)
    np.testing.assert_array_equal(layout.concatenate({"delta": sent}, 1.0, float(np.float32(clip))), sent)


def test_a_bounded_report_holds_nothing_that_is_not_clipped():
    segments = (Segment("delta", 3, "mean"), Segment("weight", 1, "sum"))
    metrics = Segment("train.metrics", 2, "sum", ("examples", "loss"))
    with pytest.raises(ReportError, match="bounded"):
        ReportLayout((*segments, metrics), "uniform", bounded=True)
    with pytest.raises(ReportError, match="bounded"):
        ReportLayout(segments, "examples", bounded=True)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_the_bound_converges_to_the_quantile_of_the_norms(quantile):
    algorithm = create("fedavg", {"weighting": "uniform", "clip_norm": 10.0, "clip_quantile": quantile})
    random = np.random.default_rng(3)
    norms = random.lognormal(0.0, 0.5, 20_000)
    directions = random.normal(size=(20_000, 2))
    deltas_KD = norms[:, None] * directions / np.linalg.norm(directions, axis=1, keepdims=True)
    state = algorithm.init(np.zeros(2))
    (trip,) = trips_of(algorithm)
    for _ in range(150):
        cohort_KD = deltas_KD[random.integers(0, len(norms), 200)]
        report = trip.report(trip.broadcast(state), {"train": {"params": cohort_KD + state["params"]}})
        mean = {key: np.broadcast_to(one, (200, one.shape[-1])).mean(0) for key, one in report.items()}
        state = {**trip.update(state, mean), "params": np.zeros(2)}
    longest = float(state["clip_1"][0]) * 0.99**0.5
    assert np.mean(norms <= longest) == pytest.approx(quantile, abs=0.05)


def test_noise_on_the_indicator_moves_the_bound_by_a_share_at_most():
    algorithm = create("fedavg", {"weighting": "uniform", "clip_norm": 2.0, "clip_quantile": 0.6, "clip_lr": 0.5})
    (trip,) = trips_of(algorithm)
    state = algorithm.init(np.zeros(2))
    for noisy, share in ((50.0, 1.0), (-50.0, 0.0), (0.1, 0.75)):
        after = trip.update(state, {"delta": np.zeros(2), "clip_indicator": np.array([noisy])})
        assert after["clip_1"] == pytest.approx(2.0 * np.exp(-0.5 * (share - 0.6)))


def test_trips_have_bounds_of_their_own():
    algorithm = create("mime", {"clip_norm": 1.0, "clip_quantile": 0.5})
    first, second = trips_of(algorithm)
    state = algorithm.init(np.zeros(3))
    gradient = {"gradient": np.ones(3), "clip_indicator": np.array([0.1])}
    after = first.update(state, gradient)
    assert (after["clip_1"] < 1, after["clip_2"] == 1) == (True, True)
    assert second.broadcast(after)["clip"] == 1
    assert not {"clip_1", "clip_2"} & set(second.broadcast(after))


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("fedavg", {"clip_norm": 1.0}, "weighting=uniform"),
        ("fedavg", {"weighting": "uniform", "clip_norm": 0.0}, "clip_norm must be a number above 0"),
        ("fedavg", {"weighting": "uniform", "clip_quantile": 0.8}, "clip_quantile needs clip_norm"),
        ("fedavg", {"weighting": "uniform", "clip_norm": 1.0, "clip_quantile": 1.0}, "clip_quantile must be"),
    ],
)
def test_clipping_that_bounds_nothing_is_refused(name, settings, said):
    with pytest.raises(InvalidSetting, match=said):
        create(name, settings)


def test_algorithms_whose_clients_keep_vectors_are_not_clipped():
    with pytest.raises(InvalidSetting, match="clip_norm is not for scaffold, whose clients keep vectors"):
        create("scaffold", {"clip_norm": 1.0})
