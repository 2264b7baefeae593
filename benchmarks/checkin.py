"""Rejected check-ins: the rate at which a coordinator answers them per CPU second, and its behaviour under overload.

The peer is a bare FastAPI route in a process of its own, that verifies and parses the same signed requests in the same
run. Then check-ins come at 50, 100 and 200 % of the saturation rate, at times that do not wait for answers, and once
more at 50 %: the coordinator must shed the excess with a time to come back, and recover.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit

from benchmarks.load import POPULATION, LoadConfig, LoadFleet
from benchmarks.null_task import null_coordinator
from benchmarks.open_loop import send_evenly
from benchmarks.runner import CheckinOptions
from benchmarks.usage import Usage
from coordinator.store.tasks import TaskSettings
from fedcore.wire.signatures import PublicKey
from muster.local.server import LocalCoordinator, ServerError
from muster.output import Say

CALLERS = 16
CONNECTION_LIMIT = 8192  # far more than the load opens: check-ins are shed, and no connection is closed
LOADS = (50, 100, 200, 50)
TARGETS = {"ratio_to_bare": 0.60}


def run(options: CheckinOptions, say: Say) -> dict[str, Any]:
    """Measure both servers in turns, then load the coordinator.

    per_cpu_second: rejected check-ins answered per CPU second of the server's process; bare: the same of the peer.
    saturation: per second of wall time, on a machine that the callers share. connection_limit: that of the coordinator.
    loads: see `_load`.
    """
    # A task for which no light device holds enough examples: every one is rejected, and may come again at once.
    settings = TaskSettings(population=POPULATION, goal=1, rounds=1, min_examples=1000)
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
    return LoadConfig(coordinator=url, devices=devices)


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
