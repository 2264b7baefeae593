"""Devices in Kotlin on a JVM against Python's: local training, sessions, secure reports; memory, start and size.

Both do the same work in turns, each training on one thread. The least CPU time counts, of all threads of a runtime, a
JVM's compiler and collector among them.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self, cast

import msgspec
import numpy as np

from benchmarks.devices_js import Work, fed_avg
from benchmarks.runner import DevicesJvmOptions
from benchmarks.secagg import DeviceSession, Workload
from benchmarks.usage import Usage, cpu_s, cpu_s_of, cpu_s_of_all
from coordinator.store.tasks import TaskSettings
from device_runtime.backends.onnxruntime import OnnxRuntime
from device_runtime.capabilities import random_field
from export.build import export_bundle
from export.model import Model
from export.models import load
from fedcore.signing import SigningKey
from muster.local.server import LocalCoordinator, local_coordinator
from muster.output import Say
from simulator.fleet.faults import EmulatedDevice, PlannedFailure
from simulator.fleet.fork_server import Start
from simulator.fleet.fork_servers import HERE, JVM, JVM_PROGRAM, host_command, java_command

MODELS = ("digits_cnn", "emnist_cnn", "char_lstm", "transformer")
SMALL, WIDE = MODELS[:2]
EXAMPLES, SESSIONS, MOST_ROUNDS = 100, 10, 100_000
"""A device's examples, sessions of a block, and rounds of one device each that are never all run."""
WARM_S, WARM_BLOCKS = 6.0, 20
"""What a JVM runs often is compiled twice: within these CPU seconds of training, or blocks of anything else."""
NEAR = 32
"""Neighbours in a secure session: of as many devices, and one more, each has all others."""
PATIENCE_S = 60.0
_KOTLIN = JVM_PROGRAM.parents[2]
_MODULES = ("core", "jvm", "android", "app")
_BACKENDS = ("onnxruntime",)


def run(options: DevicesJvmOptions, say: Say) -> dict[str, Any]:
    """All figures. Raises FleetError where Java or the program is missing.

    steps: of a training, warm. session: from check-in to receipt, warm, in the clear. secure: a device's part of a
    secure session, M0 to M11, warm. rss_mb: the peak of a fresh process after one session of digits_cnn, in 2²⁰ bytes;
    rss_wide_mb of emnist_cnn. start_cpu_s: of a fresh process until its first request. dex_mb: of the sample app, once
    it is built. lines: of Kotlin, without tests.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with blocks() as jvm:
            works = (Work.write(name, folder, say) for name in options.models or MODELS)
            steps = [_step(work, jvm, options.blocks, say) for work in works]
            say("secure report")
            secure = _secure(folder, jvm, options)
            engine = jvm.ask({"load": str(folder / steps[0]["model"])})["engine"]
        with local_coordinator(folder / "coordinator") as local:
            say("sessions")
            session = _session(folder, local, options.blocks)
            memory = {name: _rss_mb(folder, local, name) for name in (SMALL, WIDE)}
        say("start")
        start_s = min(_start_cpu_s(folder) for _ in range(options.blocks))
    return {
        "onnxruntime": {"python": OnnxRuntime().runtime.split()[-1], "jvm": engine.split()[-1]},
        "steps": steps,
        **_compared("session", *session),
        **_compared("secure", *secure),
        "rss_mb": memory[SMALL],
        "rss_wide_mb": memory[WIDE],
        "start_cpu_s": start_s,
        **_sizes(),
    }


def _compared(what: str, python_s: float, jvm_s: float) -> dict[str, float]:
    return {f"{what}_python_ms": 1e3 * python_s, f"{what}_jvm_ms": 1e3 * jvm_s, f"{what}_ratio": jvm_s / python_s}


class Process:
    """A process that answers lines of JSON with such lines."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self.pid, self._process = process.pid, process
        self._asked, self._answers = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, what: object) -> dict[str, Any]:
        """The answer."""
        self._asked.write(msgspec.json.encode(what) + b"\n")
        self._asked.flush()
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer

    def cost(self, what: object) -> float:
        """CPU seconds of an answer."""
        before = cpu_s_of_all(self.pid)
        self.ask(what)
        return cpu_s_of_all(self.pid) - before


def blocks() -> Process:
    """A JVM that does blocks of work (`device_runtime/android/jvm/src/test/kotlin/Blocks.kt`). Raises FleetError."""
    words = java_command()
    classes = os.pathsep.join(map(str, (JVM_PROGRAM, JVM_PROGRAM.parent / "test-classes")))
    words = [*words[: words.index("-jar")], "-cp", classes, "dev.muster.device.jvm.BlocksKt"]
    return Process(words, os.environ | {"OMP_NUM_THREADS": "1"})


def _step(work: Work, jvm: Process, count: int, say: Say) -> dict[str, Any]:
    say(f"{work.folder.name}: measure")
    jvm.ask({"load": str(work.folder)})
    python_s = jvm_s = math.inf
    measured, spent_s = 0, 0.0
    while measured < 1 + count or spent_s < WARM_S:
        python_s = min(python_s, cpu_s_of(work.train))
        work.runs.clear()
        jvm.ask({"graphs": None})
        block_s = jvm.cost({"train": None})
        jvm_s, measured, spent_s = min(jvm_s, block_s), measured + 1, spent_s + block_s
    ms = {"python_ms": 1e3 * python_s / work.steps, "jvm_ms": 1e3 * jvm_s / work.steps}
    return {"model": work.folder.name, **ms, "step_ratio": jvm_s / python_s}


def _secure(folder: Path, jvm: Process, options: DevicesJvmOptions) -> tuple[float, float]:
    python_s = jvm_s = math.inf
    for block in range(options.blocks):
        session = DeviceSession.of(Workload(NEAR + 1, options.dim, 0.0, signed=True))
        recorded = {name: [data.hex() for data in getattr(session, name)] for name in ("received", "sent", "drawn")}
        facts = {name: data.hex() for name, data in session.facts.items()}
        (folder / "session.json").write_text(json.dumps({**recorded, **facts, "weight": session.weight}))
        session.vector.tofile(folder / "vector.f32")
        jvm.ask({"secure": str(folder)})
        for _ in range(0 if block else WARM_BLOCKS):
            jvm.ask({"replay": None})
        python_s, jvm_s = min(python_s, session.seconds), min(jvm_s, jvm.cost({"replay": None}))
    return python_s, jvm_s


class _Device:
    """A device of a host, whose files are in a folder, and whose task is that of a model."""

    def __init__(self, folder: Path, local: LocalCoordinator, model: str, host: str) -> None:
        own = folder / f"{model}-{host}"
        own.mkdir()
        random = np.random.default_rng(0)
        fields = Model(load(model)).spec.fields
        examples: dict[str, Any] = {field.name: random_field(field, EXAMPLES, random) for field in fields}
        np.savez(own / "examples.npz", allow_pickle=False, **examples)
        self.host = Process(*host_command(host, _BACKENDS))
        self._start = Start(
            client=host,
            coordinator=local.url,
            population=f"{model}-{host}",
            examples=str(own / "examples.npz"),
            state=str(own / "state"),
            wait_s=PATIENCE_S,
            backend=_BACKENDS[0],
            began=time.monotonic(),
            device=EmulatedDevice(),
            failure=PlannedFailure(),
        )
        bundle = export_bundle(Model(load(model)), fed_avg(), own / "plan")
        rounds = TaskSettings(population=self._start.population, goal=1, rounds=MOST_ROUNDS, over_selection=1.0)
        local.create_task(bundle, rounds, SigningKey.new(own / "release.pem"))

    def sessions(self, count: int) -> float:
        """CPU seconds of as many sessions that report."""
        spent_s = 0.0
        while count:
            before = cpu_s_of_all(self.host.pid)
            outcome = self.host.ask(self._start)["outcome"]
            if outcome["outcome"] == "reported":
                count, spent_s = count - 1, spent_s + cpu_s_of_all(self.host.pid) - before
            else:  # the next round has not begun
                time.sleep(0.05)
        return spent_s


def _session(folder: Path, local: LocalCoordinator, count: int) -> tuple[float, float]:
    python, jvm = (_Device(folder, local, SMALL, host) for host in (HERE, JVM))
    with python.host, jvm.host:
        python_s = jvm_s = math.inf
        for _ in range(WARM_BLOCKS + count):
            python_s, jvm_s = min(python_s, python.sessions(SESSIONS)), min(jvm_s, jvm.sessions(SESSIONS))
    return python_s / SESSIONS, jvm_s / SESSIONS


def _rss_mb(folder: Path, local: LocalCoordinator, model: str) -> float:
    (place := folder / "fresh").mkdir(exist_ok=True)
    device = _Device(place, local, model, JVM)
    with device.host:
        device.sessions(1)
        return Usage.of(device.host.pid).peak_rss_mb


def _start_cpu_s(folder: Path) -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        places = ["--examples", str(folder / f"{SMALL}-{JVM}" / "examples.npz"), "--state", str(folder / "state")]
        words = java_command("run", "--coordinator", url, "--population", SMALL, *places, "--once")
        with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
            connection, _ = server.accept()
            with connection:
                connection.recv(1)
                spent_s = cpu_s(process.pid)
                process.kill()
    return spent_s


def _sizes() -> dict[str, Any]:
    sources = {name: (_KOTLIN / name).glob("src/main/kotlin/**/*.kt") for name in _MODULES}
    lines = {name: sum(len(path.read_bytes().splitlines()) for path in paths) for name, paths in sources.items()}
    dex = [path.stat().st_size for path in (_KOTLIN / "app" / "target").glob("**/classes*.dex")]
    return {**({"dex_mb": sum(dex) / 2**20} if dex else {}), "lines": lines}
