import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from secagg import packing
from secagg.errors import BadInput, HeadroomError, UnmaskCheckFailed
from secagg.packing import PackedSegment
from tests.secagg import reference

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
