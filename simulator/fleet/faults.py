"""Faults of an emulated device.

The device runtime is given these from outside and cannot notice them. Nothing is simulated: bytes are delayed, a slow
step takes longer, and a device that dies is a killed process.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from device_runtime.backends import open_backend
from device_runtime.backends.backend import Arrays, Backend, Executable
from device_runtime.conditions import Clock, Conditions, ConditionSource, Requirements, constant, flapping, trace
from device_runtime.protocol.connection import Carrier, ConnectionFailed, HttpRequest, HttpResponse
from device_runtime.protocol.transport import Transport
from device_runtime.runner import steps_of
from fedcore.plan import REPORT, step_graph, steps_graph
from secagg.encoding import MessageType

# The seconds that a piece of a throttled body takes.
PIECE_S = 0.1
# The path of a device's message in a secure aggregation: docs/spec/wire.md §8.
SECAGG_MESSAGE = re.compile(r"/assignments/(?P<assignment>[^/]+)/secagg/(?P<number>\d+)$")


class Flapping(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Good and bad conditions that alternate, with the mean seconds of each."""

    up_s: float
    down_s: float


class EmulatedConditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Synthetic conditions, one of: constant ones; a file with a trace; good and bad ones by the device's seed."""

    constant: Conditions | None = None
    trace: str | None = None
    flapping: Flapping | None = None

    def __post_init__(self) -> None:
        if sum(getattr(self, name) is not None for name in self.__struct_fields__) != 1:
            raise ValueError(f"conditions are one of {', '.join(self.__struct_fields__)}")

    def source(self, seed: int, clock: Callable[[], float]) -> ConditionSource:
        """The source that a device reads. Raises ConfigError when a trace or a time is not one."""
        if self.trace is not None:
            return trace(Path(self.trace), clock)
        if self.flapping is not None:
            return flapping(seed, self.flapping.up_s, self.flapping.down_s, clock)
        return constant(self.constant or Conditions())


class EmulatedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between a device and the machine that it runs on, for as long as its fleet runs.

    bandwidth: bytes per second each way; None means the machine's. slow_down: the factor on the time of a training
    step.
    clock_skew_s: seconds by which its wall clock is ahead. seed: of its conditions. labels: those that its app states.
    """

    bandwidth: float | None = None
    slow_down: float = 1.0
    clock_skew_s: float = 0.0
    seed: int = 0
    conditions: EmulatedConditions | None = None
    requirements: Requirements = Requirements()
    labels: dict[str, str] = {}

    def source(self, began: float) -> ConditionSource:
        """The source of its conditions. began: their start on the machine's monotonic clock."""
        if self.conditions is None:
            return Conditions
        return self.conditions.source(self.seed, lambda: time.monotonic() - began)

    def clock(self) -> Clock:
        """A clock with the wrong date and the right time since boot."""
        return Clock(wall=lambda: time.time() + self.clock_skew_s)


class PlannedDeath(msgspec.Struct, frozen=True):
    """The message of a secure aggregation at which a process is killed, before it is sent or once it is answered."""

    message: MessageType
    sent: bool


class PlannedFailure(msgspec.Struct, frozen=True):
    """The failure of a device in one session, drawn before the session begins.

    silent: no request leaves the device after the answer that may hold an assignment. dies_after: the training step,
    counted from 1, after which the process is killed; with fewer steps it is killed before it makes its report.
    dies_at: the message of a secure round at which the process is killed.
    """

    silent: bool = False
    dies_after: int | None = None
    dies_at: PlannedDeath | None = None

    @property
    def kills(self) -> bool:
        """Whether it kills the process."""
        return self.dies_after is not None or self.dies_at is not None


def connect(device: EmulatedDevice, failure: PlannedFailure) -> Callable[[str], Transport]:
    """The function that opens the device's transport to its coordinator."""
    if device.bandwidth is None and not failure.silent and failure.dies_at is None:
        return Transport.to

    def over(carrier: Carrier) -> Carrier:
        if device.bandwidth is not None or failure.silent:
            carrier = ThrottledTransport(carrier, device.bandwidth, breaks=failure.silent)
        return carrier if failure.dies_at is None else DyingTransport(carrier, failure.dies_at)

    return functools.partial(Transport.to, over=over)


def load_backend(name: str, device: EmulatedDevice, failure: PlannedFailure) -> Backend:
    """The device's backend, out of the cache of its process."""
    if device.slow_down == 1 and failure.dies_after is None:
        return cached_backend(name)
    return SlowBackend(cached_backend(name), device.slow_down, failure.dies_after)


@functools.cache
def cached_backend(name: str) -> Backend:
    """The backend of this name, for a process that runs many sessions, which loading would dominate.

    Raises ConfigError when there is none, or it cannot be loaded here.
    """
    return _CachedBackend(open_backend(name))


class _CachedBackend:
    """A backend that loads each graph once."""

    def __init__(self, backend: Backend) -> None:
        self.format, self.runtime = backend.format, backend.runtime
        self.load = functools.cache(backend.load)


class ThrottledTransport:
    """A carrier of `bytes_per_s` each way, which `breaks` for good once it has delivered an assignment."""

    def __init__(self, carrier: Carrier, bytes_per_s: float | None, *, breaks: bool = False) -> None:
        self._carrier = carrier
        self._bytes_per_s = bytes_per_s
        self._breaks = breaks
        self._broken = False

    def send(self, request: HttpRequest) -> HttpResponse:
        """Send one request."""
        if self._broken:
            raise ConnectionFailed("the network is gone")
        response = self._carrier.send(replace(request, body=self.throttled(request.body)))
        if self._breaks and request.target.endswith("/assignments") and response.status == 200:
            self._broken = True
        return _Throttled(response, self)

    def close(self) -> None:
        """Close the wrapped carrier."""
        self._carrier.close()

    def throttled(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The same bytes, each at its due time."""
        if self._bytes_per_s is None:
            yield from pieces
            return
        size = max(1, int(self._bytes_per_s * PIECE_S))
        due = time.monotonic()
        for chunk in pieces:
            for start in range(0, len(chunk), size):
                piece = chunk[start : start + size]
                due += len(piece) / self._bytes_per_s
                time.sleep(max(0.0, due - time.monotonic()))
                yield piece


class _Throttled:
    def __init__(self, response: HttpResponse, transport: ThrottledTransport) -> None:
        self.status, self.headers = response.status, response.headers
        self._response = response
        self._transport = transport

    def __iter__(self) -> Iterator[bytes]:
        return self._transport.throttled(self._response)

    def close(self) -> None:
        self._response.close()


class DyingTransport:
    """A carrier that kills the process at a message of a secure aggregation."""

    def __init__(self, carrier: Carrier, dies_at: PlannedDeath) -> None:
        self._carrier, self._dies_at = carrier, dies_at

    def send(self, request: HttpRequest) -> HttpResponse:
        """Send one request."""
        match = SECAGG_MESSAGE.search(request.target) if request.method == "PUT" else None
        here = match is not None and int(match["number"]) == self._dies_at.message
        if here and not self._dies_at.sent:
            os.kill(os.getpid(), signal.SIGKILL)
        response = self._carrier.send(request)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return response

    def close(self) -> None:
        """Close the wrapped carrier."""
        self._carrier.close()


class SlowBackend:
    """A backend whose training steps take `slow_down` times as long, and whose process is killed after `dies_after`."""

    def __init__(self, backend: Backend, slow_down: float, dies_after: int | None) -> None:
        self.format, self.runtime = backend.format, backend.runtime
        self._backend = backend
        self._extra = slow_down - 1
        self._steps_left = dies_after

    def load(self, graph: bytes, name: str = "graph") -> Executable:
        """Prepare a graph. Raises PlanRefused when the backend cannot read it."""
        executable = self._backend.load(graph, name)
        if name.endswith((step_graph(""), steps_graph(""))):
            return _HookedGraph(executable, after=self._after_steps)
        return _HookedGraph(executable, before=self._die) if name == REPORT else executable

    def _after_steps(self, count: int, call_s: float) -> None:
        if self._steps_left is not None:
            self._steps_left -= count
            if self._steps_left <= 0:
                self._die()
        time.sleep(self._extra * call_s)

    def _die(self) -> None:
        if self._steps_left is not None:
            os.kill(os.getpid(), signal.SIGKILL)


class _HookedGraph:
    """A graph with functions to call before each run, and after it with its steps and the seconds that it took."""

    def __init__(
        self,
        executable: Executable,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[int, float], None] | None = None,
    ) -> None:
        self._executable = executable
        self._before = before
        self._after = after

    def run(self, inputs: Arrays, outputs: Arrays) -> None:
        self._before()
        started = time.perf_counter()
        self._executable.run(inputs, outputs)
        if self._after is not None:
            self._after(steps_of(inputs), time.perf_counter() - started)
