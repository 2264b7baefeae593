"""Emulated 64-bit ARM devices, in what `muster fleet sysroot` makes. Skipped where this machine cannot make it."""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from coordinator.rules.states import TaskState
from device_runtime.sandbox import process
from device_runtime.sandbox.process import Sandbox
from export.build import build_plan
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.bundle import Footprint
from fedcore.plan import BlobRef
from simulator import datasets
from simulator.errors import ProfileError, SysrootError
from simulator.fleet import fork_servers
from simulator.fleet.fleet import Fleet, FleetConfig
from simulator.fleet.fork_servers import HERE
from simulator.fleet.profile import Kind, equal_kinds
from tests.coordinator.fork_server import wait_until
from tests.device_runtime.test_sandbox import WIDE, job
from tests.simulator.federation import SEED
from tests.simulator.test_fleet import fleet
from tests.simulator.test_keystone import TOLERANCE
from tools.arm import build, build_wheel, call, unpack, wheels_for_arm

RUNTIME = ("onnxruntime",)
MADE_NOW = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def machine():
    """The sysroot of these sources, made in the user's cache if it is not there."""
    if HERE != "x86_64":
        pytest.skip("ARM devices are tested on an x86-64 machine")
    try:
        build()
        return fork_servers.ready()
    except SysrootError as error:
        pytest.skip(f"no ARM devices here: {error}")


@pytest.fixture
def with_executorch(request):
    """A sysroot with ExecuTorch; skipped before one is made where it would lack that."""
    if HERE == "x86_64" and not shutil.which("aarch64-linux-gnu-g++"):
        pytest.skip("no ExecuTorch for ARM devices: no compiler aarch64-linux-gnu-g++")
    if "executorch" not in request.getfixturevalue("machine").backends:
        pytest.skip("no ExecuTorch for ARM devices: it does not build")


@pytest.fixture(scope="module")
def arm_java(machine):
    """The command line of Debian's Java for 64-bit ARM, in the user's cache beside the sysroot."""
    folder = machine.folder.with_name("java-17-aarch64")
    if not folder.exists():
        with tempfile.TemporaryDirectory(prefix=".java-", dir=folder.parent) as place:
            root = Path(place) / "root"
            try:
                unpack(["openjdk-17-jre-headless"], "arm64", fork_servers.SUITE, root)
            except SysrootError as error:
                pytest.skip(f"no Java for ARM here: {error}")
            for path in root.rglob("*"):
                # Debian's Java has its settings in /etc, where this machine's would be found.
                if path.is_symlink() and path.readlink().is_absolute():
                    inside = folder / path.readlink().relative_to("/")
                    path.unlink()
                    path.symlink_to(inside)
            root.rename(folder)
    java = folder / "usr" / "lib" / "jvm" / "java-17-openjdk-arm64" / "bin" / "java"
    return [str(machine.qemu), "-L", str(folder), str(java), "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]


def children_s():
    """CPU seconds of the processes that this one started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.long
@MADE_NOW
def test_an_arm_device_on_the_jvm_trains_in_a_round(arm_java, task, tmp_path, capsys):
    if not fork_servers.JVM_PROGRAM.exists():
        pytest.skip(f"there is no {fork_servers.JVM_PROGRAM}: `make android` builds it")
    users, _ = datasets.users("digits", None, 1)
    np.savez(tmp_path / "examples.npz", **users.shard(0))
    with task(goal=1, rounds=1, over_selection=1.0) as (store, url, task_id):
        given = {"coordinator": url, "population": "p", "examples": tmp_path / "examples.npz", "state": tmp_path / "s"}
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        program = [*arm_java, "-jar", str(fork_servers.JVM_PROGRAM), "run", *words, "--once", "--json"]
        before = children_s()
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        spent_s = children_s() - before
        assert done.returncode == 0, done.stderr
        wait_until(lambda: store.task(task_id).state is TaskState.COMPLETED)
    with capsys.disabled():
        print(f"\none ARM device on the JVM: {spent_s:.1f} CPU s")
    assert json.loads(done.stdout)["outcome"] == "reported"


@pytest.mark.long
@MADE_NOW
@pytest.mark.usefixtures("with_executorch")
def test_arm_and_x86_devices_on_both_runtimes_train_one_model(executorch, federate, capsys):
    users, _ = datasets.users("digits", None, 8)
    model = Model(load("digits_cnn", (1, 8, 8), 10), SEED)
    algorithm = create("mimelite", {"batch_size": 5, "weighting": "examples"})
    backends = {"onnx": "onnxruntime", "executorch": "executorch"}
    run = federate(model, algorithm, users, backends, archs=("x86_64", "aarch64"), rounds=2)
    with capsys.disabled():
        print(f"\nx86-64 and ARM on both runtimes: {run.difference:.1e} relative l2 from the engine after 2 rounds")
    assert run.difference < TOLERANCE
    # Two devices of each kind, in both rounds.
    kinds = [f"{arch} {backend}" for arch in ("x86_64", "aarch64") for backend in ("onnxruntime", "executorch")]
    assert run.reported == dict.fromkeys(kinds, 4)


@pytest.mark.long
@MADE_NOW
def test_eight_arm_devices_train_two_rounds(machine, federate, capsys):
    users, _ = datasets.users("digits", None, 8)
    model, algorithm = Model(load("mlp", (1, 8, 8), 10), SEED), create("fedavg", {"batch_size": 10})
    started, before = time.monotonic(), children_s()
    run = federate(model, algorithm, users, {"onnx": "onnxruntime"}, archs=("aarch64",), rounds=2)
    # The fork servers and their devices; wall time would depend on who else uses the machine.
    wall_s, cpu_s = time.monotonic() - started, children_s() - before
    with capsys.disabled():
        print(
            f"\neight ARM devices, two rounds: {cpu_s:.0f} CPU s, {wall_s:.0f} s; {run.difference:.1e} from the engine"
        )
    assert run.difference < TOLERANCE
    assert run.reported == {"aarch64 onnxruntime": 16}


@MADE_NOW
@pytest.mark.long  # as tests/acceptance/test_hostile.py has devices of this machine
def test_an_arm_device_can_be_slow_silent_and_killed(machine, task, tmp_path):
    users, _ = datasets.users("digits", None, 3)
    kinds = tuple(
        Kind(name=name, arch="aarch64", bandwidth=1_000_000, slow_down=2, clock_skew_s=3600, **fault)
        for name, fault in {"well": {}, "silent": {"silence": 1}, "killed": {"drop_out": 1}}.items()
    )
    with task(goal=3, minimum=1, over_selection=1.0, reporting_deadline_s=60.0) as (_, url, _):
        summary = fleet(tmp_path, url, users, concurrency=3, sessions=3, kinds=kinds).run()
    assert summary.by_kind == {"well": {"reported": 1}, "silent": {"silent": 1}, "killed": {"killed": 1}}


@pytest.mark.long
@MADE_NOW
def test_the_wheel_installs_with_the_emulated_machines_own_pip_and_trains(machine, tmp_path):
    wheels, target, plan_folder = tmp_path / "wheels", tmp_path / "target", tmp_path / "plan"
    wheels.mkdir()
    wheel = build_wheel(wheels)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels)]
    call([*pip, *wheels_for_arm(), f"{wheel}[device]"])
    own = next((machine.folder / "root" / "usr" / "share" / "python-wheels").glob("pip-*.whl"))
    options = ["--no-index", "--find-links", str(wheels), "--no-compile", "--target", str(target)]
    call(machine.python(f"{own}/pip", "install", *options, "muster-fl[device]"), machine.environment(PYTHONPATH=""))

    plan, graphs = build_plan(Model(load("digits_cnn")), create("mimelite", {"batch_size": 5}))
    plan_folder.mkdir()
    (plan_folder / "plan.json").write_bytes(plan.encode())
    for graph in graphs.values():
        (plan_folder / BlobRef.of(graph).sha256).write_bytes(graph)
    code = "import platform, sys, device_runtime.session as s; print(platform.machine(), s.__file__, file=sys.stderr); "
    code += "from device_runtime.capabilities import main; main()"
    done = subprocess.run(
        machine.python("-c", code, str(plan_folder), "onnx"),
        env=machine.environment(PYTHONPATH=str(target)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.split() == ["aarch64", str(target / "device_runtime" / "session.py")]
    assert msgspec.json.decode(done.stdout, type=Footprint).step_cpu_ms > 0


@pytest.mark.long
@MADE_NOW
def test_an_emulated_sandbox_trains_and_says_what_it_lacks(machine, monkeypatch):
    said = machine.python("-c", "from device_runtime.sandbox.channel import lacking; print(*lacking())")
    assert call(said, machine.environment()).split()[-1] == "seccomp"

    def start(end):
        child = machine.python("-m", process.CHILD, str(end.fileno()), str(os.getpid()))
        return subprocess.Popen(child, env=machine.environment(), pass_fds=[end.fileno()], start_new_session=True)

    here = Sandbox("onnxruntime").train(job(), WIDE, lambda: True)
    monkeypatch.setattr(process, "_start", start)
    there = Sandbox("onnxruntime").train(job(), WIDE, lambda: True)
    np.testing.assert_allclose(there.values, here.values, rtol=1e-5)


def test_a_sysroot_that_is_not_there_is_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv(fork_servers.FOLDER, str(tmp_path / "nowhere"))
    users, _ = datasets.users("digits", None, 2)
    config = FleetConfig(
        coordinator="http://127.0.0.1:9", population="p", folder=tmp_path, kinds=equal_kinds((_other(),), RUNTIME)
    )
    with pytest.raises(SysrootError, match=r"no sysroot .*nowhere: run `muster fleet sysroot`"):
        Fleet(config, users).run()


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    with pytest.raises(SysrootError, match="holds something else"):
        build(tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter"]


def test_an_unknown_architecture_is_refused_with_those_that_there_are(tmp_path):
    users, _ = datasets.users("digits", None, 2)
    config = FleetConfig(
        coordinator="http://127.0.0.1:9", population="p", folder=tmp_path, kinds=equal_kinds(("riscv64",), RUNTIME)
    )
    with pytest.raises(ProfileError, match=r"'riscv64'; there are .*aarch64"):
        Fleet(config, users)


def _other():
    if platform.machine() == fork_servers.ARCH:
        pytest.skip("ARM is this machine's own architecture")
    return fork_servers.ARCH
