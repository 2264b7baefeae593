"""Vectors on their way: checkpoints, deltas between them, and values in few bits."""

import json
import struct
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given, strategies as st

from fedcore import checkpoint
from fedcore.batching import StreamKey
from fedcore.checkpoint import applied, decode, delta_between, encode, specs_of, view
from fedcore.codecs import Subsample
from fedcore.compression import BLOCK, dequantise, quantise, upload_bytes
from fedcore.errors import DeltaError, PlanError, ReportError, SchemaError
from fedcore.params import VectorSpec
from fedcore.plan import BlobRef, Plan
from fedcore.report import ReportLayout, Segment
from tests.device_runtime import linear

VECTORS = {"params": np.array([1, -2, 3], np.float32), "m": np.array([0.5], np.float32)}
SPECS = specs_of(VECTORS)


def container(header, body=b""):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_what_was_encoded_comes_back_in_the_order_asked_for():
    decoded = decode(encode(VECTORS), SPECS[::-1])
    assert list(decoded) == ["m", "params"]
    for name, vector in VECTORS.items():
        np.testing.assert_array_equal(decoded[name], vector)


def test_equal_vectors_give_equal_bytes_whatever_their_order_and_stride():
    strided = {"m": np.array([0.5, 9], np.float32)[::2], "params": VECTORS["params"]}
    assert encode(strided) == encode(VECTORS)


def test_the_bytes_are_those_of_the_safetensors_format():
    data = encode({"params": VECTORS["params"]})
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    assert header == {"params": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}
    assert data[8 + length :] == VECTORS["params"].astype("<f4").tobytes()


@pytest.mark.parametrize("vector", [np.zeros(3), np.zeros((3, 1), np.float32), np.array(1, np.float32)])
def test_only_flat_float32_is_encoded(vector):
    with pytest.raises(SchemaError, match=r"vector 'params' is .*, expected float32 \(n,\)"):
        encode({"params": vector})


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([VectorSpec("params", 3)], r"vectors are \['m', 'params'\], expected \['params'\]"),
        ([*SPECS, VectorSpec("v", 3)], r"expected \['m', 'params', 'v'\]"),
        ([VectorSpec("params", 4), VectorSpec("m", 1)], r"vector 'params' is float32\[3\], expected float32\[4\]"),
    ],
)
def test_other_vectors_than_those_asked_for_are_refused(specs, message):
    with pytest.raises(SchemaError, match=message):
        decode(encode(VECTORS), specs)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"\xff" * 64,
        b"\x80\x04\x95pickle",
        encode(VECTORS)[:-1],
        encode(VECTORS) + b"\0",
        container({"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}, b"12"),
        container({"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}, b"12345678"),
        container({"a": {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}}, b"1234"),
        container({"a": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 4]}}, b"1234"),
    ],
)
def test_bytes_that_are_not_the_vectors_are_refused(data):
    with pytest.raises(SchemaError):
        decode(data, [VectorSpec("a", 1)])


@given(st.data())
def test_a_damaged_file_is_decoded_or_refused_and_nothing_else(data):
    damaged = bytearray(encode(VECTORS))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(bytes(damaged), SPECS)
    except SchemaError:
        return
    assert {name: vector.size for name, vector in decoded.items()} == {"params": 3, "m": 1}


def test_view_is_what_decode_gives_and_copies_nothing_of_the_usual_bytes():
    spec, vector = VectorSpec("report", 5), np.arange(5, dtype=np.float32)
    data = bytearray(encode({"report": vector}))
    seen = view(memoryview(data), spec)
    np.testing.assert_array_equal(seen, decode(bytes(data), (spec,))["report"])
    data[-4:] = np.float32(9).tobytes()
    assert seen[-1] == 9


def test_view_takes_other_spellings_of_a_vector_and_refuses_another():
    spec, vector = VectorSpec("report", 5), np.arange(5, dtype=np.float32)
    data = encode({"report": vector})
    size = int.from_bytes(data[:8], "little")
    spaced = (size + 8).to_bytes(8, "little") + data[8 : 8 + size] + b" " * 8 + data[8 + size :]
    np.testing.assert_array_equal(view(memoryview(spaced), spec), vector)
    for other in (encode({"report": vector[:4]}), encode({"update": vector}), data[:-1], b""):
        with pytest.raises(SchemaError):
            view(memoryview(other), spec)


def moved(share, seed=0):
    """A checkpoint, and another whose values moved by so small a share."""
    rng = np.random.default_rng(seed)
    params = rng.normal(size=5000).astype(np.float32)
    after = params * (1 + share * rng.normal(size=5000)).astype(np.float32)
    return checkpoint.encode({"params": params}), checkpoint.encode({"params": after})


@pytest.mark.parametrize(("share", "most"), [(0, 0.01), (1e-5, 0.4), (1e-3, 0.6), (1e-1, 0.9)])
def test_a_delta_is_shorter_the_less_moved_and_exact(share, most):
    before, after = moved(share)
    delta = delta_between(before, after)
    assert len(delta) < most * len(after)
    assert applied(delta, before, BlobRef.of(after)) == after


@given(pair=st.integers(0, 40).flatmap(lambda size: st.tuples(*[st.binary(min_size=size, max_size=size)] * 2)))
def test_any_two_blobs_of_one_length_have_a_delta(pair):
    before, after = pair
    assert applied(delta_between(before, after), before, BlobRef.of(after)) == after


def test_blobs_of_two_lengths_have_none():
    with pytest.raises(DeltaError, match="no delta between blobs of 3 and 4 bytes"):
        delta_between(b"abc", b"abcd")


def test_a_delta_to_another_base_or_target_is_refused():
    before, after = moved(1e-3)
    delta = delta_between(before, after)
    with pytest.raises(DeltaError, match="leads elsewhere"):
        applied(delta, after, BlobRef.of(after))
    with pytest.raises(DeltaError, match="leads elsewhere"):
        applied(delta, before, BlobRef.of(before))
    with pytest.raises(DeltaError, match="a delta to a blob of"):
        applied(delta, before[:-4], BlobRef.of(after))


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_delta_is_refused(place, bit, cut):
    before, after = moved(1e-3)
    delta = bytearray(delta_between(before, after))
    place %= len(delta)
    if cut:
        del delta[place:]
    else:
        delta[place] ^= 1 << bit
    with suppress(DeltaError):  # a few bits mean nothing
        assert applied(bytes(delta), before, BlobRef.of(after)) == after


@given(data=st.binary(max_size=60))
def test_any_bytes_are_refused_as_a_delta(data):
    before, after = moved(1e-3)
    with pytest.raises(DeltaError):
        applied(data, before, BlobRef.of(after))


@pytest.mark.parametrize("told", [True, False], ids=["says its length", "does not say its length"])
def test_a_delta_that_decompresses_to_too_much_is_refused(told):
    before, after = moved(1e-3)
    writer = zstandard.ZstdCompressor(write_content_size=told)
    stream = writer.compressobj()
    bomb = writer.compress(bytes(1 << 26)) if told else stream.compress(bytes(1 << 26)) + stream.flush()
    assert len(bomb) < 1 << 16
    with pytest.raises(DeltaError, match="when it is decompressed"):
        applied(bomb, before, BlobRef.of(after))
    double = delta_between(before, after)
    with pytest.raises(DeltaError):
        applied(double + double, before, BlobRef.of(after))


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
