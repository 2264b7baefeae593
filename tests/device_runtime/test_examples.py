import io
import zipfile

import numpy as np
import pytest

from device_runtime.errors import ExamplesError
from device_runtime.examples import Collection, ExampleStore, NpzFile, open_examples
from fedcore.plan import ExampleSpec, Field

SPEC = ExampleSpec((Field("x", "float32", (2, 3)), Field("y", "int64", (), 10), Field("b", "uint8", (4,))))
# What the app declared says nothing of the plan's bound.
DECLARED = (*SPEC.fields[:1], Field("y", "int64"), *SPEC.fields[2:])


def arrays(n=5):
    rng = np.random.default_rng(1)
    return {
        "x": rng.normal(size=(n, 2, 3)).astype(np.float32),
        "y": rng.integers(0, 10, n),
        "b": rng.integers(0, 256, (n, 4)).astype(np.uint8),
    }


def rows(columns):
    return [{name: column[i] for name, column in columns.items()} for i in range(len(columns["y"]))]


@pytest.fixture(params=["npz", "store"])
def source_of(request, tmp_path):
    """Put columns on disk in either form and open what is there."""

    def make(columns):
        path = tmp_path / "examples"
        if request.param == "npz":
            with path.open("wb") as file:
                np.savez(file, **columns)
        else:
            ExampleStore.open(path).extend(Collection("default", DECLARED), rows(columns))
        return open_examples(path)

    return make


def refused(source, spec=SPEC):
    with pytest.raises(ExamplesError) as caught:
        source.load(spec)
    return caught.value


def test_both_sources_return_exactly_what_was_put_in(source_of):
    source = source_of(arrays())
    loaded = source.load(SPEC)
    assert list(loaded) == ["x", "y", "b"]
    for name, column in arrays().items():
        np.testing.assert_array_equal(loaded[name], column)
        assert loaded[name].dtype == column.dtype
    assert source.counts() == {"default": 5}
    assert (source.count("default"), source.count("other")) == (5, 0)


def test_fields_that_the_plan_does_not_name_are_left_alone(source_of):
    only = ExampleSpec((Field("y", "int64"),))
    assert list(source_of(arrays()).load(only)) == ["y"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_is_refused_with_field_and_index(tmp_path, bad):
    columns = arrays()
    columns["x"][3, 1, 2] = bad
    np.savez(tmp_path / "e.npz", **columns)
    error = refused(open_examples(tmp_path / "e.npz"))
    assert (error.reason, str(error)) == ("invalid-examples", "field 'x' of example 3 holds an infinity or NaN")


@pytest.mark.parametrize("bad", [-1, 10])
def test_an_integer_out_of_range_is_refused_with_field_and_index(source_of, bad):
    columns = arrays()
    columns["y"][2] = bad
    assert str(refused(source_of(columns))) == "field 'y' of example 2 holds a value outside 0 … 9"


@pytest.mark.parametrize(
    "field",
    [Field("x", "float32", (3, 2)), Field("x", "float32", (6,)), Field("x", "int32", (2, 3)), Field("y", "int32")],
)
def test_another_shape_or_dtype_is_refused_by_name(source_of, field):
    error = refused(source_of(arrays()), ExampleSpec((field,)))
    assert error.reason == "invalid-examples"
    assert field.name in str(error)
    assert field.dtype in str(error)


def test_a_missing_field_is_refused_by_name(source_of):
    error = refused(source_of(arrays()), ExampleSpec((Field("z", "float32"),)))
    assert error.reason == "invalid-examples"
    assert "z" in str(error)


def test_an_unknown_collection_has_too_few_examples(source_of):
    error = refused(source_of(arrays()), ExampleSpec(SPEC.fields, "photos"))
    assert error.reason == "too-few-examples"
    assert "photos" in str(error)


def test_no_examples_are_too_few(source_of):
    assert refused(source_of(arrays(0))).reason == "too-few-examples"


def test_fields_of_different_lengths_are_refused(tmp_path):
    np.savez(tmp_path / "e.npz", **arrays() | {"y": np.zeros(4, np.int64)})
    source = open_examples(tmp_path / "e.npz")
    assert source.counts() == {"default": 4}
    assert "differ in their number" in str(refused(source))


class Payload:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.security("No data is run as code. … There is no pickle")
def test_pickled_objects_are_never_loaded(tmp_path):
    loot = np.array([Payload(tmp_path / "loot")] * 5, object)
    np.savez(tmp_path / "e.npz", **arrays() | {"y": loot}, allow_pickle=True)
    assert refused(open_examples(tmp_path / "e.npz")).reason == "invalid-examples"
    assert not (tmp_path / "loot").exists()


def test_counting_reads_headers_alone(tmp_path, monkeypatch):
    np.savez(tmp_path / "e.npz", **arrays())
    monkeypatch.delattr(np.lib.format, "read_array")
    assert NpzFile(tmp_path / "e.npz").counts() == {"default": 5}


@pytest.mark.parametrize("cut", [100, 400, 700])
def test_a_truncated_file_is_refused(tmp_path, cut):
    np.savez(tmp_path / "whole.npz", **arrays())
    (tmp_path / "e.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:cut])
    assert refused(open_examples(tmp_path / "e.npz")).reason == "invalid-examples"


@pytest.mark.parametrize("content", [None, b"", b"hello, world, these are words"])
def test_what_is_no_source_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "e").write_bytes(content)
    with pytest.raises(ExamplesError, match=r"/e\b"):
        open_examples(tmp_path / "e")


def odd_npz(path, header=None, method=None, flag=0):
    """An .npz file of one field, whose NumPy header or whose zip entry is not what it should be."""
    content = io.BytesIO()
    if header is None:
        np.save(content, np.zeros((4, 3), np.float32))
    else:
        content.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(48))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", content.getvalue())
    data = bytearray(path.read_bytes())
    for start, flags_at, method_at in ((data.index(b"PK\3\4"), 6, 8), (data.index(b"PK\1\2"), 8, 10)):
        data[start + flags_at] |= flag
        if method is not None:
            data[start + method_at] = method
    path.write_bytes(data)
    return NpzFile(path)


@pytest.mark.parametrize(
    "odd",
    [
        {"header": b"{'descr': '<f4', 'fortran_order': False, 'shape': (((("},
        {"header": b"{'descr': '<f4', 'fortran_order': False, 'shape': (-4, 3), }"},
        {"header": b"{'descr': '<f4', 'fortran_order': False, 'shape': (-4, -3), }"},
        {"header": b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000, 3), }"},
        {"flag": 1},
        {"method": 99},
        {"method": 14},
    ],
    ids=str,
)
def test_an_odd_file_is_invalid_examples_whatever_is_odd_about_it(tmp_path, odd):
    source = odd_npz(tmp_path / "examples.npz", **odd)
    for read in (source.counts, lambda: source.load(ExampleSpec((Field("x", "float32", (3,)),)))):
        with pytest.raises(ExamplesError) as refused:
            read()
        assert refused.value.reason == "invalid-examples"


@pytest.mark.parametrize("left", [{"x": np.zeros((0, 2, 3), np.float32)}, {"x": np.zeros((0, 2, 3), np.float64)}])
def test_examples_gone_after_counting_are_too_few_or_refused_by_name(tmp_path, left, monkeypatch):
    columns = arrays(0) | left
    np.savez(tmp_path / "examples.npz", **columns)
    monkeypatch.setattr(NpzFile, "count", lambda self, collection: 5)
    with pytest.raises(ExamplesError) as refused:
        NpzFile(tmp_path / "examples.npz").load(SPEC)
    assert refused.value.reason == ("too-few-examples" if left["x"].dtype == np.float32 else "invalid-examples")
