import json
import os
import platform
import random
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from device_runtime.backends import executorch as building
from device_runtime.backends.executorch import FOLDER, SHIM, ExecuTorch, default_folder, library, shim_name
from device_runtime.errors import ConfigError, PlanRefused, RuntimeFailed
from device_runtime.permission.policy import Policy
from device_runtime.sandbox.process import Sandbox
from device_runtime.session import run_session
from muster.app import app
from tests.device_runtime import linear
from tests.device_runtime.coordinator import report_of
from tests.device_runtime.executorch import altered, doubler, linear_graphs, program, step
from tests.fixtures import built

pytest.importorskip("executorch")
F = np.float32
UNSIGNED = Policy(unsigned_programs=True)
STEP = ["w1", "w2", "x", "y", "mask"], ["next.w1", "next.w2", "metrics"]


@pytest.fixture(scope="module")
def programs():
    """Bytes by name, exported once."""
    random_step = tuple(torch.randn(shape) for shape in ((8, 16), (16, 3), (20, 8), (20, 3), (20,)))
    return {
        "doubler": doubler(),
        "planned": doubler(planned=True),
        "delegated": doubler(delegate=True),
        "step": program(step, random_step, *STEP),
    }


@pytest.fixture(scope="module")
def graphs():
    """The programs of the plan of `linear`, exported once."""
    return linear_graphs()


@pytest.fixture
def load(executorch, programs):
    return lambda name="doubler": ExecuTorch().load(programs[name], name)


def data(seed=0):
    """Inputs of the step."""
    rng = np.random.default_rng(seed)
    shapes = {"w1": (8, 16), "w2": (16, 3), "x": (20, 8), "y": (20, 3)}
    mask = (np.arange(20) < 13).astype(F)
    return {name: rng.normal(size=shape).astype(F) for name, shape in shapes.items()} | {"mask": mask}


@pytest.mark.parametrize("name", ["doubler", "planned", "delegated"])
def test_outputs_are_written_into_the_callers_buffers(load, name):
    loaded, c, d, square = load(name), np.array([1, 2, 3, 4], F), np.zeros(4, F), np.zeros(4, F)
    loaded.run({"c": c}, {"square": square, "d": d})
    assert (d.tolist(), square.tolist()) == ([2, 4, 6, 8], [1, 4, 9, 16])
    c[:] = 5  # in place: the caller's memory, not a copy of it
    loaded.run({"c": c}, {"square": square, "d": d})
    assert (d.tolist(), square.tolist()) == ([10] * 4, [25] * 4)


def test_a_training_loop_that_swaps_two_sets_of_buffers_follows_torch(load):
    loaded, batch = load("step"), data()
    now = {"w1": batch.pop("w1"), "w2": batch.pop("w2")}
    after, metrics = {name: np.zeros_like(value) for name, value in now.items()}, np.zeros(2, F)
    expected = [torch.from_numpy(value.copy()) for value in now.values()]
    fixed = [torch.from_numpy(value) for value in batch.values()]
    for _ in range(100):
        loaded.run(now | batch, {f"next.{name}": value for name, value in after.items()} | {"metrics": metrics})
        now, after = after, now
        *expected, sums = step(*expected, *fixed)
        np.testing.assert_allclose(metrics, sums, rtol=1e-5)
    for value, reference in zip(now.values(), expected, strict=True):
        np.testing.assert_allclose(value, reference, rtol=1e-4, atol=1e-5)


def test_memory_freed_and_allocated_again_is_not_taken_for_the_old(load):
    loaded, d = load(), np.zeros(4, F)
    for value in range(50):
        loaded.run({"c": np.full(4, value, F)}, {"d": d})
        assert d[0] == 2 * value


def test_the_program_outlives_the_callers_reference_to_its_bytes(executorch, programs):
    loaded = ExecuTorch().load(bytes(bytearray(programs["step"])))
    filler = [bytes(len(programs["step"])) for _ in range(100)]
    outputs = {"next.w1": np.zeros((8, 16), F), "next.w2": np.zeros((16, 3), F), "metrics": np.zeros(2, F)}
    loaded.run(data(), outputs)
    assert outputs["metrics"][0] == 13
    assert len(filler) == 100


def test_an_output_that_is_not_asked_for_is_not_written(load):
    loaded, c, d, square = load(), np.full(4, 3, F), np.zeros(4, F), np.zeros(4, F)
    loaded.run({"c": c}, {"d": d, "square": square})
    square[:] = 0
    loaded.run({"c": c}, {"d": d})
    assert square.tolist() == [0] * 4


def test_an_input_a_constant_and_one_value_twice_can_be_outputs(executorch):
    three = torch.arange(3.0)

    def odd(c):
        more = c + 1
        return c, three, more, more

    names = ["same", "three", "more", "again"]
    loaded, c = ExecuTorch().load(program(odd, (torch.zeros(4),), ["c"], names)), np.arange(4, dtype=F)
    outputs = {name: np.zeros(3 if name == "three" else 4, F) for name in names}
    for _ in range(3):
        c += 10
        loaded.run({"c": c}, outputs)
        assert outputs["same"].tolist() == c.tolist()
        assert outputs["three"].tolist() == [0, 1, 2]
        assert outputs["more"].tolist() == outputs["again"].tolist() == (c + 1).tolist()


def test_scalars_and_every_type_of_a_field_pass(executorch):
    def mixed(scale, index, small, flags):
        return scale * 2, index + 1, small.to(torch.int32) + 1, torch.logical_not(flags)

    arguments = (
        torch.tensor(1.0),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.uint8),
        torch.zeros(2, dtype=torch.bool),
    )
    loaded = ExecuTorch().load(program(mixed, arguments, ["scale", "index", "small", "flags"], ["a", "b", "c", "d"]))
    inputs = {
        "scale": np.array(3, F),
        "index": np.array([2**40, -1]),
        "small": np.array([255, 0], np.uint8),
        "flags": np.array([True, False]),
    }
    outputs = {"a": np.zeros((), F), "b": np.zeros(2, np.int64), "c": np.zeros(2, np.int32), "d": np.zeros(2, bool)}
    loaded.run(inputs, outputs)
    assert [value.tolist() for value in outputs.values()] == [6, [2**40 + 1, 0], [256, 1], [False, True]]


def test_inputs_that_the_graph_does_not_know_are_ignored(load):
    d = np.zeros(4, F)
    load().run({"other": np.ones(9, F), "c": np.ones(4, F)}, {"d": d})
    assert d.tolist() == [2] * 4


def test_a_missing_input_and_an_unknown_output_are_refused_by_name(load):
    with pytest.raises(PlanRefused, match=r"'doubler' wants inputs \['c'\]"):
        load().run({}, {"d": np.zeros(4, F)})
    with pytest.raises(PlanRefused, match=r"'doubler'.*lacks outputs \['delta'\]"):
        load().run({"c": np.ones(4, F)}, {"delta": np.zeros(4, F)})


@pytest.mark.parametrize("buffer", [np.zeros(3, F), np.zeros((2, 2), F), np.zeros(4, np.int64), np.zeros((), F)])
def test_an_array_that_does_not_fit_is_named_and_not_touched(load, buffer):
    with pytest.raises(RuntimeFailed, match=r"'doubler' failed: 'd' is float32 \[4\], not"):
        load().run({"c": np.ones(4, F)}, {"d": buffer})
    with pytest.raises(RuntimeFailed, match=r"'doubler' failed: 'c' is float32 \[4\], not"):
        load().run({"c": buffer}, {"d": np.ones(4, F)})
    assert not buffer.any()


def test_an_output_may_not_share_memory_with_an_input(load):
    buffer = np.ones(8, F)
    with pytest.raises(ValueError, match=r"'d'.*'doubler' shares memory with input 'c'"):
        load().run({"c": buffer[:4]}, {"d": buffer[2:6]})


def test_a_strided_array_is_not_bound(load):
    with pytest.raises(ValueError, match="contiguous"):
        load().run({"c": np.ones(8, F)[::2]}, {"d": np.zeros(4, F)})


def test_an_operator_that_fails_says_so_and_spares_the_process(executorch, capfd):
    def rows(table, index):
        return (torch.nn.functional.embedding(index, table),)

    arguments = torch.zeros(10, 4), torch.zeros(3, dtype=torch.int64)
    loaded = ExecuTorch().load(program(rows, arguments, ["table", "index"], ["rows"]), "train.step")
    capfd.readouterr()
    table, out = np.arange(40, dtype=F).reshape(10, 4), np.zeros((3, 4), F)
    with pytest.raises(RuntimeFailed, match=r"'train.step' failed: .*embedding"):
        loaded.run({"table": table, "index": np.array([0, 1, 10])}, {"rows": out})
    loaded.run({"table": table, "index": np.array([0, 1, 9])}, {"rows": out})
    assert out[2].tolist() == [36, 37, 38, 39]
    assert capfd.readouterr() == ("", "")


def test_operator_the_runtime_lacks_is_named_when_the_plan_is_loaded(executorch):
    lacking = program(lambda a: (torch.sort(a)[0],), (torch.zeros(4),), ["a"], ["b"])
    with pytest.raises(PlanRefused, match=r"cannot load graph 'report': .*aten::sort"):
        ExecuTorch().load(lacking, "report")


@pytest.mark.parametrize("junk", [b"", b"not a program", bytes(1000), b"x" * 100_000])
def test_an_unreadable_program_is_refused_by_name(executorch, junk, capfd):
    with pytest.raises(PlanRefused, match=r"cannot load graph 'train\.step'"):
        ExecuTorch().load(junk, "train.step")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "ports", [b"junk", b'{"inputs": ["c"]}', b'{"inputs": ["c"], "outputs": ["d"]}', b'{"inputs": [], "outputs": []}']
)
def test_a_program_that_does_not_name_its_ports_is_refused(executorch, ports):
    with pytest.raises(PlanRefused, match="'begin'"):
        ExecuTorch().load(doubler(ports=ports), "begin")


def test_a_program_without_the_method_of_names_is_refused(executorch, programs):
    nameless = altered(programs["doubler"], lambda methods: setattr(methods["ports"], "name", "parts"))
    with pytest.raises(PlanRefused, match="cannot load graph 'begin'"):
        ExecuTorch().load(nameless, "begin")


def test_where_executorch_would_abort_the_process_the_program_is_refused(executorch, programs):
    silent = altered(programs["doubler"], lambda methods: methods["ports"].outputs.clear())
    with pytest.raises(PlanRefused, match=r"internal check failed: .*outputs_size"):
        ExecuTorch().load(silent)


# Digests keep damage out of a plan's blobs; what gets here all the same must not take the process down.
DAMAGE = """
import sys
import numpy as np
from device_runtime.backends.executorch import ExecuTorch
from device_runtime.errors import PlanRefused, RuntimeFailed
for path in sys.argv[1:]:
    try:
        loaded = ExecuTorch().load(open(path, "rb").read())
        loaded.run({"c": np.ones(4, np.float32)}, {"d": np.zeros(4, np.float32)})
        print("ran")
    except (PlanRefused, RuntimeFailed) as error:
        print(type(error).__name__)
"""


def damaged(good, seed):
    """Cut short, one bit flipped or eight bytes replaced."""
    rng, bad = random.Random(seed), bytearray(good)
    if seed % 3 == 0:
        return bad[: rng.randrange(len(bad))]
    if seed % 3 == 1:
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        return bad
    for _ in range(8):
        bad[rng.randrange(len(bad))] = rng.randrange(256)
    return bad


@pytest.mark.parametrize("name", ["doubler", "delegated"])
def test_damaged_programs_do_not_crash_the_process(executorch, programs, tmp_path, name):
    paths = [tmp_path / str(seed) for seed in range(210)]
    for seed, path in enumerate(paths):
        path.write_bytes(damaged(programs[name], seed))
    done = subprocess.run(
        [sys.executable, "-c", DAMAGE, *map(str, paths)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    outcomes = done.stdout.split()
    assert len(outcomes) == 210
    assert set(outcomes[::3]) == {"PlanRefused"}
    assert Counter(outcomes)["PlanRefused"] > 120


ALONE = """
import json, sys
import numpy as np
from device_runtime.backends.executorch import ExecuTorch

def status(name):
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(name)))

before = status("VmHWM")
loaded = ExecuTorch().load(open(sys.argv[1], "rb").read())
rng = np.random.default_rng(0)
shapes = json.loads(sys.argv[2])
inputs = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes[0].items()}
outputs = {name: np.zeros(shape, np.float32) for name, shape in shapes[1].items()}
for _ in range(20):
    loaded.run(inputs, outputs)
told = {"threads": status("Threads"), "peak": status("VmHWM"), "added": status("VmHWM") - before}
print(json.dumps(told | {name: name in sys.modules for name in ("torch", "onnxruntime")}))
"""


def alone(tmp_path, graph, inputs, outputs):
    """What a process of its own says about itself after twenty runs; sizes in kB."""
    (tmp_path / "graph").write_bytes(graph)
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(tmp_path / "graph"), json.dumps([inputs, outputs])],
        env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        | {"OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_a_device_needs_no_torch_and_little_memory(executorch, programs, tmp_path):
    inputs = {name: value.shape for name, value in data().items()}
    told = alone(tmp_path, programs["step"], inputs, {"next.w1": (8, 16), "next.w2": (16, 3), "metrics": (2,)})
    assert not told["torch"]
    assert not told["onnxruntime"]
    assert told["threads"] == 1
    assert told["peak"] < 60_000
    assert told["added"] < 15_000


def test_one_thread_computes_also_what_is_worth_many(executorch, tmp_path):
    square = {"a": (400, 400), "b": (400, 400)}

    def products(a, b):
        return a @ b, torch.bmm(a.unsqueeze(0), b.unsqueeze(0)), a * b

    arguments = torch.zeros(400, 400), torch.zeros(400, 400)
    graph = program(products, arguments, ["a", "b"], ["c", "d", "e"], delegate=True)
    outputs = {"c": (400, 400), "d": (1, 400, 400), "e": (400, 400)}
    assert alone(tmp_path, graph, square, outputs)["threads"] == 1


def test_threads_with_a_graph_each_do_not_disturb_one_another(executorch, programs):
    wrong = []

    def work(value):
        loaded, d, junk = ExecuTorch().load(programs["delegated"]), np.zeros(4, F), str(value).encode() * 1000
        for _ in range(200):
            loaded.run({"c": np.full(4, value, F)}, {"d": d})
            wrong.extend(d[d != 2 * value])
            with pytest.raises(PlanRefused) as refused:
                ExecuTorch().load(junk)
            if f"identifier '{str(value) * 4}'" not in str(refused.value):
                wrong.append(str(refused.value))

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_without_the_library_the_command_to_run_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    load_anew = library.__wrapped__
    with pytest.raises(ConfigError, match=r"no ExecuTorch library.*`muster device build-executorch`"):
        load_anew()
    (tmp_path / f"{SHIM}-0123.so").touch()
    with pytest.raises(ConfigError, match=r"another release.*`muster device build-executorch`"):
        load_anew()
    (tmp_path / shim_name(platform.machine())).write_text("not a library")
    with pytest.raises(ConfigError, match=r"does not load.*`muster device build-executorch`"):
        load_anew()


def test_the_library_is_looked_for_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder("aarch64") == tmp_path / "muster" / "executorch-1.5.1-aarch64"
    monkeypatch.setenv(FOLDER, str(tmp_path / "here"))
    assert default_folder("aarch64") == tmp_path / "here"


def test_a_build_without_a_compiler_names_the_package(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    other = ({"x86_64", "aarch64"} - {platform.machine()}).pop()
    with pytest.raises(ConfigError, match=r"apt-get install g\+\+$"):
        building.build(platform.machine(), tmp_path / "out")
    with pytest.raises(ConfigError, match=rf"apt-get install g\+\+-{other.replace('_', '-')}-linux-gnu$"):
        building.build(other, tmp_path / "out")
    with pytest.raises(ConfigError, match="not for 'riscv64'"):
        building.build("riscv64", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_build_that_pip_cannot_serve_ends_with_the_last_of_its_words(monkeypatch, tmp_path):
    monkeypatch.setattr(building, "_compiler", lambda arch: "g++")
    monkeypatch.setattr(building, "VERSION", "0.0.0.dev1")
    with pytest.raises(ConfigError, match=r"pip failed: .*executorch==0.0.0.dev1"):
        building.build("x86_64", tmp_path / "out")
    assert list(tmp_path.rglob("*")) == [tmp_path / "out"]


@pytest.mark.security("takes one wheel for each architecture, by its SHA-256")
def test_a_build_from_another_wheel_than_the_one_we_know_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(building, "_compiler", lambda arch: "g++")
    index = tmp_path / "index"
    index.mkdir()
    (index / f"executorch-{building.VERSION}-cp311-cp311-manylinux_2_28_x86_64.whl").write_bytes(b"another")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", index.as_uri())
    with pytest.raises(ConfigError, match=r"pip failed: .*(?i:hash)"):
        building.build("x86_64", tmp_path / "built" / "out")
    assert list((tmp_path / "built").rglob("*")) == [tmp_path / "built" / "out"]


def test_a_build_replaces_a_stale_one_and_leaves_other_files_alone(tmp_path):
    (tmp_path / "notes").touch()
    (tmp_path / f"{SHIM}-0123.so").touch()
    made = built(platform.machine(), tmp_path)
    assert made.folder == str(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes", *made.files}
    assert made.size_bytes == sum((tmp_path / name).stat().st_size for name in made.files) < 20e6


MACHINES = {"x86_64": 62, "aarch64": 183}  # ELF's e_machine


def test_the_command_builds_for_another_architecture(tmp_path):
    other = ({"x86_64", "aarch64"} - {platform.machine()}).pop()
    built(other, tmp_path / "first")
    done = CliRunner().invoke(
        app, ["device", "build-executorch", "--arch", other, "--out", str(tmp_path / "out"), "--json"]
    )
    files = json.loads(done.stdout)["files"]
    assert len(files) == 5
    assert shim_name(other) in files
    for name in files:
        header = (tmp_path / "out" / name).read_bytes()[:20]
        assert header[:4] == b"\x7fELF"
        assert int.from_bytes(header[18:20], "little") == MACHINES[other]


def test_a_session_with_this_backend_reports_what_numpy_computes(executorch, graphs, coordinator, config, examples):
    coordinator.offer(linear.plan(graphs, fmt="executorch"), graphs, {"params": linear.PARAMS})
    outcome = run_session(replace(config, backend="executorch", policy=UNSIGNED))
    assert (outcome.outcome, outcome.detail, outcome.steps) == ("reported", "", 9)
    np.testing.assert_allclose(coordinator.reports[0], report_of(examples), rtol=2e-6, atol=1e-5)
    (hello,) = coordinator.checkins
    assert hello.capabilities.formats == ("executorch",)
    assert hello.capabilities.engine == "executorch 1.5.1"


@pytest.mark.security("only if its policy names signers, unless it says unsigned_programs")
def test_programs_of_no_known_signer_are_refused_before_the_check_in(executorch, coordinator, config):
    outcome = run_session(replace(config, backend="executorch"))
    assert (outcome.outcome, outcome.reason) == ("not-now", "policy")
    assert "unsigned_programs" in outcome.detail
    assert "signers" in outcome.detail
    assert coordinator.calls == []


CRASH = """
import os, sys
import numpy as np
from device_runtime.backends.executorch import ExecuTorch
from tests.device_runtime import linear

good, engine = open(sys.argv[1], "rb").read(), ExecuTorch()
fields = {"example.x": (4, linear.D), "example.y": (4,), "mask": (4,)}
inputs = {name: np.ones(shape, np.float32) for name, shape in fields.items()} | {"carry.params": linear.PARAMS}
outputs = {"next.params": np.zeros(linear.D, np.float32), "metrics": np.zeros(2, np.float32)}
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
for at in range(1000, len(good)):
    pid = os.fork()
    if pid == 0:
        try:
            engine.load(good[:at] + bytes([255, 128]) + good[at + 2 :], "train.step").run(inputs, outputs)
        finally:
            os._exit(0)
    if os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
        print(at)
        break
"""


def test_a_program_that_crashes_its_process_is_an_outcome(executorch, graphs, coordinator, config, tmp_path):
    good = bytes(graphs["train.step"])
    (tmp_path / "good").write_bytes(good)
    found = subprocess.check_output([sys.executable, "-c", CRASH, str(tmp_path / "good")], text=True)
    at = int(found)
    graphs = {**graphs, "train.step": good[:at] + b"\xff\x80" + good[at + 2 :]}
    coordinator.offer(linear.plan(graphs, fmt="executorch"), graphs, {"params": linear.PARAMS})
    outcome = run_session(replace(config, backend="executorch", policy=UNSIGNED, trainer=Sandbox))
    assert (outcome.outcome, outcome.reason) == ("aborted", "runtime-failed")
    assert "the process of the training died: SIG" in outcome.detail
    assert [abort.reason for abort in coordinator.aborts] == ["runtime-failed"]


def test_a_session_without_the_library_ends_before_it_checks_in(coordinator, config, monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    library.cache_clear()
    outcome = run_session(replace(config, backend="executorch"))
    assert (outcome.outcome, outcome.reason, outcome.retryable) == ("failed", "bad-configuration", "permanent")
    assert "muster device build-executorch" in outcome.detail
    assert coordinator.calls == []


def test_a_session_loads_the_backend_only_when_asked():
    code = "import sys, device_runtime.session; print('device_runtime.backends.executorch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
