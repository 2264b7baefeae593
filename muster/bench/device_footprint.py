"""What a device costs: what its installation weighs, what starting it takes, and how much memory training takes.

Muster's wheel and the device extra are installed into an empty folder, as an app would, and everything is measured with
nothing else on the path. Training is one assignment of FedAvg on the EMNIST network: 100 examples in batches of 20,
through the runner, in a process of its own. Memory is the process's peak, interpreter and all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from device_runtime.backends import FORMATS
from export.build import build_plan
from export.model import Model
from export.models import load
from fedcore.algorithms import create
from fedcore.bundle import Footprint
from fedcore.plan import BlobRef
from muster.bench.machine import describe_machine
from simulator.arm.calls import call
from simulator.arm.wheel import build_wheel

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


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the benchmark, and where it was made.

    installed_mb: files of the installation, without pip and Python, in 10^6 bytes; bytecode_mb is the part that Python
    makes of sources. import_cpu_s: loading the session and ONNX Runtime. train_rss_mb: on ONNX Runtime, in 2^20 bytes.
    `targets` are the most that the figures of their names may be.
    """

    benchmark: str
    date: str
    machine: str
    python: str
    installed_mb: float
    bytecode_mb: float
    import_cpu_s: float
    train_rss_mb: float
    train_rss_executorch_mb: float
    targets: dict[str, float]


def run(progress: Callable[[str], None]) -> Result:
    """Measure. Raises SysrootError when the wheel cannot be built or installed."""
    with tempfile.TemporaryDirectory(prefix="muster-footprint-") as place:
        target = Path(place) / "installed"
        progress("install")
        _install(target)
        progress("import")
        import_cpu_s = min(float(_python(target, ["-c", LOADS])) for _ in range(STARTS))
        rss = {}
        for form in FORMATS:
            progress(f"train on {FORMATS[form]}")
            rss[form] = _train(target, form).peak_rss_mb
        return Result(
            benchmark="device_footprint",
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            machine=describe_machine(),
            python=sys.version.split()[0],
            installed_mb=_size_mb(target, "*"),
            bytecode_mb=_size_mb(target, "*.pyc"),
            import_cpu_s=import_cpu_s,
            train_rss_mb=rss["onnx"],
            train_rss_executorch_mb=rss["executorch"],
            targets=TARGETS,
        )


def _install(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="muster-wheel-") as place:
        wheel = build_wheel(Path(place))
        options = ["--quiet", "--disable-pip-version-check", "--compile", "--target", str(target)]
        call([sys.executable, "-m", "pip", "install", *options, f"{wheel}[device]"])


def _size_mb(folder: Path, pattern: str) -> float:
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file()) / 1e6


def _train(target: Path, form: str) -> Footprint:
    """Train for STEPS batches in a process that has only the installation."""
    plan, graphs = build_plan(Model(load(MODEL)), create("fedavg", {"batch_size": BATCH}), (form,))
    with tempfile.TemporaryDirectory(prefix="muster-plan-") as place:
        folder = Path(place)
        (folder / "plan.json").write_bytes(plan.encode())
        for graph in graphs[form].values():
            (folder / BlobRef.of(graph).sha256).write_bytes(graph)
        words = _python(target, ["-m", "device_runtime.footprint", str(folder), form])
    return msgspec.json.decode(words, type=Footprint)


def _python(target: Path, arguments: Sequence[str]) -> str:
    """What a fresh interpreter prints that finds the standard library and `target`, and no other packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**kept, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", "-P", *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
