"""The footprint of a device: size of its installation, CPU time of its start, memory of its training.

Muster's wheel and the device extra are installed into an empty folder, as an app would, and everything is measured with
nothing else on the path. Training is one assignment of FedAvg on the EMNIST network: 100 examples in batches of 20, in
the sandbox of a device. Memory is the peak of both processes together, interpreters and all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.runner import DeviceFootprintOptions
from device_runtime.backends import FORMATS
from export.build import build_plan
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from muster.output import Say
from tools.arm import build_wheel, call

MODEL, BATCH = "emnist_cnn", 20
STARTS = 7
LOADS = """
import time
started = time.process_time()
import device_runtime.session
print(time.process_time() - started)
"""
LOADS_SANDBOX = """
import time
started = time.process_time()
import device_runtime.sandbox.child
device_runtime.sandbox.child.open_backend("onnxruntime")
print(time.process_time() - started)
"""
TRAINS = """
import contextlib, pathlib, resource, sys
import device_runtime.session
from device_runtime.backends import FORMATS
from device_runtime.errors import NonFiniteReport
from device_runtime.capabilities import peak_rss_mb, random_job, read_plan
from device_runtime.sandbox.process import Sandbox
from device_runtime.trainer import Limits
folder, form = sys.argv[1:]
job = random_job(*read_plan(pathlib.Path(folder), form))
with contextlib.suppress(NonFiniteReport):
    Sandbox(FORMATS[form]).train(job, Limits(10**9, 600.0), lambda: True)
print(peak_rss_mb() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""
TARGETS = {"installed_mb": 170.0, "import_cpu_s": 0.5, "sandbox_cpu_s": 0.5, "train_rss_mb": 200.0}


def run(options: DeviceFootprintOptions, say: Say) -> dict[str, Any]:
    """The figures of one installation. Raises SysrootError when the wheel cannot be built or installed.

    All megabytes are 2^20 bytes, as `du` and `free` count. installed_mb: files of the installation, without pip and
    Python; bytecode_mb is the part that Python makes of sources. import_cpu_s: loading the session, without an engine.
    sandbox_cpu_s: loading the sandbox and ONNX Runtime, once for every assignment. train_rss_mb: of device and sandbox
    together, on ONNX Runtime. `targets` are the most that the figures of their names may be.
    """
    with tempfile.TemporaryDirectory(prefix="muster-footprint-") as place:
        target = Path(place) / "installed"
        say("install")
        _install(target)
        say("import")
        start_s, sandbox_s = (import_cpu_s(str(target), code) for code in (LOADS, LOADS_SANDBOX))
        say("train")
        rss = {form: train_rss_mb(str(target), form) for form in FORMATS}
        return {
            "installed_mb": size_mb(target, "*"),
            "bytecode_mb": size_mb(target, "*.pyc"),
            "import_cpu_s": start_s,
            "sandbox_cpu_s": sandbox_s,
            "train_rss_mb": rss["onnx"],
            "train_rss_executorch_mb": rss["executorch"],
            "targets": TARGETS,
        }


def _install(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="muster-wheel-") as place:
        wheel = build_wheel(Path(place))
        options = ["--quiet", "--disable-pip-version-check", "--compile", "--target", str(target)]
        call([sys.executable, "-m", "pip", "install", *options, f"{wheel}[device]"])


def size_mb(folder: Path, pattern: str) -> float:
    """The size of the files below a folder whose names match, in 2^20 bytes."""
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file()) / 2**20


def import_cpu_s(path: str, code: str = LOADS) -> float:
    """CPU seconds of a start, with only the packages on `path`: the least of several."""
    return min(float(run_python(path, ["-c", code])) for _ in range(STARTS))


def train_rss_mb(path: str, form: str) -> float:
    """Peak memory of a device that trains and of its sandbox, with only the packages on `path`, in 2^20 bytes."""
    plan, graphs = build_plan(Model(load(MODEL)), create("fedavg", {"batch_size": BATCH}), (form,))
    with tempfile.TemporaryDirectory(prefix="muster-plan-") as place:
        folder = Path(place)
        (folder / "plan.json").write_bytes(plan.encode())
        for ref, graph in graphs.items():
            (folder / ref.sha256).write_bytes(graph)
        return float(run_python(path, ["-c", TRAINS, str(folder), form]))


def run_python(path: str, arguments: Sequence[str]) -> str:
    """The standard output of a fresh interpreter with only the standard library and the packages on `path`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", "-P", *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
