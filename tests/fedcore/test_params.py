import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore.errors import SchemaError
from fedcore.params import ParamSchema, TensorSpec

SCHEMA = ParamSchema((TensorSpec("w", (2, 3)), TensorSpec("b", (3,)), TensorSpec("scale", ())))


def tensors():
    return {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([6, 7, 8], np.float32),
        "scale": np.array(9, np.float32),
    }


def test_the_vector_is_the_tensors_row_by_row_in_the_order_of_the_schema():
    shuffled = dict(reversed(tensors().items()))
    vector = SCHEMA.flatten(shuffled)
    assert vector.dtype == np.float32
    np.testing.assert_array_equal(vector, np.arange(10))


def test_a_transposed_tensor_is_laid_out_by_its_values_not_by_its_memory():
    column_major = np.asfortranarray(tensors()["w"])
    np.testing.assert_array_equal(SCHEMA.flatten(tensors() | {"w": column_major}), np.arange(10))


@given(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=5))
def test_unflatten_undoes_flatten(shapes):
    schema = ParamSchema(tuple(TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes)))
    vector = np.arange(schema.size, dtype=np.float32)
    named = schema.unflatten(vector)
    assert [named[spec.name].shape for spec in schema.tensors] == shapes
    np.testing.assert_array_equal(schema.flatten(named), vector)


def test_flatten_copies():
    named = tensors()
    vector = SCHEMA.flatten(named)
    vector[:] = -1
    assert named["w"][1, 2] == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": np.zeros((3, 2), np.float32)}, r"tensor 'w' is float32\[3, 2\], the schema says float32\[2, 3\]"),
        ({"b": np.zeros(3)}, r"tensor 'b' is float64\[3\], the schema says float32\[3\]"),
        ({"scale": np.zeros(1, np.float32)}, r"tensor 'scale' is float32\[1\], the schema says float32\[\]"),
        ({"extra": np.zeros(1, np.float32)}, r"the schema does not name: \['extra'\]"),
    ],
)
def test_a_tensor_that_the_schema_does_not_describe_is_refused_by_name(change, message):
    with pytest.raises(SchemaError, match=message):
        SCHEMA.flatten(tensors() | change)


def test_a_missing_tensor_is_refused_by_name():
    named = tensors()
    del named["b"]
    with pytest.raises(SchemaError, match="tensor 'b' is missing"):
        SCHEMA.flatten(named)


@pytest.mark.parametrize("vector", [np.zeros(9, np.float32), np.zeros(10), np.zeros((1, 10), np.float32)])
def test_a_vector_of_another_length_or_type_is_refused(vector):
    with pytest.raises(SchemaError, match=r"the schema says float32\[10\]"):
        SCHEMA.unflatten(vector)


def test_a_repeated_name_is_refused():
    with pytest.raises(SchemaError, match=r"parameter names repeat: \['w'\]"):
        ParamSchema((TensorSpec("w", ()), TensorSpec("w", (1,))))


def test_the_digest_is_that_of_the_json_in_the_specification():
    text = (
        '[{"name":"w","shape":[2,3],"dtype":"float32"},'
        '{"name":"b","shape":[3],"dtype":"float32"},'
        '{"name":"scale","shape":[],"dtype":"float32"}]'
    )
    assert SCHEMA.digest == hashlib.sha256(text.encode()).hexdigest()


def test_another_order_of_tensors_is_another_schema():
    assert ParamSchema(SCHEMA.tensors[::-1]).digest != SCHEMA.digest
