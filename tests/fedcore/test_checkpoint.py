import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore.checkpoint import decode, encode, specs_of, view
from fedcore.errors import SchemaError
from fedcore.params import VectorSpec

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
