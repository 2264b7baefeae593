"""Masks and packed sums, and the parameters that they need."""

import os
import re
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from fractions import Fraction
from math import comb
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from secagg import masking, packing, parameters
from secagg.errors import BadInput, HeadroomError, PolicyViolation, UnmaskCheckFailed
from secagg.masking import Mask, add_masks, add_masks_with
from secagg.packing import PackedSegment
from secagg.parameters import GraphParameters
from tests.secagg import reference

MASKS = [Mask(bytes([i]) * 32, 1 if i % 3 else -1) for i in range(5)]


def words_of(size):
    return np.random.default_rng(size).integers(0, 2**64, size, dtype=np.uint64)


@pytest.mark.parametrize("size", [0, 1, 2, 7, 500])
def test_masks_are_added_as_the_reference_adds_them(size):
    words = words_of(size)
    expected = reference.add_masks(words.tolist(), MASKS)
    add_masks(words, MASKS)
    assert words.tolist() == expected


def test_a_mask_and_its_inverse_leave_nothing():
    words = words_of(40_001)
    masked = words.copy()
    add_masks(masked, MASKS)
    assert not np.array_equal(masked, words)
    add_masks(masked, [Mask(mask.key, -mask.sign) for mask in MASKS])
    np.testing.assert_array_equal(masked, words)


@pytest.mark.parametrize("start", [2, 16_382, 16_384, 16_386, 19_998])
def test_any_slice_can_be_masked_by_itself(start):
    whole = words_of(40_001)
    part = whole[start:].copy()
    add_masks(whole, MASKS)
    add_masks(part, MASKS, start)
    np.testing.assert_array_equal(part, whole[start:])


def test_a_slice_that_starts_within_a_block_is_refused():
    with pytest.raises(ValueError, match="even word"):
        add_masks(words_of(4), MASKS, 1)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 16_385, 40_001])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_every_division_gives_the_same_bits(size, parts):
    words = words_of(size)
    divided = words.copy()
    add_masks(words, MASKS)
    with ThreadPoolExecutor(2) as executor:
        add_masks_with(executor, parts, divided, MASKS)
    np.testing.assert_array_equal(divided, words)


def test_processes_give_the_same_bits():
    words = words_of(40_001)
    divided = words.copy()
    add_masks(words, MASKS)
    with ProcessPoolExecutor(2) as executor:
        add_masks_with(executor, 2, divided, MASKS)
    np.testing.assert_array_equal(divided, words)


def test_more_masks_than_fit_into_a_batch_are_all_added(monkeypatch):
    words = words_of(9)
    expected = reference.add_masks(words.tolist(), MASKS)
    monkeypatch.setattr(masking, "BATCH", 2)
    add_masks(words, MASKS)
    assert words.tolist() == expected


@pytest.mark.parametrize("value", [0, 1, 2**64 - 1])
def test_masked_words_look_uniform_with_any_content(value):
    words = np.full(100_000, value, np.uint64)
    add_masks(words, [Mask(os.urandom(32), 1), Mask(os.urandom(32), -1)])
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    # 255 degrees of freedom: mean 255, standard deviation 22.6; the chance to be 7 of them above is below 10^-9.
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 7 * 22.6
    assert np.unique(words).size == words.size


FULL = PackedSegment(3, 16, 8, 0.0, 255.0)


def vector(*values):
    return np.array(values, np.float32)


def summed(segments, inputs, w_max=1):
    """Encode, add, decode: (Σ weight, sums)."""
    total = np.zeros(packing.word_count(segments), np.uint64)
    for values, weight in inputs:
        total += packing.encode(segments, values, weight, w_max)
    found = packing.decode(segments, total, len(inputs), w_max)
    return found.weight, found.sums


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 31, 40_001, 100_000])
@pytest.mark.parametrize("field_bits", [8, 11, 21, 32])
def test_packing_is_that_of_the_reference(size, field_bits):
    segment = PackedSegment(size, field_bits, 8, 0.0, 255.0)
    values = np.random.default_rng(size).integers(0, 256, size)
    words = packing.encode((segment,), values.astype(np.float32), 9, 10)
    assert words.tolist() == reference.seal_words(9, reference.pack(values.tolist(), field_bits) if size else [])


@given(
    fields=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), max_size=4),
    weights=st.lists(st.integers(0, 50), min_size=1, max_size=9),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_integers_and_weights_are_summed_exactly(fields, weights, data):
    segments = tuple(
        PackedSegment(size, in_bits + 4, in_bits, -1.0, 2.0**in_bits - 2) for in_bits, size in fields if in_bits > 1
    )
    packing.check_headroom(segments, 16)
    inputs = []
    for weight in weights:
        values = [
            data.draw(st.integers(-1, 2**segment.in_bits - 2)) for segment in segments for _ in range(segment.size)
        ]
        inputs.append((vector(*values), weight))
    total, sums = summed(segments, inputs, 50)
    assert total == sum(weights)
    np.testing.assert_array_equal(sums, sum((values.astype(np.float64) for values, _ in inputs)))


def test_the_fullest_field_of_every_device_does_not_reach_its_neighbour():
    segment = PackedSegment(6, 21, 14, 0.0, 1.0)
    most = 2**21 // (2**14 - 1)
    packing.check_headroom((segment,), most)
    with pytest.raises(HeadroomError, match=f"{most + 1} values"):
        packing.check_headroom((segment,), most + 1)
    total, sums = summed((segment,), [(vector(1, 0, 1, 0, 1, 0), 1)] * most)
    assert total == most
    np.testing.assert_allclose(sums, [most, 0] * 3, rtol=1e-15)


def test_quantising_has_no_bias_and_stays_within_one_step():
    segment = PackedSegment(400_000, 21, 6, -0.5, 0.5)
    for value in (-0.5, -0.123, 0.0, 0.4999, 0.5):
        _, sums = summed((segment,), [(np.full(segment.size, value, np.float32), 1)])
        exact = np.float64(np.float32(value))
        assert np.abs(sums - exact).max() <= segment.step * (1 + 1e-6)
        # The standard deviation of one value is at most half a step.
        assert abs(sums.mean() - exact) < 6 * segment.step / 2 / np.sqrt(segment.size)


def test_values_are_clamped_to_their_range():
    _, sums = summed((FULL,), [(vector(-5, 256, 1e30), 1)])
    assert sums.tolist() == [0, 255, 255]


def test_long_segment_is_scaled_to_its_norm_and_a_short_one_is_not():
    segment = PackedSegment(2, 32, 20, -10.0, 10.0, norm=5.0)
    for values, expected in (((6, 8), (3, 4)), ((0.3, 0.4), (0.3, 0.4)), ((3e38, 0), (5, 0))):
        _, sums = summed((segment,), [(vector(*values), 1)])
        np.testing.assert_allclose(sums, expected, atol=segment.step)


def test_a_weighted_segment_sums_weight_times_value():
    segments = (PackedSegment(1, 32, 20, -4.0, 4.0, weighted=True), PackedSegment(1, 32, 20, 0.0, 2.0**20 - 1))
    total, sums = summed(segments, [(vector(2, 7), 10), (vector(-3, 1), 30), (vector(4, 0), 0)], 40)
    assert total == 40
    np.testing.assert_allclose(sums, [2 * 10 - 3 * 30, 8], atol=3 * 40 * segments[0].step)


@pytest.mark.parametrize("weight", [0, 1, 999, 1000])
def test_every_weight_up_to_the_greatest_is_summed(weight):
    assert summed((FULL,), [(vector(0, 0, 0), weight)] * 3, 1000)[0] == 3 * weight


@pytest.mark.parametrize("weight", [-1, 1001])
def test_a_weight_beyond_the_greatest_is_refused(weight):
    with pytest.raises(BadInput, match="0 to 1000"):
        packing.encode((FULL,), vector(0, 0, 0), weight, 1000)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("norm", [0.0, 1.0])
def test_a_value_that_is_not_finite_is_refused(bad, norm):
    with pytest.raises(BadInput, match="not finite"):
        packing.encode((PackedSegment(3, 16, 8, 0.0, 255.0, norm),), vector(0, bad, 0), 1, 1)


@pytest.mark.parametrize(
    "wrong", [np.zeros(2, np.float32), np.zeros(4, np.float32), np.zeros(3), np.zeros((3, 1), np.float32)]
)
def test_a_vector_of_another_shape_or_type_is_refused(wrong):
    with pytest.raises(BadInput, match=r"float32\[3\]"):
        packing.encode((FULL,), wrong, 1, 1)


@pytest.mark.parametrize(
    "segment",
    [
        PackedSegment(1, 8, 0, 0.0, 1.0), PackedSegment(1, 32, 21, 0.0, 1.0), PackedSegment(1, 33, 8, 0.0, 1.0),
        PackedSegment(1, 7, 8, 0.0, 1.0), PackedSegment(1, 16, 8, 1.0, 0.0), PackedSegment(1, 16, 8, 0.0, 0.0),
        PackedSegment(1, 16, 8, 1.0, 2.0), PackedSegment(1, 16, 8, -1e308, 1e308), PackedSegment(1, 16, 8, 0.0, 5e-324),
        PackedSegment(1, 16, 8, 0.0, 1.0, norm=-1.0),
    ],
)  # fmt: skip
def test_a_segment_that_cannot_be_quantised_is_refused(segment):
    with pytest.raises(HeadroomError, match="segment 1"):
        packing.check_headroom((FULL, segment), 2)


@pytest.mark.security("the check word fails and no number leaves (UnmaskCheckFailed)")
def test_any_single_wrong_word_and_any_two_swapped_are_noticed():
    segments = (PackedSegment(30, 21, 8, 0.0, 255.0),)
    words = packing.encode(segments, np.arange(30, dtype=np.float32), 5, 10)
    for place in range(words.size):
        for change in (1, 2**63):
            wrong = words.copy()
            wrong[place] += np.uint64(change)
            with pytest.raises(UnmaskCheckFailed):
                packing.decode(segments, wrong, 1, 10)
    swapped = words.copy()
    swapped[[2, 3]] = swapped[[3, 2]]
    with pytest.raises(UnmaskCheckFailed):
        packing.decode(segments, swapped, 1, 10)


def test_totals_of_groups_have_the_bits_of_one_total():
    made = np.random.default_rng(5)
    segments = (PackedSegment(999, 27, 20, -0.3, 0.7, norm=1.0, weighted=True), PackedSegment(3, 30, 20, -8.0, 9.0))
    words = [
        packing.encode(segments, made.normal(0, 1, 1002).astype(np.float32), int(made.integers(0, 8)), 7)
        for _ in range(30)
    ]
    whole = packing.decode(segments, sum(words), 30, 7)
    parts = [packing.decode(segments, sum(words[i::3]), len(words[i::3]), 7) for i in range(3)]
    added = parts[0] + parts[1] + parts[2]
    assert (added.weight, added.devices) == (whole.weight, 30)
    np.testing.assert_array_equal(added.sums, whole.sums)
    other = packing.decode(segments[:1], packing.encode(segments[:1], np.zeros(999, np.float32), 1, 7), 1, 7)
    with pytest.raises(ValueError, match="different invitations"):
        whole + other


TABLE = {100: (32, 22), 200: (56, 39), 500: (82, 57), 1000: (96, 67), 2000: (106, 74), 10000: (122, 85)}


def expected_bad(n, k, least):
    """n · P[X ≥ least] for k neighbours of n − 1 others, a tenth of n bad."""
    c = n // 10
    ways = (comb(c, x) * comb(n - 1 - c, k - x) for x in range(least, k + 1) if k - x <= n - 1 - c)
    return Fraction(n * sum(ways), comb(n - 1, k))


@pytest.mark.parametrize(("n", "expected"), TABLE.items())
def test_the_finder_gives_the_table(n, expected):
    found = parameters.find(n)
    assert (found.k, found.t) == expected
    parameters.check(found)


@pytest.mark.security("be at most a tenth of a roster (a fifth up to 64 devices)")
@pytest.mark.parametrize("n", [65, 100, 333, 1000])
def test_what_is_found_holds_both_bounds_and_nothing_smaller_does(n):
    found = parameters.find(n)

    def good(k, t):
        secure = expected_bad(n, k, 2 * t - k) < Fraction(1, 2**40)
        return secure and expected_bad(n, k, k - t + 1) < Fraction(1, 2**20)

    assert good(found.k, found.t)
    assert not good(found.k, found.t - 1)
    assert not any(good(found.k - 2, t) for t in range(found.k // 2, found.k - 1))


def test_every_size_of_cohort_has_parameters_that_a_device_accepts():
    for n in (*range(65, 300), 777, 3000, 2**17):
        parameters.check(parameters.find(n))


@pytest.mark.security("be at most a tenth of a roster (a fifth up to 64 devices)")
@pytest.mark.security("passes a device's check with chance (1 − f)^k")
def test_up_to_64_everyone_is_a_neighbour_and_a_fifth_may_be_corrupt():
    for n in range(8, 65):
        found = parameters.find(n)
        assert found.k == n - 1
        assert 2 * found.t - found.k > max(2, -(-n // 5)) >= 2 * (found.t - 1) - found.k
        parameters.check(found)


@pytest.mark.parametrize("n", [-1, 0, 7, 2**20 + 1])
def test_cohorts_that_are_too_small_or_absurd_are_refused(n):
    for call in (parameters.find, lambda n: parameters.check(GraphParameters(n, n - 1, n - 1))):
        with pytest.raises(PolicyViolation, match="cohort"):
            call(n)


@pytest.mark.security("both of its secrets come out only if at least 2t − k of its neighbours are corrupt")
@pytest.mark.parametrize(
    "weak", [(100, 32, 21), (100, 30, 20), (100, 33, 26), (100, 32, 33), (1000, 96, 66), (20, 19, 11), (20, 19, 20),
             (20, 20, 15), (100, 99, 54), (100, 0, 0), (100, 2, 1), (9, 6, 6), (64, 20, 20)],
)  # fmt: skip
def test_parameters_that_are_too_weak_or_make_no_graph_are_refused(weak):
    with pytest.raises(PolicyViolation, match=str(weak[2])):
        parameters.check(GraphParameters(*weak))


def test_more_shares_or_neighbours_than_needed_are_accepted():
    for strong in ((100, 32, 30), (100, 99, 60), (100, 60, 40), (20, 19, 15)):
        parameters.check(GraphParameters(*strong))


@pytest.mark.security("min_sum less those that may be corrupt")
def test_the_fewest_honest_devices_of_a_sum_are_those_left_by_any_roster():
    """A fifth of up to 64 devices may be corrupt, and a tenth of more, where that is not fewer than of 64."""
    for n_max in range(8, 300):
        corrupt = max(max(2, -(-n // 5)) if n <= 64 else n // 10 for n in range(8, n_max + 1))
        for min_sum in (8, 50, n_max):
            assert parameters.least_honest(min_sum, n_max) == max(0, min_sum - corrupt)


SOURCES = sorted((Path(__file__).parents[2] / "secagg").glob("*.py"))
# The standard library's and NumPy's generators can be predicted; `secrets` asks the system.
FORBIDDEN = re.compile(
    r"\brandom\b(?!ly|ness)|default_rng|RandomState|\bseed\(|^\s*(?:import|from) (?:time|logging|os)\b", re.M
)


def test_there_are_sources():
    assert len(SOURCES) > 10


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_file_uses_a_predictable_generator_or_a_clock(path):
    assert not FORBIDDEN.findall(path.read_text())


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_file_imports_another_of_our_packages(path):
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.M))
    assert imported <= {
        "__future__", "bisect", "collections", "concurrent", "contextlib", "cryptography", "dataclasses", "enum",
        "functools", "hashlib", "math", "numpy", "secagg", "secrets", "struct", "typing",
    }  # fmt: skip
