"""Trainers: they run a plan's graphs over local examples, in this process or in a separate one (sandbox/)."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from device_runtime.backends.backend import Arrays, Backend
from device_runtime.errors import DeviceError, PlanRefused, RuntimeFailed
from device_runtime.personal import personalise, result_size
from device_runtime.runner import TrainingResult, execute
from device_runtime.texts import TextColumn, Tokens
from fedcore import checkpoint
from fedcore.batching import StreamKey
from fedcore.errors import SchemaError
from fedcore.params import Float32, Frozen, VectorSpec
from fedcore.plan import Plan


class Limits(msgspec.Struct, frozen=True):
    """The most that training may use: bytes of a process's private memory, and seconds of CPU time."""

    memory_bytes: int
    cpu_s: float

    def bound(self) -> None:
        """Apply these limits to this process. A later call may raise them again.

        Memory means writable memory, including that of libraries (RLIMIT_DATA; only Linux enforces it). At the limit of
        time, SIGXCPU ends the process.
        """
        bound(resource.RLIMIT_DATA, self.memory_bytes)
        bound(resource.RLIMIT_CPU, math.ceil(time.process_time() + self.cpu_s))

    def beside(self, held_bytes: int) -> Limits:
        """What is left of these limits beside memory that is not the process's own, and counts all the same."""
        return Limits(max(self.memory_bytes - held_bytes, 0), self.cpu_s)

    def after(self, cpu_s: float) -> Limits:
        """What is left of these limits after that many seconds of CPU time."""
        return Limits(self.memory_bytes, max(self.cpu_s - cpu_s, 0.0))


def bound(kind: int, most: int) -> None:
    """Set one limit of this process, which it may raise again. Raises OSError or ValueError if that is forbidden."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


@dataclass(frozen=True, slots=True)
class Job:
    """The training of one assignment or one personal model: a plan, graphs in the trainer's format (bytes by name), and
    their inputs.

    broadcast: the vectors of `plan.broadcast`; frozen: the file of `plan.frozen`, checked, by its path or a descriptor,
    None where the plan freezes nothing; kept: those of `plan.kept`, None
    before the device's first round; examples: `(n, *shape)` for every field of the plan, n at least 1. left_out: as
    `examples`, to measure a personal model on. If there are any, that is the work, and the broadcast is `params` alone.
    """

    plan: Plan
    graphs: dict[str, bytes]
    broadcast: dict[str, Float32]
    examples: Arrays
    key: StreamKey
    frozen: Path | int | None = None
    kept: dict[str, Float32] | None = None
    left_out: Arrays = field(default_factory=dict)

    @property
    def count(self) -> int:
        """n, the number of local examples."""
        return len(next(iter(self.examples.values()), ()))

    @property
    def mapped(self) -> dict[str, Frozen]:
        """The vectors of `plan.frozen`, in the memory of their file. Raises PlanRefused where they are others."""
        if self.frozen is None or self.plan.frozen is None:
            return {}
        try:
            return checkpoint.map_frozen(self.frozen, self.plan.frozen.vectors)
        except (SchemaError, OSError) as error:
            raise PlanRefused(f"the frozen vectors of plan {self.plan.name!r} cannot be used: {error}") from error

    @property
    def result_size(self) -> int:
        """Values of the result."""
        if self.left_out:
            return result_size(self.plan, len(next(iter(self.left_out.values()))))
        return self.plan.report.size - 1

    @property
    def keeps(self) -> tuple[VectorSpec, ...]:
        """What the device is to keep for its next round."""
        return () if self.left_out else self.plan.kept


class Trainer(Protocol):
    """An engine for graphs of one `format`, in this or another process; `runtime` is its name and version."""

    @property
    def format(self) -> str:
        """The key of this engine's graphs in a plan."""

    @property
    def runtime(self) -> str:
        """Name and version."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds of its work in other processes, running or ended."""

    def train(self, job: Job, limits: Limits, keep_going: Callable[[], bool]) -> TrainingResult:
        """Run the plan. `keep_going` is called regularly, and may raise to end the work.

        Raises PlanRefused when a graph cannot be loaded or contradicts the plan, RuntimeFailed when one fails or uses
        up its limits, DeadlinePassed when `keep_going` returns false, NonFiniteReport.
        """

    def tokenize(self, column: TextColumn, limits: Limits, keep_going: Callable[[], bool]) -> Tokens:
        """The tokens of texts: see TextColumn. `keep_going` and RuntimeFailed: as in `train`."""


@dataclass(frozen=True, slots=True)
class InProcess:
    """The trainer in this process, for processes that only train, such as emulated devices.

    A graph that crashes its engine ends the process. confine: applies the limits to this process; by default it does
    nothing.
    """

    backend: Backend
    confine: Callable[[Limits], None] = lambda limits: None

    @property
    def format(self) -> str:
        """That of the backend."""
        return self.backend.format

    @property
    def runtime(self) -> str:
        """That of the backend."""
        return self.backend.runtime

    @property
    def cpu_s(self) -> float:
        """0: all work is in this process."""
        return 0.0

    def tokenize(self, column: TextColumn, limits: Limits, keep_going: Callable[[], bool]) -> Tokens:
        """Make tokens: see Trainer."""
        self.confine(limits)
        return column.tokens(keep_going)

    def train(self, job: Job, limits: Limits, keep_going: Callable[[], bool]) -> TrainingResult:
        """Run the plan: see Trainer. `keep_going` is called before every batch."""
        frozen = job.mapped  # now: later no file may be opened
        self.confine(limits.beside(sum(vector.nbytes for vector in frozen.values())))
        try:
            graphs = {name: self.backend.load(graph, name) for name, graph in job.graphs.items()}
            if job.left_out:
                data = job.broadcast, job.examples, job.left_out, job.key
                return personalise(job.plan, graphs, *data, frozen=frozen, keep_going=keep_going)
            received = job.broadcast, job.examples, job.key
            return execute(job.plan, graphs, *received, frozen=frozen, kept=job.kept, keep_going=keep_going)
        except DeviceError:
            raise
        except Exception as error:  # any error of an engine becomes the outcome of the session
            raise RuntimeFailed("the engine failed", f"{type(error).__name__}: {error}") from error
