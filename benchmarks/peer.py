"""A peer: another project's code, in a virtual environment and a process of its own, which trains when it is asked.

The process speaks JSON lines, as benchmarks/peers/turns.py says.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar, cast

import msgspec

from benchmarks.usage import cpu_s_of_all, family_of
from fedcore.decoding import UNDECODABLE, decoder
from muster.output import Say

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
