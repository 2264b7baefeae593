"""CPU time, memory and open files of work here, in other processes, and of peers in their own environments."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec

from fedcore.validation import UNDECODABLE, decoder
from muster.output import Say

_CPUCLOCK_SCHED = 2
"""Linux: ~pid << 3 | 2 is the clock of clock_getcpuclockid(3), which counts nanoseconds; /proc counts ticks."""


def cpu_s_of(work: Callable[[], object]) -> float:
    """CPU seconds of this process for some work."""
    started = time.process_time()
    work()
    return time.process_time() - started


def least_cpu_s(work: Callable[[], object], repeats: int) -> float:
    """The least CPU seconds of this process for some work, of several runs."""
    return min(cpu_s_of(work) for _ in range(repeats))


def in_turns(
    works: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Seconds of each work in each round, where all take turns: so ratios hold though the machine's speed changes."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            started = clock()
            work()
            spent[name].append(clock() - started)
    return spent


def times(count: int, work: Callable[[], object]) -> Callable[[], object]:
    """Work that is some other work, so many times."""
    return lambda: [work() for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Usage:
    """cpu_s: of user and system together. rss_mb, peak_rss_mb: memory now and at most, in 2²⁰ bytes."""

    cpu_s: float
    rss_mb: float
    peak_rss_mb: float
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Of a running process. Raises OSError."""
        folder = Path("/proc") / str(pid)
        lines = (line.partition(":") for line in (folder / "status").read_text().splitlines())
        status = {name: value.split()[0] for name, _, value in lines if value.endswith(" kB")}
        return cls(
            cpu_s=cpu_s(pid),
            rss_mb=int(status["VmRSS"]) / 1024,
            peak_rss_mb=int(status["VmHWM"]) / 1024,
            descriptors=len(list((folder / "fd").iterdir())),
        )


def cpu_s(pid: int) -> float:
    """CPU seconds of a running process. Raises OSError."""
    return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)


def main_thread_s(pid: int) -> float:
    """CPU seconds of the main thread of a running process. Raises OSError."""
    return int((Path("/proc") / f"{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def cpu_s_of_all(pid: int) -> float:
    """CPU seconds of a process and of all its descendants, with those that ended and were waited for.

    A descendant whose parent has ended is found if the process is the subreaper of its descendants (prctl(2)).
    """
    total = 0.0
    for member, stat in _family(pid):
        with contextlib.suppress(OSError):  # it has ended, and its parent counts it from now on
            total += cpu_s(member) + stat.children_s
    return total


def family_of(pid: int) -> list[int]:
    """A process and its descendants, each after its parent."""
    return [member for member, _ in _family(pid)]


@dataclass(frozen=True, slots=True)
class _Stat:
    """parent: a process id. children_s: CPU seconds of descendants that ended and were waited for."""

    parent: int
    children_s: float

    @classmethod
    def of(cls, pid: int) -> _Stat:
        text = (Path("/proc") / str(pid) / "stat").read_text()
        # After the name, which may hold anything.
        fields = text.rpartition(")")[2].split()
        return cls(int(fields[1]), (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK"))


def _family(pid: int) -> Iterator[tuple[int, _Stat]]:
    stats, children = {}, dict[int, list[int]]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                stats[int(entry.name)] = stat = _Stat.of(int(entry.name))
                children.setdefault(stat.parent, []).append(int(entry.name))
    family = [pid] if pid in stats else []
    for member in family:  # grows on the way
        yield member, stats[member]
        family += children.get(member, [])


# A peer: another project's code, in a virtual environment and a process of its own, which trains when it is asked.
#
# The process speaks JSON lines, as benchmarks/peers/turns.py says.

_SHOWN_LINES = 5
_ORDERLY_END_S = 30.0
T = TypeVar("T")


class PeerError(Exception):
    """A peer cannot be installed, or its process failed."""


def python_with(requirements: Path, say: Say) -> Path:
    """The Python of a virtual environment with the packages of a requirements file; made once, in the user's cache.

    Raises PeerError, with the end of pip's output, if it cannot be made.
    """
    digest = hashlib.sha256(f"{sys.version}\n{requirements.read_text()}".encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "muster" / "peers" / f"{requirements.stem}-{digest[:16]}"
    python, whole = folder / "bin" / "python", folder / "whole"
    if not whole.exists():
        say(f"install {requirements.stem} into {folder}")
        shutil.rmtree(folder, ignore_errors=True)
        _call([sys.executable, "-m", "venv", "--without-pip", str(folder)], requirements)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
        _call([*pip, "install", "--quiet", "--requirement", str(requirements)], requirements)
        whole.touch()
    return python


def _call(command: list[str], requirements: Path) -> None:
    done = subprocess.run(
        command, env=_environment({}), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise PeerError(
            f"cannot install {requirements}: {_last_lines(done.stderr or done.stdout)}\n"
            f"{sys.executable} must have pip and venv, and pip must reach an index with these versions for it; "
            "for CPU builds of torch set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
        )


class _Ready(msgspec.Struct, frozen=True):
    version: str


class _Trained(msgspec.Struct, frozen=True):
    steps: int


class _Evaluated(msgspec.Struct, frozen=True):
    loss: float


_READY, _TRAINED, _EVALUATED = decoder(_Ready), decoder(_Trained), decoder(_Evaluated)


class Peer:
    """A process that trains when it is asked to. Raises PeerError when it ends, or answers something else."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: IO[str]) -> None:
        self.name, self._pid, self._log = name, process.pid, log
        self._lines, self._answers = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)
        self.version = self._answer(_READY).version

    def round(self) -> tuple[float, int]:
        """Train the next cohort: CPU seconds of the process and of all its descendants, and local steps."""
        before = cpu_s_of_all(self._pid)
        steps = self._ask("round", _TRAINED).steps
        return cpu_s_of_all(self._pid) - before, steps

    def loss(self) -> float:
        """The loss of the global model."""
        return self._ask("loss", _EVALUATED).loss

    def _ask(self, line: str, read: msgspec.json.Decoder[T]) -> T:
        with contextlib.suppress(BrokenPipeError):  # the answer will say why
            self._lines.write(line + "\n")
            self._lines.flush()
        return self._answer(read)

    def _answer(self, read: msgspec.json.Decoder[T]) -> T:
        line = self._answers.readline()
        try:
            return read.decode(line)
        except UNDECODABLE:
            self._log.seek(0)
            words = _last_lines(self._log.read() + line)
            raise PeerError(f"{self.name} failed, or did not answer as turns.py says: {words}") from None


@contextmanager
def started(name: str, python: Path, runner: Path, folder: Path) -> Iterator[Peer]:
    """Run a peer's runner on the workload in a folder, until the end of the block. Raises PeerError."""
    scratch = folder / name.replace(" ", "-")
    scratch.mkdir()
    # Flower and Ray keep files, and report their use, unless they are told otherwise.
    files = {"FLWR_HOME": str(scratch), "RAY_TMPDIR": str(scratch)}
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "JAX_PLATFORMS": "cpu"}
    with (scratch / "log").open("w+") as log:
        process = subprocess.Popen(
            [str(python), str(runner), str(folder)],
            env=_environment(files | quiet),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield Peer(name, process, log)
        finally:
            family = family_of(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_ORDERLY_END_S)  # closes its input
            for pid in family:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without Python's own part, and with one thread for each process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**environment, "OMP_NUM_THREADS": "1", **more}


def _last_lines(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return "\n".join(lines[-_SHOWN_LINES:]) or "it said nothing"
