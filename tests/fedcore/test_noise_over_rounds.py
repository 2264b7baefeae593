"""Rows of the inverse matrices of DP-FTRL, against inversion by NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from fedcore.privacy.accounting import block, coefficients, inverse_row

ROUNDS = 21


def tree():
    matrix_TT = np.zeros((ROUNDS, ROUNDS))
    for end in range(1, ROUNDS + 1):
        matrix_TT[end - 1, end - block(end) : end] = 1
    return matrix_TT


def banded(bands):
    shifted = [c * np.eye(ROUNDS, k=-k) for k, c in enumerate(coefficients(bands))]
    return np.sum(shifted, axis=0)


@pytest.mark.parametrize(
    ("mechanism", "bands", "matrix_TT"),
    [("gaussian", 1, np.eye(ROUNDS)), ("tree", 1, tree()), ("banded", 2, banded(2)), ("banded", 7, banded(7))],
)
def test_row_of_the_inverse_is_that_of_linear_algebra(mechanism, bands, matrix_TT):
    inverse_TT = np.linalg.inv(matrix_TT)
    for step in range(1, ROUNDS + 1):
        row_T = np.zeros(ROUNDS)
        for before, weight in inverse_row(mechanism, bands, step).items():
            row_T[before - 1] = weight
        np.testing.assert_allclose(row_T, inverse_TT[step - 1], atol=1e-12)
