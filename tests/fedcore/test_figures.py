"""Figures from sums that a test makes itself: what devices and noise can do to them."""

import math

import numpy as np
import pytest

from fedcore.figures import Ranged, Sums, means, percentiles

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
