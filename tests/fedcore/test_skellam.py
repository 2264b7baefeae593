"""The accountant of noise that devices add, against the distribution itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ive

from fedcore.errors import PrivacyError
from fedcore.privacy.accounting import divergence, spent
from fedcore.privacy.settings import LedgerEntry, Noise


def rows(count, **facts):
    given = {"noise_multiplier": 1.5, "mechanism": "distributed", "clip": 1.0, "devices": 40, "honest": 30}
    return [LedgerEntry(**given | {"square": 10_000} | facts, round=number) for number in range(1, count + 1)]


def exact(variance, moved, order):
    """The Rényi divergence of Skellam noise from itself, moved by a whole number, summed up over all numbers."""
    reach = math.ceil(25 * math.sqrt(variance))
    k = np.arange(-reach, reach + 1)
    here, there = np.log(ive(np.abs(k), variance)), np.log(ive(np.abs(k - moved), variance))
    return np.logaddexp.reduce(order * there - (order - 1) * here) / (order - 1)


@pytest.mark.parametrize("moved", [1, 3, 20])
@pytest.mark.parametrize("order", [2, 5])
def test_divergence_is_no_less_than_that_of_the_distribution(moved, order):
    for multiplier in (0.7, 2.0):
        (row,) = rows(1, noise_multiplier=multiplier, square=moved**2)
        truth = exact(multiplier**2 * moved**2, moved, order)
        claimed = divergence([row], order)
        assert truth <= claimed * (1 + 1e-9)
        if moved == 20 and multiplier == 2:
            assert claimed <= 1.05 * truth


def test_fine_steps_spend_hardly_more_than_gaussian_noise():
    gaussian = spent([Noise(noise_multiplier=1.5)] * 9, 1e-3)
    fine, coarse = spent(rows(9), 1e-3), spent(rows(9, square=4), 1e-3)
    assert gaussian < fine < 1.15 * gaussian
    assert coarse > 1.05 * fine


def test_separation_of_rounds_lets_a_device_be_in_fewer():
    apart = {"min_separation_rounds": 3}
    assert spent(rows(9, **apart), 1e-5) == spent(rows(3), 1e-5)


def test_row_of_devices_needs_the_facts_of_their_noise():
    with pytest.raises(PrivacyError, match="square must be above 0 if distributed"):
        rows(1, square=0)
    with pytest.raises(PrivacyError, match="honest must be at most the devices"):
        rows(1, honest=41)
