"""Trainers: what runs a plan's graphs over local examples, in this process or in one of its own (sandbox/)."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from device_runtime.backends.backend import Arrays, Backend
from device_runtime.errors import DeviceError, RuntimeFailed
from device_runtime.runner import TrainingResult, execute
from fedcore.batching import StreamKey
from fedcore.params import Float32
from fedcore.plan import Plan


class Limits(msgspec.Struct, frozen=True):
    """The most that training may use: bytes of a process's private memory, and seconds of CPU time."""

    memory_bytes: int
    cpu_s: float

    def bound(self) -> None:
        """Bound this process by them from now on. A later call may raise them again.

        Its memory is what it may write to, libraries' own included (RLIMIT_DATA; only Linux holds it). When its time is
        up, SIGXCPU ends it.
        """
        bound(resource.RLIMIT_DATA, self.memory_bytes)
        bound(resource.RLIMIT_CPU, math.ceil(time.process_time() + self.cpu_s))


def bound(kind: int, most: int) -> None:
    """Set one limit of this process, which it may raise again. Raises OSError or ValueError where that is forbidden."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


@dataclass(frozen=True, slots=True)
class Job:
    """The training of one assignment: a plan, its graphs of the trainer's format as bytes by name, and their inputs.

    broadcast: the vectors of `plan.broadcast`; frozen: those of `plan.frozen`; examples: `(n, *shape)` for every field
    of the plan, n at least 1.
    """

    plan: Plan
    graphs: dict[str, bytes]
    broadcast: dict[str, Float32]
    examples: Arrays
    key: StreamKey
    frozen: dict[str, Float32] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """n, the number of local examples."""
        return len(next(iter(self.examples.values()), ()))


class Trainer(Protocol):
    """An engine for graphs of one `format`, at some place; `runtime` is its name and version."""

    @property
    def format(self) -> str:
        """The key of this engine's graphs in a plan."""

    @property
    def runtime(self) -> str:
        """Name and version."""

    @property
    def cpu_s(self) -> float:
        """CPU seconds that its work has taken in other processes, ended or not."""

    def train(self, job: Job, limits: Limits, keep_going: Callable[[], bool]) -> TrainingResult:
        """Run the plan. `keep_going` is asked all the while, and may raise what ends the work.

        Raises PlanRefused when a graph cannot be loaded or contradicts the plan, RuntimeFailed when one fails or uses
        up its limits, DeadlinePassed when `keep_going` says no, NonFiniteReport.
        """


@dataclass(frozen=True, slots=True)
class InProcess:
    """The trainer in this process: for processes that train and do nothing else, as emulated devices are.

    A graph that crashes its engine ends the process. confine: what makes the limits hold here; by default nothing does.
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
        """None: all of its work is this process's own."""
        return 0.0

    def train(self, job: Job, limits: Limits, keep_going: Callable[[], bool]) -> TrainingResult:
        """Run the plan: see Trainer. `keep_going` is asked before every batch."""
        self.confine(limits)
        try:
            graphs = {name: self.backend.load(graph, name) for name, graph in job.graphs.items()}
            received = job.broadcast, job.examples, job.key
            return execute(job.plan, graphs, *received, frozen=job.frozen, keep_going=keep_going)
        except DeviceError:
            raise
        except Exception as error:  # whatever an engine raises is the outcome of a session
            raise RuntimeFailed("the engine failed", f"{type(error).__name__}: {error}") from error
