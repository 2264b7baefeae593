"""Frozen vectors are used from their file: nobody copies them, a sandbox gets a descriptor, and limits count them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.capabilities import peak_rss_mb
from device_runtime.errors import PlanRefused
from device_runtime.sandbox.process import Sandbox
from device_runtime.trainer import InProcess, Job, Limits
from fedcore import checkpoint
from fedcore.errors import SchemaError
from fedcore.params import FrozenVector
from fedcore.plan import BlobRef, FrozenVectors
from fedcore.schedule import Loop
from tests.device_runtime import linear
from tests.device_runtime.test_sandbox import WIDE

SPECS = (FrozenVector("a", 3), FrozenVector("codes", 5, "uint8"), FrozenVector("b", 2))
VECTORS = {
    "a": np.array([1, 2, 3], np.float32),
    "codes": np.arange(250, 255, dtype=np.uint8),
    "b": np.array([-1, 0.5], np.float32),
}
MEASURE = """
import sys
from tests.device_runtime.test_frozen_files import measured
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
