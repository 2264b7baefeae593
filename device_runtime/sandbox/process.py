"""The sandbox as a trainer: every job runs in its own process, which ends with the job."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import IO, TypeVar

import msgspec
import numpy as np

from device_runtime import errors
from device_runtime.backends import FORMATS, runtime_of
from device_runtime.runner import TrainingResult
from device_runtime.sandbox import channel as channels
from device_runtime.texts import TextColumn, Tokens
from device_runtime.trainer import Job, Limits
from fedcore.report import all_finite

CHILD = "device_runtime.sandbox.child"
# The only variables that the process inherits: the locations of Python, its libraries and the engines.
ENVIRONMENT = (
    "DYLD_LIBRARY_PATH",
    "HOME",
    "LD_LIBRARY_PATH",
    "MUSTER_EXECUTORCH",
    "PYTHONHOME",
    "XDG_CACHE_HOME",
)
# The errors that the process may report.
KINDS: dict[str, Callable[[str, str], errors.DeviceError]] = {
    kind.__name__: kind
    for kind in (errors.ConfigError, errors.PlanRefused, errors.RuntimeFailed, errors.NonFiniteReport)
}
KINDS[errors.ExamplesError.__name__] = functools.partial(errors.ExamplesError, "invalid-examples")
T = TypeVar("T")
A = TypeVar("A", channels.Done, channels.Tokenized)


class Sandbox:
    """A trainer in a separate process, for the named engine.

    The process has no key, connection, output or session of the device, and only the variables of ENVIRONMENT. It is
    another run of this Python, `sys.executable`, with the same modules. Raises ConfigError when there is no such
    engine, or no such Python.
    """

    def __init__(self, backend: str) -> None:
        self.runtime = runtime_of(backend)
        self.format = next(form for form, name in FORMATS.items() if name == backend)
        self._backend = backend
        self._ended_s = self._running_s = 0.0
        if not sys.executable:
            raise errors.ConfigError(
                "sys.executable names no Python to run graphs in: an application that embeds one sets it"
            )

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all its processes so far."""
        return self._ended_s + self._running_s

    def train(self, job: Job, limits: Limits, keep_going: Callable[[], bool]) -> TrainingResult:
        """Run the plan in a new process: see Trainer. `keep_going` is called ten times a second; if it returns false,
        the process is killed.

        Also raises RuntimeFailed when the process ends without an answer.
        """

        def talk(channel: channels.Channel) -> TrainingResult:
            channel.send(self._order(job, *shared, limits=limits))
            for graph in job.graphs.values():
                channel.send_bytes(graph)
            sent = job.broadcast, job.kept or {}, job.examples, job.left_out
            for array in chain(*(arrays.values() for arrays in sent)):
                channel.send_bytes(array)
            return self._result(channel, job, self._answer(channel, channels.Done, "training", limits))

        with contextlib.ExitStack() as opened:
            shared = [opened.enter_context(_readable(job.frozen)).fileno()] if job.frozen is not None else []
            return self._in_new_process(talk, "training", limits, keep_going, *shared)

    def tokenize(self, column: TextColumn, limits: Limits, keep_going: Callable[[], bool]) -> Tokens:
        """Make tokens in a new process, as `train` runs a plan in one."""

        def talk(channel: channels.Channel) -> Tokens:
            size, texts = len(column.file), len(column.texts)
            channel.send(
                channels.TextOrder(limits=limits, field=column.field, size=size, padding=column.padding, texts=texts)
            )
            channel.send_bytes(column.file)
            channel.send_bytes(np.array([len(text) for text in column.texts], np.int64))
            channel.send_bytes(b"".join(column.texts))
            answer = self._answer(channel, channels.Tokenized, "tokenizer", limits)
            shape = len(column.texts), *column.field.shape
            return Tokens(channel.receive_array(channels.ArrayKind(column.field.name, "int32", shape)), answer.cut)

        return self._in_new_process(talk, "tokenizer", limits, keep_going)

    def _in_new_process(
        self,
        talk: Callable[[channels.Channel], T],
        what: str,
        limits: Limits,
        keep_going: Callable[[], bool],
        *shared: int,
    ) -> T:
        """What `talk` gives over a channel to a process, which is for `what` and ends with it.

        shared: descriptors of files that the process may read.
        """

        def look() -> None:
            if not keep_going():
                raise errors.DeadlinePassed(f"stopped in the process of the {what}: the report would come too late")

        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = _start(theirs, *shared)
            try:
                return talk(channels.Channel(ours, look))
            except channels.Broken:
                raise _death(self._end(process), what, limits) from None
            finally:
                self._end(process)

    def _answer(self, channel: channels.Channel, kind: type[A], what: str, limits: Limits) -> A:
        """The answer at the end of the work. Raises Broken where it is of another kind, and the error that it names."""
        while isinstance(answer := channel.receive(channels.ANSWER), channels.Working):
            self._running_s = min(answer.cpu_s, limits.cpu_s + 1)  # the kernel allows little more than the limit
        if isinstance(answer, channels.Failed):
            words = f"{answer.detail}: {answer.private}" if answer.private else answer.detail
            raise KINDS.get(answer.kind, errors.RuntimeFailed)(
                f"the process of the {what} gave up", errors.plain(words)
            )
        if not isinstance(answer, kind):
            raise channels.Broken
        return answer

    def _order(self, job: Job, frozen: int | None = None, *, limits: Limits) -> channels.Order:
        return channels.Order(
            backend=self._backend,
            limits=limits,
            plan=msgspec.Raw(job.plan.encode()),
            key=job.key,
            graphs={name: len(graph) for name, graph in job.graphs.items()},
            broadcast=channels.ArrayKind.of(job.broadcast),
            frozen=frozen,
            kept=None if job.kept is None else channels.ArrayKind.of(job.kept),
            examples=channels.ArrayKind.of(job.examples),
            left_out=channels.ArrayKind.of(job.left_out),
        )

    def _result(self, channel: channels.Channel, job: Job, done: channels.Done) -> TrainingResult:
        values = channel.receive_array(channels.ArrayKind("values", "float32", (job.result_size,)))
        kept = {
            spec.name: channel.receive_array(channels.ArrayKind(spec.name, "float32", (spec.size,)))
            for spec in job.keeps
        }
        if not all(map(all_finite, (values, *kept.values()))):
            raise errors.NonFiniteReport("the process of the training gave values that are not finite")
        return TrainingResult(values, job.plan.report.weight(job.count), job.count, done.steps, kept)

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """End the process and its group, if still running. Returns the exit code, negative for a signal.

        Afterwards its CPU time is exact.
        """
        if process.returncode is not None:
            return process.returncode
        with contextlib.suppress(ProcessLookupError, PermissionError):  # every process of the group has ended
            os.killpg(process.pid, signal.SIGKILL)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except ChildProcessError:  # the application has the system reap its processes
            process.returncode = 0
        else:
            process.returncode = os.waitstatus_to_exitcode(status)
            self._running_s = usage.ru_utime + usage.ru_stime
        self._ended_s, self._running_s = self.cpu_s, 0.0
        return process.returncode


def _readable(file: Path | int) -> IO[bytes]:
    try:
        return open(file, "rb", closefd=not isinstance(file, int))
    except OSError as error:
        raise errors.PlanRefused("the frozen vectors cannot be read", str(error)) from error


def _start(end: socket.socket, *shared: int) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(os.path.abspath(place) for place in sys.path)
    inherited = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", CHILD, str(end.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        pass_fds=[end.fileno(), *shared],
        start_new_session=True,  # without a terminal, and killed together with all that it starts
    )


def _death(code: int, what: str, limits: Limits) -> errors.AssignmentError:
    """The error of a process that ended without an answer."""
    if code == -signal.SIGXCPU:
        return errors.PlanRefused(
            "against plan.compute_seconds of this device's policy", f"{limits.cpu_s:.10g} allowed"
        )
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return errors.RuntimeFailed(f"the process of the {what} died", how)
