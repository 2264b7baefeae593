"""Blobs and other files of a device."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.capabilities import peak_rss_mb
from device_runtime.errors import DeviceError, ExampleRefused, PlanRefused
from device_runtime.examples import Collection, ExampleStore, Retention, import_file, open_examples
from device_runtime.sandbox.process import Sandbox
from device_runtime.trainer import InProcess, Job, Limits
from fedcore import checkpoint
from fedcore.errors import SchemaError
from fedcore.params import FrozenVector
from fedcore.plan import BlobRef, ExampleSpec, Field, FrozenVectors
from fedcore.schedule import Loop
from muster.app import app
from tests.device_runtime import linear
from tests.device_runtime.test_sandbox import WIDE

FIELDS = (Field("x", "float32", (2, 2)), Field("y", "int64", (), 10))
X = np.arange(12, dtype=np.float32).reshape(3, 2, 2) / 2
Y = np.array([3, 1, 2])


def npz(path, x=X, y=Y, **more):
    np.savez(path.with_suffix(".npz"), x=x, y=y, **more)
    return path.with_suffix(".npz")


def jsonl(path, change=lambda rows: None):
    rows = [{"x": x.tolist(), "y": int(y)} for x, y in zip(X, Y, strict=True)]
    change(rows)
    path.with_suffix(".jsonl").write_text("".join(f"{json.dumps(row)}\n\n" for row in rows))
    return path.with_suffix(".jsonl")


def table(path, change=lambda rows: None):
    rows = [["y", "x.0", "x.1", "x.2", "x.3"], *([int(y), *x.ravel()] for x, y in zip(X, Y, strict=True))]
    change(rows)
    with path.with_suffix(".csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(rows)
    return path.with_suffix(".csv")


def put(row, column, value):
    def change(rows):
        rows[row][column] = value

    return change


@pytest.fixture
def store(tmp_path):
    return ExampleStore.open(tmp_path / "store")


@pytest.mark.parametrize("write", [npz, jsonl, table])
def test_a_file_of_each_kind_holds_the_same_examples(store, tmp_path, write):
    assert import_file(store, write(tmp_path / "mine"), fields=FIELDS).added == 3
    loaded = store.load(ExampleSpec(FIELDS))
    np.testing.assert_array_equal(loaded["x"], X)
    np.testing.assert_array_equal(loaded["y"], Y)


def test_an_npz_file_declares_a_new_collection(store, tmp_path):
    import_file(store, npz(tmp_path / "mine"))
    (held,) = store.holdings()
    assert held.fields == (FIELDS[0], Field("y", "int64"))


def test_a_second_file_needs_no_fields_and_keeps_the_retention(store, tmp_path):
    store.declare(Collection("default", FIELDS, Retention(max_count=4)))
    import_file(store, jsonl(tmp_path / "mine"))
    done = import_file(store, table(tmp_path / "mine"))
    assert (done.added, done.removed, store.counts()) == (3, 2, {"default": 4})


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda p: npz(p, X.astype(np.float64)), r"mine.npz: example 0: field 'x' is float64\[2, 2\], not float32"),
        (lambda p: npz(p, y=np.array([1, 2, 10])), "mine.npz: example 2: field 'y' holds a value outside 0 … 9"),
        (lambda p: npz(p, y=Y[:2]), "mine.npz: arrays differ in their number of examples: .*'y': 2"),
        (lambda p: npz(p, z=Y), "mine.npz: example 0: .* not .*'z'"),
        (lambda p: jsonl(p, put(2, "y", 10)), "mine.jsonl: line 5: field 'y' holds a value outside 0 … 9"),
        (lambda p: jsonl(p, put(1, "x", [[1, 2], [3]])), "mine.jsonl: line 3: field 'x' is a list of lists"),
        (lambda p: jsonl(p, put(1, "y", None)), "mine.jsonl: line 3: field 'y' is object"),
        (lambda p: jsonl(p, put(1, "y", float("nan"))), "mine.jsonl: line 3: this is not a JSON object"),
        (lambda p: jsonl(p, lambda rows: rows.append([1])), "mine.jsonl: line 7: this is not a JSON object"),
        (lambda p: jsonl(p, lambda rows: rows[0].pop("x")), "mine.jsonl: line 1: .* not .*'y'"),
        (lambda p: table(p, put(3, 0, 1.5)), "mine.csv: line 4: field 'y' must be whole numbers"),
        (lambda p: table(p, put(3, 0, "0_1")), "mine.csv: line 4: field 'y' must be whole numbers"),
        (lambda p: table(p, put(2, 3, "1_0.5")), "mine.csv: line 3: field 'x' must be numbers"),
        (lambda p: table(p, put(2, 3, "private")), "mine.csv: line 3: field 'x' must be numbers"),
        (lambda p: table(p, put(2, 3, "inf")), "mine.csv: line 3: field 'x' holds an infinity"),
        (lambda p: table(p, put(1, 0, 10**30)), "mine.csv: line 2: field 'y'"),
        (lambda p: table(p, lambda rows: rows[2].pop()), "mine.csv: line 3: this has 4 cells, the header 5"),
        (lambda p: table(p, put(0, 1, "x")), r"mine.csv: the header lacks columns \['x.0'\] or has others \['x'\]"),
        (lambda p: table(p, lambda rows: rows[0].append("y")), "mine.csv: the header .* twice"),
    ],
)
def test_a_bad_row_imports_nothing_and_is_named_by_file_row_and_field(store, tmp_path, write, words):
    with pytest.raises(ExampleRefused, match=words) as caught:
        import_file(store, write(tmp_path / "mine"), fields=FIELDS)
    assert "private" not in str(caught.value)
    assert store.holdings() == []


@pytest.mark.parametrize("name", ["mine.csv", "mine.jsonl", "mine.npz"])
def test_bytes_that_are_no_such_file_are_refused(store, tmp_path, name):
    (tmp_path / name).write_bytes(b"y,x.0,x.1,x.2,x.3\n\xff\xfe")
    with pytest.raises(DeviceError, match=name):
        import_file(store, tmp_path / name, fields=FIELDS)
    assert store.holdings() == []


def test_the_name_tells_the_kind(store, tmp_path):
    with pytest.raises(ExampleRefused, match=r"mine.txt: files of examples are called \*.npz, \*.jsonl, \*.csv"):
        import_file(store, tmp_path / "mine.txt")


def test_text_does_not_declare_a_collection(store, tmp_path):
    with pytest.raises(ExampleRefused, match="'default' is new: say what its fields are"):
        import_file(store, jsonl(tmp_path / "mine"))


def muster(*arguments):
    return CliRunner().invoke(app, ["device", "examples", *map(str, arguments)])


def test_a_retention_given_by_command_holds_now_and_for_what_comes(tmp_path):
    store = tmp_path / "store"
    muster("import", npz(tmp_path / "mine"), "--store", store)
    done = muster("keep", "--store", store, "--max-count", 2, "--json")
    limits = {"max_age_s": None, "max_count": 2, "max_bytes": None}
    assert json.loads(done.stdout) == {"collection": "default", "retention": limits, "removed": 1}
    done = muster("import", npz(tmp_path / "mine"), "--store", store, "--json")
    assert json.loads(done.stdout)["removed"] == 3
    assert muster("keep", "--store", store, "--max-bytes", 24).exit_code == 0
    (held,) = json.loads(muster("list", "--store", store, "--json").stdout)["collections"]
    assert (held["examples"], held["retention"]) == (1, {"max_age_s": None, "max_count": None, "max_bytes": 24})
    muster("keep", "--store", store)
    muster("import", npz(tmp_path / "mine"), "--store", store)
    assert ExampleStore.open(store).counts() == {"default": 4}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--collection", "photos"], "no collection 'photos' was declared"),
        (["--max-bytes", 23], "below the 24 bytes of one example"),
        (["--max-age-s", 0], "max_age_s"),
        (["--max-age-s", "nan"], "max_age_s"),
    ],
)
def test_a_retention_that_is_none_is_refused_and_removes_nothing(tmp_path, options, words):
    store = tmp_path / "store"
    muster("import", npz(tmp_path / "mine"), "--store", store)
    done = muster("keep", "--store", store, *options)
    assert isinstance(done.exception, ExampleRefused)
    assert words in str(done.exception)
    assert ExampleStore.open(store).counts() == {"default": 3}


def test_commands_import_list_and_delete(tmp_path):
    store = tmp_path / "store"
    new = ["--field", "x:float32:2x2", "--field", "y:int64::10"]
    done = muster("import", table(tmp_path / "mine"), "--store", store, "--collection", "photos", *new, "--json")
    assert json.loads(done.stdout) == {"added": 3, "removed": 0, "put_aside": None}
    muster("import", npz(tmp_path / "mine"), "--store", store)
    first, second = json.loads(muster("list", "--store", store, "--json").stdout)["collections"]
    assert (first["collection"], first["examples"]) == ("default", 3)
    assert (second["collection"], second["bytes"], second["fields"][1]["high"]) == ("photos", 3 * 24, 10)
    assert "photos" in muster("list", "--store", store).stdout
    assert json.loads(muster("delete", "--store", store, "--before", "2001-01-01", "--json").stdout) == {"removed": 0}
    assert json.loads(muster("delete", "--store", store, "--collection", "photos", "--json").stdout) == {"removed": 3}
    assert open_examples(store).counts() == {"default": 3}
    assert json.loads(muster("delete", "--store", store, "--all", "--json").stdout) == {"removed": 3}


def test_import_goes_on_in_a_new_store_and_names_the_damaged_one(tmp_path):
    store = ExampleStore.open(tmp_path / "store")
    import_file(store, npz(tmp_path / "mine"))
    store.path.write_bytes(store.path.read_bytes()[:4096] + b"\xff" * 20_000)
    done = json.loads(muster("import", npz(tmp_path / "mine"), "--store", tmp_path / "store", "--json").stdout)
    assert done["added"] == 3
    assert ".damaged-" in done["put_aside"]
    assert open_examples(tmp_path / "store").counts() == {"default": 3}


@pytest.mark.parametrize("arguments", [[], ["--all", "--collection", "photos"]])
def test_deleting_says_what(tmp_path, arguments):
    ExampleStore.open(tmp_path)
    assert muster("delete", "--store", tmp_path, *arguments).exit_code == 2


@pytest.mark.parametrize("field", ["x", "x:float64", "x:float32:a", "x:int64::b", "x:int64::1:2"])
def test_a_field_that_is_none_is_a_usage_error(tmp_path, field):
    done = muster("import", npz(tmp_path / "mine"), "--store", tmp_path / "s", "--field", field)
    assert done.exit_code == 2
    assert repr(field) in done.output.replace("\n", "")


def test_listing_a_store_that_is_not_there_makes_none(tmp_path):
    done = muster("list", "--store", tmp_path / "store")
    assert "the file is missing" in str(done.exception)
    assert not (tmp_path / "store").exists()


def test_conditions_are_told_as_json_and_in_words(tmp_path):
    told = json.loads(CliRunner().invoke(app, ["device", "conditions", "--json"]).stdout)
    assert told["free_memory_bytes"] > 0
    assert set(told) >= {"charging", "idle", "unmetered", "battery", "thermal_headroom_c"}
    words = CliRunner().invoke(app, ["device", "conditions"]).stdout
    assert ("unknown" in words) == (None in told.values())


SPECS = (FrozenVector("a", 3), FrozenVector("codes", 5, "uint8"), FrozenVector("b", 2))
VECTORS = {
    "a": np.array([1, 2, 3], np.float32),
    "codes": np.arange(250, 255, dtype=np.uint8),
    "b": np.array([-1, 0.5], np.float32),
}
MEASURE = """
import sys
from tests.device_runtime.test_files import measured
measured(sys.argv[1], int(sys.argv[2]))
"""


def job_of(folder, values, epochs=2):
    """A job whose graphs read that many frozen values from their file."""
    frozen = {"w": np.full(values, 0.5, np.float32)}
    path = folder / "frozen"
    path.write_bytes(checkpoint.encode_frozen(frozen))
    begin = linear.graph(
        [
            ("ReduceMax", ["frozen.w"], "most", {"keepdims": 1}),
            ("Add", ["broadcast.params", "most"], "next.params"),
        ],
        [linear.VECTOR, ("frozen.w", linear.FLOAT, [values])],
        [("next.params", linear.FLOAT, [linear.D])],
    )
    graphs = linear.graphs() | {"train.begin": begin}
    about = FrozenVectors(BlobRef.of(path.read_bytes()), checkpoint.frozen_specs_of(frozen))
    plan = msgspec.structs.replace(linear.plan(graphs, train=Loop(batch_size=4, epochs=epochs)), frozen=about)
    return Job(plan, graphs, {"params": linear.PARAMS}, linear.examples(10), linear.KEY, frozen=path)


def measured(folder, values):
    """Print the growth of this process's peak, and what its sandbox held at the most, in 2^20 bytes."""
    job, held = job_of(Path(folder), values, epochs=3000), {"RssAnon": 0, "RssFile": 0, "RssShmem": 0}
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_mb("self", "VmRSS")

    def watch():
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            held.update({name: max(most, resident_mb(child, name)) for name, most in held.items()})
        return True

    Sandbox("onnxruntime").train(job, WIDE, watch)
    print(json.dumps({"grown": peak_rss_mb() - before, **held}))


def resident_mb(process, name):
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), 0)


def test_vectors_of_a_file_are_those_of_its_bytes(tmp_path):
    (tmp_path / "frozen").write_bytes(checkpoint.encode_frozen(VECTORS))
    mapped = checkpoint.map_frozen(tmp_path / "frozen", SPECS)
    assert list(mapped) == ["a", "codes", "b"]
    for name, vector in mapped.items():
        np.testing.assert_array_equal(vector, VECTORS[name])
        assert (vector.dtype, vector.flags.writeable) == (VECTORS[name].dtype, False)
    with (tmp_path / "frozen").open("rb") as opened:
        assert checkpoint.map_frozen(opened.fileno(), SPECS)["b"][0] == -1
        assert not opened.closed


GOOD = checkpoint.encode_frozen(VECTORS)
HEADER = {
    "a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]},
    "codes": {"dtype": "U8", "shape": [5], "data_offsets": [20, 25]},
}


def lying(**changes):
    """A file whose header says something else."""
    head = json.dumps({name: {**about, **changes.get(name, {})} for name, about in HEADER.items()}).encode()
    head = head.ljust(-(-len(head) // 8) * 8)
    return len(head).to_bytes(8, "little") + head + bytes(25)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a safetensors file"),
        (b"\xff" * 40, "the header has 18446744073709551623 bytes"),
        (lying(a={"shape": [9] * 1000}), "where 3 vectors need 810 at most"),
        (GOOD[:-1], "vector 'codes' is U8"),
        (checkpoint.encode_frozen({"a": VECTORS["a"]}), r"vectors are \['a'\], expected"),
        (lying(a={"dtype": "F64"}), r"vector 'a' is F64\[3\], expected float32\[3\]"),
        (lying(a={"shape": [2]}), r"vector 'a' is F32\[2\]"),
        (lying(a={"data_offsets": [1, 13]}), "vector 'a'"),
        (lying(a={"data_offsets": [-12, 0]}), "vector 'a'|not a safetensors file"),
        (lying(a={"data_offsets": [12, 2**62]}), "vector 'a'"),
        (lying(codes={"data_offsets": [25, 20]}), "vector 'codes'"),
    ],
)
def test_a_file_of_other_vectors_is_refused_in_one_line(data, words, tmp_path):
    (tmp_path / "frozen").write_bytes(data)
    with pytest.raises(SchemaError, match=words) as caught:
        checkpoint.map_frozen(tmp_path / "frozen", SPECS)
    assert "\n" not in str(caught.value)


def test_a_sandbox_reads_the_file_that_it_was_given(tmp_path):
    job = job_of(tmp_path, 1000)
    found = Sandbox("onnxruntime").train(job, WIDE, lambda: True)
    wanted = InProcess(OnnxRuntime()).train(job, WIDE, lambda: True)
    assert found.values.tobytes() == wanted.values.tobytes()
    without = Job(linear.plan(), linear.graphs(), job.broadcast, job.examples, job.key)
    assert not np.allclose(found.values, InProcess(OnnxRuntime()).train(without, WIDE, lambda: True).values)


@pytest.mark.parametrize("trainer", [Sandbox("onnxruntime"), InProcess(OnnxRuntime())])
def test_a_file_that_went_is_a_refusal_of_the_plan(trainer, tmp_path):
    job = job_of(tmp_path, 1000)
    job.frozen.unlink()
    with pytest.raises(PlanRefused, match="frozen"):
        trainer.train(job, WIDE, lambda: True)


def test_the_limit_on_memory_counts_what_the_file_holds(tmp_path):
    given = []
    InProcess(OnnxRuntime(), given.append).train(job_of(tmp_path, 1000), Limits(9_000, 5.0), lambda: True)
    InProcess(OnnxRuntime(), given.append).train(job_of(tmp_path, 1000), Limits(3_000, 5.0), lambda: True)
    assert given == [Limits(5_000, 5.0), Limits(0, 5.0)]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_no_process_holds_a_copy_of_what_is_frozen(tmp_path):
    found = {}
    for values in (1000, 10_000_000):  # 40 MB
        command = [sys.executable, "-c", MEASURE, str(tmp_path), str(values)]
        found[values] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    small, large = found.values()
    assert large["grown"] - small["grown"] < 10
    assert large["RssAnon"] - small["RssAnon"] < 10
    shared = [one["RssFile"] + one["RssShmem"] for one in (small, large)]  # the latter where the folder is in memory
    assert shared[1] - shared[0] > 25, "the sandbox reads the file itself"
