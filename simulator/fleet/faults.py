"""Faults of an emulated device: a throttled transport, a slow backend, a wrong clock, conditions, a planned failure.

The device runtime is handed these from outside and cannot tell. Nothing here is modelled: bytes wait for their turn, a
slow step takes its time, and a device that dies is killed.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from device_runtime.backends import open_backend
from device_runtime.backends.backend import Arrays, Backend, Executable
from device_runtime.clock import Clock
from device_runtime.conditions import Conditions, ConditionSource, Requirements, constant, flapping, trace
from device_runtime.protocol.connection import Carrier, ConnectionFailed, HttpRequest, HttpResponse
from device_runtime.protocol.transport import Transport
from fedcore.plan import REPORT, step_graph
from secagg.message_type import MessageType
from simulator.fleet.recorder import Recorder

# Bytes cross a slow road in pieces of so many seconds.
TURN_S = 0.1
# Where a device says its part in a secure aggregation: docs/spec/wire.md §8.
SAID = re.compile(r"/assignments/(?P<assignment>[^/]+)/secagg/(?P<number>\d+)$")


class Flapping(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Good conditions and bad ones in turns, for so many seconds in the mean."""

    up_s: float
    down_s: float


class EmulatedConditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Made-up conditions, one of: always these; a trace's file; good and bad ones, drawn by the device's seed."""

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


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """What a device is like for as long as its fleet runs.

    bandwidth: bytes per second each way; None is what the machine gives. slow_down: how many times as long a training
    step takes. clock_skew_s: how far its wall clock is ahead. seed: of its conditions.
    """

    bandwidth: float | None = None
    slow_down: float = 1.0
    clock_skew_s: float = 0.0
    seed: int = 0
    conditions: EmulatedConditions | None = None
    requirements: Requirements = Requirements()

    def source(self, began: float) -> ConditionSource:
        """Its conditions, which began at that time of the machine's monotonic clock."""
        if self.conditions is None:
            return Conditions
        return self.conditions.source(self.seed, lambda: time.monotonic() - began)

    def clock(self) -> Clock:
        """Its clock: wrong about the date, right about the time since boot."""
        return Clock(wall=lambda: time.time() + self.clock_skew_s)


class PlannedDeath(msgspec.Struct, frozen=True):
    """The place in a secure aggregation where a process is killed: at this message, sent and answered or not."""

    message: MessageType
    sent: bool


class PlannedFailure(msgspec.Struct, frozen=True):
    """What befalls a device in one session.

    silent: from the answer that may hold an assignment on, nothing gets through. dies_after: the training step, counted
    from 1, after which its process is killed; with fewer steps it is killed before it makes its report. dies_at: where
    it is killed in a secure round.
    """

    silent: bool = False
    dies_after: int | None = None
    dies_at: PlannedDeath | None = None

    @property
    def deadly(self) -> bool:
        """Whether the process is to be killed."""
        return self.dies_after is not None or self.dies_at is not None


def connect(traits: Traits, failure: PlannedFailure, recorder: Recorder | None = None) -> Callable[[str], Transport]:
    """What makes the device's way to its coordinator."""
    if traits.bandwidth is None and not failure.silent and failure.dies_at is None and recorder is None:
        return Transport.to

    def over(carrier: Carrier) -> Carrier:
        if traits.bandwidth is not None or failure.silent:
            carrier = ThrottledTransport(carrier, traits.bandwidth, breaks=failure.silent)
        return WatchedTransport(carrier, failure.dies_at, recorder) if failure.dies_at or recorder else carrier

    return partial(Transport.to, over=over)


def load_backend(traits: Traits, failure: PlannedFailure, engines: BackendCache) -> Callable[[str], Backend]:
    """What makes the device's engine, out of those that its process has."""
    if traits.slow_down == 1 and failure.dies_after is None:
        return engines.open
    return lambda name: SlowBackend(engines.open(name), traits.slow_down, failure.dies_after)


class BackendCache:
    """The engines of a process that runs one session after the other, with the graphs that they loaded."""

    def __init__(self) -> None:
        self._engines: dict[str, Backend] = {}

    def open(self, name: str) -> Backend:
        """The engine of this name. Raises ConfigError when there is none, or it cannot be loaded here."""
        if name not in self._engines:
            self._engines[name] = _Keeping(open_backend(name))
        return self._engines[name]


class _Keeping:
    """An engine that loads each graph once. Devices of many sessions in a process would otherwise mostly load."""

    def __init__(self, backend: Backend) -> None:
        self.format, self.runtime = backend.format, backend.runtime
        self._backend = backend
        self._loaded: dict[tuple[str, bytes], Executable] = {}

    def load(self, graph: bytes, name: str = "graph") -> Executable:
        """The graph, loaded by now. Raises PlanRefused when the engine cannot read it."""
        if (name, graph) not in self._loaded:
            self._loaded[name, graph] = self._backend.load(graph, name)
        return self._loaded[name, graph]


class ThrottledTransport:
    """A carrier whose bodies move at `bytes_per_s`, each way, and which `breaks` once an assignment came over it."""

    def __init__(self, carrier: Carrier, bytes_per_s: float | None, *, breaks: bool = False) -> None:
        self._carrier = carrier
        self._bytes_per_s = bytes_per_s
        self._breaks = breaks
        self._broken = False

    def send(self, request: HttpRequest) -> HttpResponse:
        """Carry one request."""
        if self._broken:
            raise ConnectionFailed("the network is gone")
        response = self._carrier.send(replace(request, body=self.paced(request.body)))
        if self._breaks and request.target.endswith("/assignments") and response.status == 200:
            self._broken = True
        return _Throttled(response, self)

    def close(self) -> None:
        """Close the carrier."""
        self._carrier.close()

    def paced(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The same bytes, each at its time."""
        if self._bytes_per_s is None:
            yield from pieces
            return
        size = max(1, int(self._bytes_per_s * TURN_S))
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
        return self._transport.paced(self._response)

    def close(self) -> None:
        self._response.close()


class WatchedTransport:
    """A carrier whose messages of secure aggregations are recorded, and one of which may kill the process."""

    def __init__(self, carrier: Carrier, dies_at: PlannedDeath | None, recorder: Recorder | None) -> None:
        self._carrier = carrier
        self._dies_at = dies_at
        self._recorder = recorder

    def send(self, request: HttpRequest) -> HttpResponse:
        """Carry one request."""
        said = SAID.search(request.target) if request.method == "PUT" else None
        if said is None:
            return self._carrier.send(request)
        assignment, number = said["assignment"], MessageType(int(said["number"]))
        self._die(assignment, PlannedDeath(number, sent=False))
        body = b"".join(request.body)
        if self._recorder is not None:
            self._recorder.hear(assignment, number, body)
        response = self._carrier.send(replace(request, body=[body]))
        self._die(assignment, PlannedDeath(number, sent=True))
        return response

    def close(self) -> None:
        """Close the carrier."""
        self._carrier.close()

    def _die(self, assignment: str, here: PlannedDeath) -> None:
        if here == self._dies_at:
            if self._recorder is not None:
                self._recorder.see_die(assignment, here.message, sent=here.sent)
            os.kill(os.getpid(), signal.SIGKILL)


class SlowBackend:
    """An engine whose training steps take `slow_down` times as long as measured, and that may not live to the end."""

    def __init__(self, backend: Backend, slow_down: float, dies_after: int | None) -> None:
        self._backend = backend
        self._rest = slow_down - 1
        self._steps_left = dies_after

    @property
    def format(self) -> str:
        """The engine's own."""
        return self._backend.format

    @property
    def runtime(self) -> str:
        """The engine's own."""
        return self._backend.runtime

    def load(self, graph: bytes, name: str = "graph") -> Executable:
        """Prepare a graph. Raises PlanRefused when the engine cannot read it."""
        executable = self._backend.load(graph, name)
        if name.endswith(step_graph("")):
            return _Graph(executable, after=self._rested)
        return _Graph(executable, before=self._die) if name == REPORT else executable

    def _rested(self, step_s: float) -> None:
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self._die()
        time.sleep(self._rest * step_s)

    def _die(self) -> None:
        if self._steps_left is not None:
            os.kill(os.getpid(), signal.SIGKILL)


class _Graph:
    """A graph with something to happen before it runs, or after; the latter hears how many seconds it took."""

    def __init__(
        self,
        executable: Executable,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._executable = executable
        self._before = before
        self._after = after

    def run(self, inputs: Arrays, outputs: Arrays) -> None:
        self._before()
        started = time.perf_counter()
        self._executable.run(inputs, outputs)
        self._after(time.perf_counter() - started)
