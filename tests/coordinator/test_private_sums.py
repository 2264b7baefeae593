"""The numbers that noise is made of, and how a sum gets it."""

from __future__ import annotations

import math

import numpy as np

from coordinator.rules.private_sums import GRID, KeyedNormals, add_noise
from fedcore.report import ReportLayout, Segment

LAYOUT = ReportLayout((Segment("delta", 3, "mean"), Segment("weight", 1, "sum")), "uniform", bounded=True)


def test_same_key_gives_the_same_normal_numbers_and_another_key_others():
    first = KeyedNormals(bytes(32))
    parts = np.concatenate([first.standard_normal(1000), first.standard_normal(1000)])
    again = KeyedNormals(bytes(32))
    np.testing.assert_array_equal(parts, np.concatenate([again.standard_normal(1000), again.standard_normal(1000)]))
    assert not np.isin(parts, KeyedNormals(b"1" * 32).standard_normal(2000)).any()
    assert not np.isin(parts, KeyedNormals.fresh().standard_normal(2000)).any()


def test_keyed_numbers_are_distributed_normally():
    drawn = KeyedNormals(bytes(32)).standard_normal(200_001)
    edges = np.linspace(-3.5, 3.5, 36)
    below = np.array([0.5 * (1 + math.erf(edge / math.sqrt(2))) for edge in edges])
    expected = np.diff(np.concatenate([[0], below, [1]])) * drawn.size
    found = np.histogram(drawn, [-np.inf, *edges, np.inf])[0]
    chi_square = ((found - expected) ** 2 / expected).sum()
    assert abs(chi_square - 36) < 4 * math.sqrt(2 * 36)
    halves = drawn[:100_000], drawn[100_000:200_000]
    assert abs(np.corrcoef(*halves)[0, 1]) < 5 / math.sqrt(100_000)


def test_noise_and_sum_leave_no_trace_in_the_last_bits():
    total_L, noise_M = np.array([0.1, -1 / 3, 1e-9, 7.0]), np.array([math.pi, -math.e, 1e-7])
    noisy_L = add_noise(LAYOUT, total_L, noise_M, deviation=3.0)
    grid = GRID * 2
    np.testing.assert_array_equal(noisy_L[:3] / grid, np.rint(noisy_L[:3] / grid))
    np.testing.assert_allclose(noisy_L[:3], total_L[:3] + noise_M, atol=grid)
    assert noisy_L[3] == 7
