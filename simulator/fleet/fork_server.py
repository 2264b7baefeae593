"""The process from which emulated devices are forked. Of Muster it loads only the device runtime.

A line of JSON on standard input starts a session of one device, in a process that runs no other session meanwhile. A
line on standard output reports its end. Closing standard input ends everything. The arguments name the backends to
load. A process that has finished a session takes the next one, of any device: sessions are cheap because the runtime is
loaded once and processes are seldom forked.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  # what resolving a host's name loads
import gc
import os
import selectors
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec.structs import replace

import device_runtime.protocol.secure  # noqa: F401  # a device loads it when a round asks for it; let every child inherit it
from device_runtime.backends import BACKENDS
from device_runtime.config import DeviceConfig, secret_in
from device_runtime.errors import DeviceError, Outcome
from device_runtime.permission.policy import Policy, policy_in
from device_runtime.protocol.transport import Transport
from device_runtime.session import run_session
from device_runtime.trainer import InProcess, Limits
from fedcore.batching import StreamKey, permutation
from fedcore.private_files import exit_on_sigterm
from fedcore.validation import decoder
from secagg.keys import PairKey
from simulator.fleet import faults
from simulator.fleet.faults import EmulatedDevice, PlannedFailure


class Start(msgspec.Struct, frozen=True):
    """A command to start one session of one device.

    began: the start of its fleet on the machine's monotonic clock. policy: None means the default one.
    enrolment_secret: the file of the secret, if any.
    """

    client: str
    coordinator: str
    population: str
    examples: str
    state: str
    wait_s: float
    backend: str
    began: float
    device: EmulatedDevice
    failure: PlannedFailure
    policy: Policy | None = None
    enrolment_secret: str | None = None


class Ended(msgspec.Struct, frozen=True):
    """The end of a session. `outcome` is None when the process died first; `exit_code` is negative for a signal."""

    client: str
    outcome: Outcome | None
    exit_code: int


_START, _OUTCOME = decoder(Start), decoder(Outcome)


@dataclass(slots=True)
class _Worker:
    """A forked process, the pipes of its commands and results, and the client whose session it runs, if any."""

    pid: int
    commands: int
    results: int
    client: str | None = None
    received: bytes = b""


class ForkServer:
    """Forks devices and relays their outcomes."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        self._workers: dict[int, _Worker] = {}
        self._idle: list[_Worker] = []

    def run(self) -> None:
        """Serve until standard input closes."""
        try:
            self._serve()
        finally:
            self._stop()

    def _serve(self) -> None:
        os.set_blocking(sys.stdin.fileno(), False)
        pending = b""
        while True:
            for key, _ in self._selector.select():
                if key.fd in self._workers:
                    self._receive(self._workers[key.fd])
                    continue
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self._start(line)

    def _start(self, line: bytes) -> None:
        worker = self._idle.pop() if self._idle else self._fork()
        worker.client = _START.decode(line).client
        # The pipe of a worker that was killed while idle closes.
        with contextlib.suppress(BrokenPipeError):
            os.write(worker.commands, line + b"\n")

    def _fork(self) -> _Worker:
        commands, results = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            # A pipe stays open as long as any process keeps an end of it.
            ours = [end for other in self._workers.values() for end in (other.commands, other.results)]
            _run_sessions(commands[0], results[1], (commands[1], results[0], *ours))
        os.close(commands[0])
        os.close(results[1])
        worker = self._workers[results[0]] = _Worker(pid, commands[1], results[0])
        self._selector.register(worker.results, selectors.EVENT_READ)
        return worker

    def _receive(self, worker: _Worker) -> None:
        """Relay the end of a session or of a process; a process that ends closes its pipe."""
        chunk = os.read(worker.results, 1 << 16)
        worker.received += chunk
        if not chunk:
            self._reap(worker)
        elif worker.received.endswith(b"\n"):
            _relay(Ended(worker.client or "", _OUTCOME.decode(worker.received), 0))
            worker.client, worker.received = None, b""
            self._idle.append(worker)

    def _reap(self, worker: _Worker) -> None:
        self._selector.unregister(worker.results)
        del self._workers[worker.results]
        os.close(worker.commands)
        os.close(worker.results)
        _, status = os.waitpid(worker.pid, 0)
        if worker in self._idle:
            self._idle.remove(worker)
        if worker.client is not None:
            _relay(Ended(worker.client, None, os.waitstatus_to_exitcode(status)))

    def _stop(self) -> None:
        for worker in self._workers.values():
            os.close(worker.commands)  # even if the signal fails, the worker gets no further session
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGTERM)
        for worker in self._workers.values():
            os.waitpid(worker.pid, 0)


def _relay(ended: Ended) -> None:
    os.write(sys.stdout.fileno(), msgspec.json.encode(ended) + b"\n")


def _run_sessions(commands: int, results: int, others: Iterable[int]) -> NoReturn:
    """Run sessions in the forked child, one after the other, until there are no more; skip the parent's clean-up.

    others: ends of pipes to close. On SIGTERM it gives up its assignment, as a device does.
    """
    code = 1
    try:
        exit_on_sigterm(0)
        for end in others:
            os.close(end)
        # The pipes are the fork server's: a print would corrupt its output, and an open end would outlive it.
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        os.dup2(nowhere, 1)
        with os.fdopen(commands, "rb") as lines:
            for line in lines:
                start = _START.decode(line)
                outcome = run_session(_config(start), start.device.clock())
                os.write(results, msgspec.json.encode(outcome) + b"\n")
        code = 0
    except SystemExit:
        code = 0
    finally:
        os._exit(code)


def _config(start: Start) -> DeviceConfig:
    return DeviceConfig(
        coordinator=start.coordinator,
        population=start.population,
        examples=Path(start.examples),
        state=Path(start.state),
        wait_s=start.wait_s,
        backend=start.backend,
        conditions=start.device.source(start.began),
        requirements=start.device.requirements,
        connect=faults.connect(start.device, start.failure),
        # A fleet's operator made its plans, and its devices have nothing to lose.
        policy=replace(start.policy or policy_in(Path(start.state)), unsigned_programs=True),
        enrolment_secret=secret_in(start.enrolment_secret),
        labels=start.device.labels,
        trainer=lambda name: InProcess(faults.load_backend(name, start.device, start.failure), Limits.bound),
    )


def _preload() -> None:
    """Do the first session's one-time work, a quarter of its time, once, so that every child inherits it."""
    with Transport.to("http://localhost"):
        pass  # the HTTP library loads half of itself with its first client
    permutation(StreamKey(0, 0, 0), 0, 0, 1)
    PairKey(bytes(range(32)))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the fleet decides when to stop
    _preload()
    try:
        for name in sys.argv[1:]:
            BACKENDS[name]()
    except DeviceError as error:
        sys.exit(f"error: {error}")
    gc.freeze()  # keep the shared pages of the loaded runtime out of the children's collections
    ForkServer().run()
