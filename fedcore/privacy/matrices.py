"""Matrices of DP-FTRL: how the noise of rounds is correlated, and how far a device can move the noised sums.

Kairouz, McMahan, Song, Thakkar, Thakurta, Xu, "Practical and private (deep) learning without sampling or shuffling",
ICML 2021; Denisov, McMahan, Rush, Smith, Thakurta, "Improved differential privacy for SGD via optimal private linear
operators on adaptive streams", NeurIPS 2022; Choquette-Choo et al., "Multi-epoch matrix factorization mechanisms for
private machine learning", ICML 2023. Of T rounds, with new noise z ζ_t of each, the noise that round t gets is

    w_t = z (C⁻¹ ζ)_t        C lower triangular (T, T), so that w_t takes ζ_1 … ζ_t

A device whose reports have norm 1 at most moves C x by no more than the sensitivity of C, so all T noised sums together
are one Gaussian mechanism of noise multiplier z / sensitivity, however reports depend on earlier sums.

    gaussian    C = I
    tree        C[t, i] = 1 where i is in the block of 2^l rounds that ends at t, 2^l the lowest bit of t
    banded      C[t, i] = c_{t−i}, c_0 = 1, c_k = c_{k−1} (2k − 1) / 2k below `bands`, else 0: the matrix square root
                of prefix sums, cut off (Kalinin, Lampert, "Banded square root matrix factorization for
                differentially private model training", NeurIPS 2024)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcore.errors import PrivacyError
from fedcore.privacy.settings import MOST_TREE_ROUNDS, Mechanism, Noise

Floats = NDArray[np.float64]


def coefficients(bands: int) -> Floats:
    """c_0 … of the banded matrix, float64 (bands,)."""
    k = np.arange(1, bands)
    return np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))


def block(step: int) -> int:
    """The number of rounds in the tree's block that ends at a step, which counts from 1."""
    return step & -step


def inverse_row(mechanism: Mechanism, bands: int, step: int) -> dict[int, float]:
    """The row of C⁻¹ for a step from 1: the weights of ζ_1 … ζ_step in w_step, by step, without those that are 0."""
    if mechanism == "gaussian":
        return {step: 1.0}
    if mechanism == "tree":
        # The block that ends at the step is the step itself and the blocks that end before it, within.
        row, before, first = {step: 1.0}, step - 1, step - block(step)
        while before > first:
            row[before] = -1.0
            before -= block(before)
        return row
    # C is Toeplitz, and so is C⁻¹: the power series 1 / Σ c_k x^k.
    c, series = coefficients(bands), np.zeros(step)
    series[0] = 1.0
    for k in range(1, step):
        width = min(k, bands - 1)
        series[k] = -c[1 : width + 1] @ series[k - width : k][::-1]
    return {step - k: float(weight) for k, weight in enumerate(series) if weight}


def matrix(noise: Noise, rounds: int) -> Floats:
    """C of T = `rounds` rounds, (T, T)."""
    if noise.mechanism == "gaussian":
        return np.eye(rounds)
    if noise.mechanism == "tree":
        ends = range(1, rounds + 1)
        return np.array([[float(end - block(end) < earlier <= end) for earlier in ends] for end in ends])
    return np.sum([tap * np.eye(rounds, k=-k) for k, tap in enumerate(coefficients(noise.bands))], axis=0)  # type: ignore[no-any-return]


def banded_sensitivity_squared(bands: int, rounds: int, separation: int) -> float:
    """Squared sensitivity of the banded matrix, if a device's rounds are `separation` ≥ bands apart, so that their
    columns share no row.
    """
    lengths = np.minimum(bands, np.arange(rounds, 0, -1))
    return heaviest(np.cumsum(coefficients(bands) ** 2)[lengths - 1], separation)


def tree_sensitivity_squared(rounds: int, separation: int) -> float:
    """Squared sensitivity of the tree's matrix: an upper bound, exact for one participation and if all are alike.

    For the rounds P of a device it is the sum over i, j in P of the blocks with both i and j in them. That is bounded
    by the greatest sum over i of the greatest sum over j. Raises PrivacyError above MOST_TREE_ROUNDS.
    """
    if rounds > MOST_TREE_ROUNDS:
        raise PrivacyError(f"the mechanism tree is for at most {MOST_TREE_ROUNDS} rounds, not {rounds}: take banded")
    shared_TT = np.zeros((rounds, rounds))
    for end in range(1, rounds + 1):
        rows = slice(end - block(end), end)
        shared_TT[rows, rows] += 1
    apart_TT = np.abs(np.subtract.outer(np.arange(rounds), np.arange(rounds)))
    shared_TT[(apart_TT > 0) & (apart_TT < separation)] = 0
    return heaviest(heaviest_rows(shared_TT, separation), separation)


def heaviest(weights_T: Floats, separation: int) -> float:
    """The greatest sum of weights ≥ 0 whose places are at least `separation` apart."""
    return float(heaviest_rows(weights_T[None], separation)[0])


def heaviest_rows(weights_NT: Floats, separation: int) -> Floats:
    """`heaviest` of every row, (N,)."""
    count, rounds = weights_NT.shape
    best = np.zeros((rounds + 1, count))
    for t in range(1, rounds + 1):
        best[t] = np.maximum(best[t - 1], best[max(t - separation, 0)] + weights_NT[:, t - 1])
    return best[rounds]
