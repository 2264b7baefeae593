"""Quantised reports: unbiased, of known size and error, and refused when they are damaged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore.batching import StreamKey
from fedcore.codecs.codec import Subsample
from fedcore.errors import PlanError, ReportError
from fedcore.plan import Plan
from fedcore.quantisation import BLOCK, dequantise, quantise, upload_bytes
from fedcore.report import ReportLayout, Segment
from tests.device_runtime import linear

SIZE = 2 * BLOCK + 100


def layout(bits, size=SIZE, codecs=()):
    mean, metrics = Segment("delta", size, "mean", codecs=codecs), Segment("train.metrics", 2, "sum")
    return ReportLayout((mean, Segment("weight", 1, "sum"), metrics), "examples", bits=bits)


def report(size=SIZE, seed=0):
    rng = np.random.default_rng(seed)
    scales = np.repeat([1, 1e-3, 10], BLOCK)[:size]
    return np.concatenate([rng.normal(size=size) * scales, [7, 3, 0.3]]).astype(np.float32)


def travelled(bits, report_L, seed=0):
    body = quantise(layout(bits), report_L, StreamKey(seed, 1, 2))
    assert len(body) == upload_bytes(layout(bits))
    return dequantise(memoryview(body), layout(bits))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_rounding_is_less_than_a_step_of_its_block_and_nothing_on_average(bits):
    report_L = report()
    found = np.array([travelled(bits, report_L, seed) for seed in range(300)], np.float64)
    for begin in range(0, SIZE, BLOCK):
        block = slice(begin, min(begin + BLOCK, SIZE))
        step = np.ptp(report_L[block]) / (2**bits - 1)
        error = found[:, block] - report_L[block]
        assert np.abs(error).max() < step * 1.001
        # A value that is rounded to one of two neighbours deviates by half a step at most.
        assert np.abs(error.mean(axis=0)).max() < 4 * step / 2 / 300**0.5
        assert np.abs(error.mean()) < 4 * step / 2 / error.size**0.5
    np.testing.assert_array_equal(found[:, -3:], np.broadcast_to(report_L[-3:], (300, 3)))


def test_sizes_are_the_bits_and_a_range_for_every_block():
    assert upload_bytes(layout(0)) == 4 * SIZE + 12
    assert upload_bytes(layout(4)) == SIZE // 2 + 3 * 8 + 12
    assert upload_bytes(layout(1, size=9)) == 2 + 8 + 12
    assert upload_bytes(layout(8, codecs=(Subsample(100),))) == 100 + 8 + 12


@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=20),
    bits=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 9),
)
def test_any_values_come_back_within_their_range(values, bits, seed):
    size = len(values)
    report_L = np.array([*values, 1, 0, 0], np.float32)
    found = dequantise(memoryview(quantise(layout(bits, size), report_L, StreamKey(seed, 1, 1))), layout(bits, size))
    width = np.ptp(np.append(report_L[:size], report_L[:1])) if size else 0
    step = float(width) * 1.001 / (2**bits - 1) + 2.0**-149  # what lies between the smallest numbers
    np.testing.assert_allclose(found, report_L, atol=step, rtol=1e-6)


def test_one_value_and_equal_values_are_exact():
    for values in ([3.7], [-2.5] * 40, [1.25, 9.5]):
        report_L = np.array([*values, 1, 0, 0], np.float32)
        size = len(values)
        body = quantise(layout(1, size), report_L, StreamKey(1, 1, 1))
        np.testing.assert_array_equal(dequantise(memoryview(body), layout(1, size)), report_L)


def test_values_too_far_apart_are_refused():
    report_L = np.array([3e38, -3e38, 1, 0, 0], np.float32)
    with pytest.raises(ReportError, match="too far apart"):
        quantise(layout(1, 2), report_L, StreamKey(1, 1, 1))


@given(data=st.binary(max_size=40))
def test_any_bytes_are_a_report_or_refused(data):
    small = layout(2, size=5)
    if len(data) != upload_bytes(small):
        with pytest.raises(ReportError, match="a report of this plan has 22 bytes"):
            dequantise(memoryview(data), small)
        data = data.ljust(22, b"\xff")[:22]
    assert dequantise(memoryview(data), small).shape == (small.size,)


def test_a_plan_has_only_bits_that_there_are():
    encoded = linear.plan(bits=4).encode()
    assert Plan.decode(encoded).report.bits == 4
    with pytest.raises(PlanError):
        Plan.decode(encoded.replace(b'"bits":4', b'"bits":3'))
