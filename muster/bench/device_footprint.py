"""The footprint of a device: size of its installation, CPU time of its start, memory of its training.

Muster's wheel and the device extra are installed into an empty folder, as an app would, and everything is measured with
nothing else on the path. Training is one assignment of FedAvg on the EMNIST network: 100 examples in batches of 20,
through the runner, in a process of its own. Memory is the process's peak, interpreter and all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from device_runtime.backends import FORMATS
from export.build import build_plan
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.bundle import Footprint
from fedcore.decoding import decoder
from fedcore.plan import BlobRef
from muster.bench.options import DeviceFootprintOptions
from muster.output import Say
from simulator.fleet.arm.calls import call
from simulator.fleet.arm.wheel import build_wheel

_FOOTPRINT = decoder(Footprint)

MODEL, BATCH = "emnist_cnn", 20
STARTS = 7
LOADS = """
import time
started = time.process_time()
import device_runtime.session
from device_runtime.backends import BACKENDS
BACKENDS["onnxruntime"]()
print(time.process_time() - started)
"""
TARGETS = {"installed_mb": 170.0, "import_cpu_s": 0.5, "train_rss_mb": 120.0}


class DeviceFootprint(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one installation.

    All megabytes are 2^20 bytes, as `du` and `free` count. installed_mb: files of the installation, without pip and
    Python; bytecode_mb is the part that Python makes of sources. import_cpu_s: loading the session and ONNX Runtime.
    train_rss_mb: on ONNX Runtime.
    `targets` are the most that the figures of their names may be.
    """

    installed_mb: float
    bytecode_mb: float
    import_cpu_s: float
    train_rss_mb: float
    train_rss_executorch_mb: float
    targets: dict[str, float]


def run(options: DeviceFootprintOptions, say: Say) -> DeviceFootprint:
    """Measure. Raises SysrootError when the wheel cannot be built or installed."""
    with tempfile.TemporaryDirectory(prefix="muster-footprint-") as place:
        target = Path(place) / "installed"
        say("install")
        _install(target)
        say("import")
        start_s = import_cpu_s(str(target))
        rss = {}
        for form in FORMATS:
            say(f"train on {FORMATS[form]}")
            rss[form] = train(str(target), form).peak_rss_mb
        return DeviceFootprint(
            installed_mb=size_mb(target, "*"),
            bytecode_mb=size_mb(target, "*.pyc"),
            import_cpu_s=start_s,
            train_rss_mb=rss["onnx"],
            train_rss_executorch_mb=rss["executorch"],
            targets=TARGETS,
        )


def _install(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="muster-wheel-") as place:
        wheel = build_wheel(Path(place))
        options = ["--quiet", "--disable-pip-version-check", "--compile", "--target", str(target)]
        call([sys.executable, "-m", "pip", "install", *options, f"{wheel}[device]"])


def size_mb(folder: Path, pattern: str) -> float:
    """The size of the files below a folder whose names match, in 2^20 bytes."""
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file()) / 2**20


def import_cpu_s(path: str) -> float:
    """CPU seconds of a device's start, with only the packages on `path`: the least of several."""
    return min(float(_python(path, ["-c", LOADS])) for _ in range(STARTS))


def train(path: str, form: str) -> Footprint:
    """The footprint of training in a process that has only the packages on `path`."""
    plan, graphs = build_plan(Model(load(MODEL)), create("fedavg", {"batch_size": BATCH}), (form,))
    with tempfile.TemporaryDirectory(prefix="muster-plan-") as place:
        folder = Path(place)
        (folder / "plan.json").write_bytes(plan.encode())
        for graph in graphs[form].values():
            (folder / BlobRef.of(graph).sha256).write_bytes(graph)
        words = _python(path, ["-m", "device_runtime.footprint", str(folder), form])
    return _FOOTPRINT.decode(words)


def _python(path: str, arguments: Sequence[str]) -> str:
    """The standard output of a fresh interpreter with only the standard library and the packages on `path`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", "-P", *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
