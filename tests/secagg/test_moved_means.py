"""How far one device moves the mean of a secure sum: docs/spec/secagg.md §10. Whole sessions, in which one lies."""

import re
from math import sqrt

import numpy as np
import pytest

from secagg.errors import SumOutOfRange
from secagg.packing import PackedSegment
from tests.secagg.cohort import Cohort, invitation
from tests.secagg.test_lying_devices import sum_with
from tests.tree import ROOT

N, SIZE, CLIP = 9, 4095, 1.0
BITS = (16, 8, 4, 3, 2)
WIDTH = 21
"""Bits of a field, of which three share a word."""


def segment(bits):
    return PackedSegment(SIZE, WIDTH, bits, -CLIP, CLIP, norm=CLIP, weighted=True)


def longest(bits, weight):
    """The length that the specification allows the mean of N devices, whose weights add up to `weight`."""
    return CLIP + N / weight * segment(bits).step * sqrt(SIZE)


def mean_with(bits, length, weight):
    """The mean after one device has added a vector of this length, and made N honest weights of 1 add up to another."""
    zeros = {10 + index: np.zeros(SIZE, np.float32) for index in range(N)}
    cohort = Cohort(N, invitation((segment(bits),), n_max=N, min_sum=3, w_max=1), vectors=zeros)
    steps = int(length * weight / sqrt(SIZE) / segment(bits).step)
    one = steps * (1 + (1 << WIDTH) + (1 << 2 * WIDTH))
    words = dict.fromkeys(range(1, 1 + SIZE // 3), one)
    total = sum_with(cohort, words | {0: (weight - N) % 2**64})
    return np.linalg.norm(total.sums) / total.weight


def test_the_specification_has_these_lengths():
    rows = re.findall(
        r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", (ROOT / "docs/spec/secagg.md").read_text(), re.MULTILINE
    )
    assert rows == [tuple(f"{one:.3g}" for one in (bits, longest(bits, N), longest(bits, 1))) for bits in BITS]


@pytest.mark.parametrize("weight", [N, 1])
@pytest.mark.parametrize("bits", BITS)
def test_one_device_moves_the_mean_as_far_as_specified_and_no_further(bits, weight, capsys):
    most = longest(bits, weight)
    found = mean_with(bits, 0.9 * most, weight)
    with capsys.disabled():
        print(f"\n{bits} bits, weights of {weight}: {most:.3g} allowed, {found:.3g} seen; honest {CLIP / N:.2g}")
    assert 0.8 * most < found <= most
    with pytest.raises(SumOutOfRange):
        mean_with(bits, 1.1 * most, weight)
