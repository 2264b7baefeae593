"""Codecs of reports: linear, unbiased, and the same for whoever has the public key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard

from fedcore.codecs import decode, encode
from fedcore.codecs.codec import CodecKey, RoundKey
from fedcore.codecs.rotation import Rotation
from fedcore.errors import PlanError, ReportError
from fedcore.plan import Plan
from fedcore.report import ReportLayout, Segment
from tests.device_runtime import linear

KEY = RoundKey(seed=2**63 - 1, round=7)


def vector(size, seed=0):
    return np.random.default_rng(seed).normal(size=size)


def rotated_by_matrix(values, block, key):
    """The rotation as matrices: H times signs over √B, on one block after the other."""
    values, signs = values.copy(), key.signs(-(-values.size // block) * block)
    begins = [min(begin, values.size - block) for begin in range(0, values.size, block)]
    for place, begin in enumerate(begins):
        part = values[begin : begin + block] * signs[place * block : (place + 1) * block]
        values[begin : begin + block] = hadamard(block) @ part / block**0.5
    return values


@pytest.mark.parametrize(("size", "block"), [(1, 1), (2, 2), (16, 16), (37, 8), (40, 8), (63, 32)])
def test_a_rotation_is_a_hadamard_transform_of_signed_blocks(size, block):
    key, values = CodecKey(KEY, 0, 0), vector(size)
    np.testing.assert_allclose(Rotation(block).encode(values, key), rotated_by_matrix(values, block, key), atol=1e-12)


@given(size=st.integers(0, 300), seed=st.integers(0, 2**63 - 1), segment=st.integers(0, 3))
def test_a_rotation_is_undone_and_keeps_norms_and_sums(size, seed, segment):
    codecs, key = (Rotation.of(size), Rotation.of(size)), RoundKey(seed, 1)
    first, second = vector(size, 1), vector(size, 2)
    coded = [encode(codecs, one, key, segment) for one in (first, second, first + second)]
    np.testing.assert_allclose(coded[0] + coded[1], coded[2], atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(coded[0]), np.linalg.norm(first), atol=1e-12)
    np.testing.assert_allclose(decode(codecs, coded[0], size, key, segment), first, atol=1e-12)


def test_a_rotation_spreads_one_value_over_all():
    for size in (1000, 1024, 1500):
        spike = np.zeros(size)
        spike[3] = 1
        assert np.abs(Rotation.of(size).encode(spike, CodecKey(KEY, 0, 0))).max() <= 4 / size**0.5


def test_keys_differ_by_seed_round_segment_and_place():
    keys = [CodecKey(RoundKey(seed, number), segment, place) for seed, number, segment, place in np.ndindex(2, 2, 2, 2)]
    assert len({key.signs(64).tobytes() for key in keys}) == 16


def test_signs_are_the_bits_of_the_stream():
    words, signs = CodecKey(KEY, 1, 2).words(2), CodecKey(KEY, 1, 2).signs(100)
    assert signs.tolist() == [1 - 2 * (int(words[place // 64]) >> place % 64 & 1) for place in range(100)]


@pytest.mark.parametrize("block", [0, 3, 16])
def test_a_rotation_that_does_not_fit_its_segment_is_refused(block):
    with pytest.raises(PlanError, match=f"a rotation in blocks of {block}; 8 values need a power of two up to 8"):
        Segment("delta", 8, "mean", codecs=(Rotation(block),))


def test_a_sum_of_metrics_has_no_codec():
    with pytest.raises(ReportError, match="is a sum of metrics"):
        Segment("train.metrics", 8, "sum", codecs=(Rotation(8),))


def test_an_unknown_codec_in_a_plan_is_refused():
    encoded = linear.plan(codecs=(Rotation(2),)).encode()
    assert Plan.decode(encoded).report.segments[0].codecs == (Rotation(2),)
    with pytest.raises(PlanError, match="Invalid value 'top_k'"):
        Plan.decode(encoded.replace(b'"rotation"', b'"top_k"'))


def test_a_decoded_sum_has_the_weighted_mean_of_reports():
    segments = Segment("delta", 50, "mean", codecs=(Rotation(16),)), Segment("weight", 1, "sum")
    layout = ReportLayout((*segments, Segment("train.metrics", 2, "sum")), "examples")
    deltas, metrics = [vector(50, 1).astype(np.float32), vector(50, 2).astype(np.float32)], np.ones(2, np.float32)
    total = np.zeros(layout.size)
    for delta, weight in zip(deltas, (3.0, 1.0), strict=True):
        coded = layout.encode({"delta": delta}, KEY)
        total += layout.weigh(layout.concatenate(coded | {"train.metrics": metrics}, weight), weight)
    parts = layout.decoded.split(layout.decode(total, KEY))
    np.testing.assert_allclose(parts["delta"], (3 * deltas[0] + deltas[1]) / 4, atol=1e-6)
    np.testing.assert_array_equal(parts["train.metrics"], [2, 2])
