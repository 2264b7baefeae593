"""How far one device moves the mean of a secure sum: docs/spec/secagg.md §10. Whole sessions, in which one lies."""

import re
from math import ceil, sqrt

import numpy as np
import pytest

from secagg import masking, packing
from secagg.errors import SumOutOfRange
from secagg.packing import PackedSegment
from tests.secagg.cohort import Cohort, invitation
from tests.secagg.test_lying_devices import sum_with
from tests.tree import ROOT

N, SIZE, CLIP = 9, 4095, 1.0
BITS, MOST_WEIGHTS = (16, 8, 4, 3, 2), (1, 100)
WIDTH = 21
"""Bits of a field, of which three share a word."""


def segment(bits):
    return PackedSegment(SIZE, WIDTH, bits, -CLIP, CLIP, norm=CLIP, weighted=True)


def longest(bits, w_max):
    """The length that the specification allows the mean of N devices, whose weights add up to N."""
    return CLIP + segment(bits).step * w_max * masking.rounding_bound(N, SIZE) / N


def mean_with(bits, w_max, length):
    """The mean of reports of zeros, after one device made it so long, and made weights of 23 add up to N."""
    zeros, weight = {10 + index: np.zeros(SIZE, np.float32) for index in range(N)}, min(23, w_max)
    invite = invitation((segment(bits),), n_max=N, min_sum=3, w_max=w_max)
    cohort = Cohort(N, invite, vectors=zeros, weights=dict.fromkeys(zeros, weight))
    # Zero is half-way between two steps, so that rounding alone is half a step long for each value of each device.
    square = (length * N / w_max / segment(bits).step) ** 2 - N * SIZE / 4
    steps = ceil(sqrt(square / SIZE))
    last = 1 + int(square / steps**2 / 3)
    words = dict.fromkeys(range(1, last), steps * (1 + (1 << WIDTH) + (1 << 2 * WIDTH)))
    total = sum_with(cohort, words | {0: (N - N * weight) % 2**64})
    assert total.weight == N
    return np.linalg.norm(total.sums) / N


@pytest.mark.security("In a secure round only the sum is bounded")
@pytest.mark.security("a single device moves the mean by as much as all honest ones together")
@pytest.mark.parametrize("w_max", MOST_WEIGHTS)
@pytest.mark.parametrize("bits", BITS)
def test_one_device_moves_the_mean_as_far_as_specified_and_no_further(bits, w_max, capsys):
    most = longest(bits, w_max)
    found = mean_with(bits, w_max, 0.95 * most)
    with capsys.disabled():
        print(f"\n{bits} bits, weights up to {w_max}: {most:.3g} allowed, {found:.3g} seen; honest {CLIP / N:.2g}")
    assert 0.9 * most < found <= most
    with pytest.raises(SumOutOfRange):
        mean_with(bits, w_max, 1.05 * most)


@pytest.mark.security("a single device moves the mean by as much as all honest ones together")
def test_the_specification_has_these_lengths():
    text = (ROOT / "docs/spec/secagg.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert rows == [(str(bits), *(f"{longest(bits, most):.3g}" for most in MOST_WEIGHTS)) for bits in BITS]


@pytest.mark.parametrize("size", [1, 30, 1000, 30_000])
@pytest.mark.parametrize("devices", [8, 100])
def test_the_rounding_of_honest_devices_is_within_its_bound_and_near_it(devices, size):
    """Reports as long as the norm, of which every value is half-way between two steps, as far as they go."""
    one, sums = PackedSegment(size, WIDTH, 2, -CLIP, CLIP, norm=CLIP, weighted=True), []
    vector = np.full(size, 1 / sqrt(size), np.float32)
    for _ in range(20):
        words = sum((packing.encode((one,), vector, 1, 1) for _ in range(devices)), np.uint64(0))
        sums.append(packing.decode((one,), words, devices, 1).sums - devices * vector)
    lengths = np.linalg.norm(sums, axis=1) / one.step
    bound = masking.rounding_bound(devices, size)
    assert lengths.max() < bound <= devices * sqrt(size)
    assert size < 30_000 or lengths.min() > 0.9 * bound
