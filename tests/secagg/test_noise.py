"""Noise in sums, and means that were moved."""

import re
from decimal import Decimal, localcontext
from math import ceil, isqrt, sqrt

import numpy as np
import pytest
from scipy import special, stats

from secagg import masking, packing
from secagg.errors import HeadroomError, SumOutOfRange
from secagg.masking import Keystream
from secagg.packing import PackedSegment
from tests.secagg.cohort import Cohort, invitation
from tests.secagg.test_lying_devices import sum_with
from tests.tree import ROOT

HALF = 1 << 9
LEAST_P = 1e-6


def noisy(size, variance, field_bits=32, norm=300.0):
    """A segment whose step is 1, in 10 bits."""
    return PackedSegment(size, field_bits, 10, -HALF, HALF - 1, norm, weighted=True, noise=variance)


def probabilities(numbers, variance):
    """P[X = k], by SciPy's Bessel functions."""
    return special.ive(np.abs(numbers), float(variance))


def fits(drawn, variance):
    """The p-value of integers as Skellam ones of this variance, by Pearson's chi-square over bins of 20 or more."""
    edge = int(3 * sqrt(variance)) + 1
    width = max(edge // 20, 1)
    cuts = np.arange(-edge, edge + width, width)
    every = np.arange(-40 * edge, 40 * edge)
    found = np.bincount(np.searchsorted(cuts, drawn, "right"), minlength=len(cuts) + 1)
    expected = np.bincount(np.searchsorted(cuts, every, "right"), probabilities(every, variance), len(cuts) + 1)
    kept = expected * drawn.size > 20
    found, expected = found[kept], expected[kept] * drawn.size
    return stats.chi2.sf(((found - expected) ** 2 / expected).sum(), kept.sum() - 1)


def fresh():
    return Keystream(np.random.default_rng(7).bytes(32), 8 << 18)


@pytest.mark.parametrize("variance", [1, 7, 400, 90_000])
def test_drawn_numbers_have_the_distribution_of_skellam(variance):
    assert fits(masking.draw_noise(variance, fresh(), 1 << 18), variance) > LEAST_P


@pytest.mark.parametrize("variance", [1, 9])
def test_every_chance_of_the_table_is_right_to_the_last_bits(variance):
    with localcontext() as context:
        context.prec = 80
        poisson = [(Decimal(-variance) / 2).exp()]
        for count in range(1, 200):
            poisson.append(poisson[-1] * variance / 2 / count)
        table, below = masking._table(variance).exact, Decimal(0)
        for number, threshold in enumerate(table[:60]):
            chance = sum(poisson[i] * poisson[i + number] for i in range(100))
            below += chance if number == 0 else 2 * chance
            assert abs(threshold - below * 2**127) < 2**7


def test_a_number_on_a_threshold_is_decided_by_further_bits():
    class Fixed:
        def __init__(self, *words):
            self.words = list(words)

        def u64(self, size):
            taken, self.words = self.words[:size], self.words[size:]
            return np.array(taken, np.uint64)

    threshold = masking._table(4).exact[2]
    first, rest = threshold >> 64, threshold & (1 << 64) - 1
    negative = 1
    assert masking.draw_noise(4, Fixed(first << 1, rest - 1), 1).tolist() == [2]
    assert masking.draw_noise(4, Fixed(first << 1, rest), 1).tolist() == [3]
    assert masking.draw_noise(4, Fixed(first << 1 | negative, rest), 1).tolist() == [-3]
    assert masking.draw_noise(4, Fixed((first << 1) - 2), 1).tolist() == [2]


@pytest.mark.parametrize(("variance", "size"), [(1, 1), (1, 10**6), (10_000, 100), (2**26, 10**6)])
def test_noise_beyond_its_bound_is_rarer_than_promised(variance, size):
    beyond = masking.noise_bound(variance, size)
    tail = probabilities(np.arange(beyond + 1, 3 * beyond), variance).sum()
    assert 2 * size * tail < 2.0**-masking.RARE_BITS
    assert beyond < 14 * sqrt(variance) + 24


def test_noise_is_shorter_than_the_bound_on_its_norm_and_nearly_as_long():
    drawn = masking.draw_noise(400, fresh(), 1 << 18)
    assert 0.98 < np.linalg.norm(drawn) / masking.norm_bound(400, drawn.size) < 1


@pytest.mark.parametrize(("norm", "size"), [(0.0, 100), (300.0, 5000), (5.0, 40_000)])
def test_rounded_vectors_keep_the_bound_on_their_norm(norm, size):
    made = np.random.default_rng(3)
    direction = made.normal(0, 1, size)
    exact = direction * (norm / np.linalg.norm(direction))
    rounded = np.floor(exact + made.random((20, size)))
    squares = (rounded**2).sum(1)
    most = masking.most_square(norm, size)
    assert squares.max() <= most <= (norm + sqrt(size)) ** 2
    # Not far above what happens: rounding adds a quarter of a step's square to every value.
    assert most <= 1.25 * (norm**2 + size / 4) + 500


def test_rounding_beyond_the_bound_is_done_again(monkeypatch):
    segment, values = noisy(1000, 1), np.full(1000, 0.5, np.float32)
    tight = 495  # half of the values are rounded up: about as many tries exceed it as do not
    monkeypatch.setattr(masking, "most_square", lambda norm, size: tight)
    monkeypatch.setattr(masking, "draw_noise", lambda variance, uniform, size: np.zeros(size, np.int64))
    for _ in range(20):
        words = packing.encode((segment,), values, 1, 1)
        found = packing.decode((segment,), words, 1, 1).fields - HALF
        assert 400 < (found**2).sum() <= tight


def test_shares_make_the_sum_of_the_honest_as_noisy_as_asked():
    square = masking.most_square(300.0, 5000)
    share = masking.noise_share(1.5, square, 7)
    assert 1.5**2 * square <= 7 * share < 1.5**2 * square + 7


def test_noise_of_a_sum_equals_central_noise_when_nobody_drops():
    segment, devices = noisy(20_000, 30), 12
    zeros = np.zeros(segment.size, np.float32)
    words = sum(packing.encode((segment,), zeros, 1, 1) for _ in range(devices))
    sums = packing.decode((segment,), words, devices, 1).sums
    assert fits(sums.astype(np.int64), devices * segment.noise) > LEAST_P
    square = (sums**2).sum() / (devices * segment.noise)
    assert stats.chi2.sf(square, segment.size) > LEAST_P
    assert stats.chi2.cdf(square, segment.size) > LEAST_P


@pytest.mark.security("every sum is noised before the server sees it, each group's too")
def test_noise_suffices_when_the_allowed_number_adds_none():
    multiplier, least, corrupt = 1.0, 10, 2
    plain = noisy(20_000, 1)
    segment = noisy(20_000, masking.noise_share(multiplier, plain.most_square, least - corrupt))
    zeros = np.zeros(segment.size, np.float32)
    words = sum(packing.encode((segment,), zeros, 1, 1) for _ in range(least - corrupt))
    found = packing.decode((segment,), words, least - corrupt, 1).sums
    wanted = multiplier**2 * plain.most_square
    assert (found**2).mean() > wanted * (1 - 5 * sqrt(2 / segment.size))


def test_noisy_sums_are_exact_below_zero_and_in_neighbouring_fields():
    made = np.random.default_rng(11)
    narrow = PackedSegment(40, 21, 2, -2.0, 1.0, norm=1.0, weighted=True, noise=2000)
    segments = (noisy(101, 5, 16), narrow, PackedSegment(3, 20, 8, 0.0, 255.0))
    vectors = [np.append(made.integers(-9, 9, 141), [1, 2, 3]).astype(np.float32) for _ in range(5)]
    encoded = [packing.encode(segments, vector, 1, 1) for vector in vectors]
    alone = [packing.decode(segments, words, 1, 1) for words in encoded]
    together = packing.decode(segments, sum(encoded), 5, 1)
    np.testing.assert_array_equal(together.fields, sum(one.fields for one in alone))
    assert together.fields[101:141].min() < 0


def test_quantising_with_noise_has_no_bias_to_four_standard_errors():
    segment = noisy(40_000, 3)
    words = packing.encode((segment,), np.full(segment.size, 0.3, np.float32), 1, 1)
    found = packing.decode((segment,), words, 1, 1).sums.mean()
    assert abs(found - 0.3) < 4 * sqrt((3 + 0.3 * 0.7) / segment.size)


@pytest.mark.parametrize(
    ("segment", "why"),
    [
        (noisy(3, 5, norm=0.0), "norm"),
        (PackedSegment(3, 32, 10, -HALF + 0.4, HALF - 0.6, 300.0, noise=5), "one of the steps"),
        (noisy(3, masking.MOST_VARIANCE + 1), "fewer bits"),
        (noisy(3, 100_000, field_bits=14), "needs fields of 15 bits"),
    ],
)
def test_noise_that_does_not_fit_its_segment_is_refused(segment, why):
    with pytest.raises(HeadroomError, match=why):
        packing.check_headroom((segment,), 10)


def test_narrowest_fields_with_noise_are_accepted_and_narrower_ones_not():
    width = packing.field_bits(noisy(3, 100_000), 10)
    packing.check_headroom((noisy(3, 100_000, width),), 10)
    with pytest.raises(HeadroomError, match=f"{width} bits"):
        packing.check_headroom((noisy(3, 100_000, width - 1),), 10)


@pytest.mark.parametrize("direction", [1, -1])
def test_a_sum_beyond_range_and_noise_is_noticed(direction):
    segment = noisy(50, 100)
    words = packing.encode((segment,), np.zeros(50, np.float32), 1, 1)
    beyond = direction * (masking.noise_bound(100, 50) + HALF + 80)
    words[1:2] += np.int64(beyond).view(np.uint64)
    words[-1] = packing._check_word(words[:-1])
    with pytest.raises(SumOutOfRange, match="segment 0"):
        packing.decode((segment,), words, 1, 1)


def test_a_sum_longer_than_clipped_reports_and_noise_is_noticed():
    segment = noisy(4000, 100, norm=50.0)
    lie = PackedSegment(segment.size, 32, 10, segment.low, segment.high, 1e9, weighted=True)
    words = packing.encode((lie,), np.full(segment.size, 20, np.float32), 1, 1)
    with pytest.raises(SumOutOfRange, match="norm"):
        packing.decode((segment,), words, 1, 1)
    assert isqrt(segment.most_square) < 20 * sqrt(segment.size)


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
