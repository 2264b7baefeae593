"""Rejected check-ins: the rate at which a coordinator answers them per CPU second, and its behaviour under overload.

The peer is a bare FastAPI route in a process of its own, that verifies and parses the same signed requests in the same
run. Then check-ins come at 50, 100 and 200 % of the saturation rate, at times that do not wait for answers, and once
more at 50 %: the coordinator must shed the excess with a time to come back, and recover.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit

from benchmarks.load import POPULATION, LoadConfig, LoadFleet, null_coordinator
from benchmarks.runner import CheckinOptions
from benchmarks.usage import Usage
from coordinator.store.tasks import TaskSettings
from fedcore.wire.signatures import PublicKey
from muster.local.server import LocalCoordinator, ServerError
from muster.output import Say

# Requests at fixed times that do not wait for answers. They are signed beforehand, so that only the server works.


_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *\d+\r\n", re.IGNORECASE)
_PATIENCE_S = 60.0


@dataclass(slots=True)
class Answers:
    """All answers: their milliseconds by status, from the time at which each request was due; broken connections.

    told_when: whether each 429 and 503 said when to come back. offered, wall_s: requests sent per second, and seconds
    until the last answer.
    """

    ms: dict[int, list[float]] = field(default_factory=dict)
    broken: int = 0
    told_when: bool = True
    offered: float = 0.0
    wall_s: float = 0.0

    @property
    def count(self) -> int:
        """Requests that were answered or broken."""
        return self.broken + sum(map(len, self.ms.values()))


async def send_evenly(host: str, port: int, requests: Sequence[bytes], rate: float) -> Answers:
    """Send these HTTP/1.1 requests, `rate` a second, on as many connections as needed; wait for all answers."""
    pool, began = _Pool(host, port), time.perf_counter()
    for number, request in enumerate(requests):
        due = began + number / rate
        if (wait_s := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        elif number % 16 == 0:
            await asyncio.sleep(0)  # late: answers must be received nevertheless
        pool.ask(request, due)
    answers = pool.answers
    answers.offered = len(requests) / (time.perf_counter() - began)
    until = time.perf_counter() + _PATIENCE_S
    while answers.count < len(requests) and time.perf_counter() < until:
        await asyncio.sleep(0.01)
    answers.wall_s = time.perf_counter() - began
    for connection in pool.free:
        connection.close()
    return answers


class _Pool:
    """Connections to one server, of which those in `free` are idle."""

    def __init__(self, host: str, port: int) -> None:
        self.answers = Answers()
        self.free: list[_Connection] = []
        self._host, self._port = host, port
        self._opening: set[asyncio.Task[None]] = set()

    def ask(self, request: bytes, due: float) -> None:
        """Send a request, on a connection of its own if none is idle."""
        while self.free and self.free[-1].closing:
            self.free.pop()
        if self.free:
            self.free.pop().ask(request, due)
            return
        task = asyncio.create_task(self._ask_on_a_new_one(request, due))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _ask_on_a_new_one(self, request: bytes, due: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(self), self._host, self._port)
        except OSError:
            self.answers.broken += 1
        else:
            connection.ask(request, due)


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._due: float | None = None
        self._data = b""

    @property
    def closing(self) -> bool:
        """Whether no more requests can be sent."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def ask(self, request: bytes, due: float) -> None:
        """Send a request."""
        self._due, self._data = due, b""
        self._transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - for the type checker
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take more of the answer. Once it is whole it counts, and the connection is free again."""
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head + b"\r\n")
        if not end or self._due is None or (length is not None and len(body) < int(length[1])):
            return
        status = int(head[9:12])
        self._pool.answers.ms.setdefault(status, []).append(1e3 * (time.perf_counter() - self._due))
        if status in (429, 503) and not _RETRY_AFTER.search(head + b"\r\n"):
            self._pool.answers.told_when = False
        self._due = None
        self._pool.free.append(self)

    def connection_lost(self, _: Exception | None) -> None:
        if self._due is not None:
            self._pool.answers.broken += 1
            self._due = None


# Rejected check-ins: the rate at which a coordinator answers them per CPU second, and its behaviour under overload.


CALLERS = 16
CONNECTION_LIMIT = 8192  # far more than the load opens: check-ins are shed, and no connection is closed
LOADS = (50, 100, 200, 50)
LABELS = {"app_version": "3.1.4", "region": "eu", "ring": "beta"}
TARGETS = {"ratio_to_bare": 0.60}


def run(options: CheckinOptions, say: Say) -> dict[str, Any]:
    """Measure both servers in turns, then load the coordinator.

    per_cpu_second: rejected check-ins answered per CPU second of the server's process; bare: the same of the peer.
    saturation: per second of wall time, on a machine that the callers share. connection_limit: that of the coordinator.
    loads: see `_load`.
    """
    # A task whose target no light device matches: every one is rejected, and may come again at once.
    settings = TaskSettings(population=POPULATION, goal=1, rounds=1, where="app_version >= 3.2 and region in (eu, uk)")
    with null_coordinator(10, settings, connection_limit=CONNECTION_LIMIT, retry_min_s=0, retry_max_s=0) as (server, _):
        return asyncio.run(_run(options, server, say))


async def _run(options: CheckinOptions, server: LocalCoordinator, say: Say) -> dict[str, Any]:
    async with LoadFleet(_light(server.url, options.devices)) as fleet:
        say("enrolling")
        await fleet.enrol()
        keys = {device.signer.keyid: PublicKey.of(device.signer.key).text for device in fleet.devices}
        with _bare_route(keys) as peer:
            async with LoadFleet(_light(peer.url, 0)) as fleet_of_peer:
                fleet_of_peer.devices = fleet.devices
                ours, bare = await _in_turns(options, (fleet, server.pid), (fleet_of_peer, peer.pid), say)
        saturation = ours.wall
        loads = []
        for percent in LOADS:
            say(f"{percent} % of {saturation:.0f} a second")
            loads.append(await _load(fleet, saturation, percent, 2 * options.seconds))
    return {
        "devices": options.devices,
        "per_cpu_second": ours.cpu,
        "bare": bare.cpu,
        "ratio_to_bare": ours.cpu / bare.cpu,
        "saturation": saturation,
        "connection_limit": CONNECTION_LIMIT,
        "loads": loads,
        "targets": TARGETS,
    }


@dataclass(frozen=True, slots=True)
class _Peer:
    """The bare route."""

    url: str
    pid: int


@dataclass(frozen=True, slots=True)
class _Rate:
    """Answers per CPU second of a server, and per second."""

    cpu: float
    wall: float


async def _in_turns(
    options: CheckinOptions, ours: tuple[LoadFleet, int], peer: tuple[LoadFleet, int], say: Say
) -> tuple[_Rate, _Rate]:
    """Both servers in turns, each at saturation; the best block of each counts."""
    for fleet, pid in (ours, peer):
        await _closed_loop(fleet, pid, options.seconds / 4)
    rates: tuple[list[_Rate], list[_Rate]] = [], []
    for block in range(options.blocks):
        for (fleet, pid), measured in zip((ours, peer), rates, strict=True):
            say(f"block {block + 1}")
            measured.append(await _closed_loop(fleet, pid, options.seconds))
    best = [max(measured, key=lambda rate: rate.cpu) for measured in rates]
    return best[0], best[1]


async def _closed_loop(fleet: LoadFleet, pid: int, seconds: float) -> _Rate:
    """Callers that ask again as soon as they are answered. Raises Refusal when one is refused."""
    answered, until = 0, time.perf_counter() + seconds
    turns = cycle(fleet.devices)

    async def call() -> None:
        nonlocal answered
        while time.perf_counter() < until:
            await fleet.check_in(next(turns))
            answered += 1

    began, before = time.perf_counter(), Usage.of(pid)
    await asyncio.gather(*(call() for _ in range(CALLERS)))
    return _Rate(answered / (Usage.of(pid).cpu_s - before.cpu_s), answered / (time.perf_counter() - began))


async def _load(fleet: LoadFleet, saturation: float, percent: int, seconds: float) -> dict[str, Any]:
    """Check-ins at even times, at `percent` of saturation, whether or not earlier ones were answered.

    Rates are per second of wall time. answered: with an outcome; shed: with 429 or 503, all of them with Retry-After or
    not; failed: anything else. p50_ms, p99_ms: of those answered, from the time at which each was due; shed_p99_ms: of
    those shed.
    """
    rate = saturation * percent / 100
    address = urlsplit(fleet.config.coordinator)
    requests = [fleet.signed_check_in(device) for device in islice(cycle(fleet.devices), round(rate * seconds))]
    answers = await send_evenly(address.hostname or "", address.port or 80, requests, rate)
    answered, shed = answers.ms.get(200, []), [*answers.ms.get(429, []), *answers.ms.get(503, [])]
    return {
        "percent": percent,
        "offered": answers.offered,
        "answered": len(answered) / answers.wall_s,
        "shed": len(shed) / answers.wall_s,
        "failed": len(requests) - len(answered) - len(shed),
        "told_when": answers.told_when,
        "p50_ms": _quantile(answered, 50),
        "p99_ms": _quantile(answered, 99),
        "shed_p99_ms": _quantile(shed, 99),
    }


def _quantile(values: Sequence[float], percent: int) -> float:
    return quantiles(values, n=100)[percent - 1] if len(values) > 1 else 0.0


def _light(url: str, devices: int) -> LoadConfig:
    return LoadConfig(coordinator=url, devices=devices, labels=LABELS)


@contextmanager
def _bare_route(keys: dict[str, str]) -> Iterator[_Peer]:
    """The peer, in a process of its own. Raises ServerError."""
    with tempfile.TemporaryDirectory(prefix="muster-bare-") as folder:
        file, ready = Path(folder) / "keys.json", Path(folder) / "bare.url"
        file.write_text(json.dumps(keys))
        command = [sys.executable, "-m", "benchmarks.bare_route", str(file), str(ready)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise ServerError("the bare route did not start")
                time.sleep(0.02)
            yield _Peer(ready.read_text(), process.pid)
        finally:
            process.terminate()
            process.wait()
