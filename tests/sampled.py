"""Matrices of cases of which every run of the tests takes a sample; `make test-all` takes them all."""

from itertools import product

import pytest


def sampled(cases, sample):
    """The cases as parameters: those in `sample` are in every run, the others are marked `long`.

    A case is a value, or a tuple of values. Raises ValueError for a sample that is not among the cases.
    """
    cases, sample = list(cases), list(sample)
    if missing := [case for case in sample if case not in cases]:
        raise ValueError(f"no such cases: {missing}")
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in sample else pytest.mark.long)
        for case in cases
    ]


def covering(*dimensions):
    """The product of the dimensions as parameters; each value of each dimension is in every run at least once."""
    values = [list(dimension) for dimension in dimensions]
    rows = max(map(len, values))
    diagonal = [tuple(one[row % len(one)] for one in values) for row in range(rows)]
    return sampled(product(*values), diagonal)
