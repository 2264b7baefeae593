"""Reports of a million values taken in: bytes per CPU second of the coordinator's process, against what bounds it.

A body has to be received, hashed, checked and added to the sum. The limit is what these cost when nothing else is done:
a plain loop over a loopback socket, SHA-256, and the addition to a float64 sum, all measured in this process. Memory
copied at full speed is the yardstick that any machine knows.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import numpy as np

from coordinator.aggregation import ReportSum
from coordinator.rounds import RoundState
from coordinator.tasks import TaskSettings
from fedcore.params import Float32
from muster.bench.machine import describe_machine
from muster.bench.null_task import null_coordinator
from muster.bench.usage import Usage
from simulator.light import LightConfig, LightFleet

POPULATION = "light"
DEADLINE_S = 600.0
REPEATS = 10
COPIED_BYTES = 1 << 28
"""More than any cache holds."""
TARGETS = {"ratio_to_memcpy": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """What to run: a round of so many devices, one report each, on `size` parameters, so many at a time."""

    devices: int = 200
    uploading: int = 4
    size: int = 1_000_000

    def settings(self) -> TaskSettings:
        """The task: everybody is selected, everybody counts."""
        return TaskSettings(
            population=POPULATION,
            goal=self.devices,
            rounds=1,
            over_selection=1.0,
            selection_timeout_s=DEADLINE_S,
            reporting_deadline_s=DEADLINE_S,
        )


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the benchmark, and where it was made. Rates are bytes of reports per CPU second of one thread.

    bytes_per_cpu_second: of the whole server process, from the first report of a round to its commit.
    limit: receiving, hashing and adding alone, one after the other; received, hashed, added: each of them.
    """

    benchmark: str
    date: str
    machine: str
    devices: int
    size: int
    reports: int
    bytes_per_cpu_second: float
    memcpy: float
    received: float
    hashed: float
    added: float
    limit: float
    ratio_to_memcpy: float
    ratio_to_limit: float
    limit_to_memcpy: float
    server_before_mb: float
    server_peak_mb: float
    targets: dict[str, float]


def run(config: ReportConfig, on_progress: Callable[[str], None]) -> Result:
    """Measure the limits, then run the round."""
    on_progress("what the machine can do")
    body = np.random.default_rng(0).standard_normal(config.size, np.float32)
    memcpy, received, hashed, added = copying(), receiving(body.nbytes), hashing(body), adding(body)
    limit = 1 / (1 / received + 1 / hashed + 1 / added)
    reports, before, after = asyncio.run(_round(config, on_progress))
    rate = reports * body.nbytes / (after.cpu_s - before.cpu_s)
    return Result(
        benchmark="report",
        date=datetime.now(UTC).date().isoformat(),
        machine=describe_machine(),
        devices=config.devices,
        size=config.size,
        reports=reports,
        bytes_per_cpu_second=rate,
        memcpy=memcpy,
        received=received,
        hashed=hashed,
        added=added,
        limit=limit,
        ratio_to_memcpy=rate / memcpy,
        ratio_to_limit=rate / limit,
        limit_to_memcpy=limit / memcpy,
        server_before_mb=before.rss_mb,
        server_peak_mb=after.peak_rss_mb,
        targets=TARGETS,
    )


async def _round(config: ReportConfig, on_progress: Callable[[str], None]) -> tuple[int, Usage, Usage]:
    """How many reports were counted, and what the server had used before the first and after the commit."""
    with null_coordinator(config.size, config.settings()) as (server, task):
        light = LightConfig(
            coordinator=server.url, population=POPULATION, devices=config.devices, uploading=config.uploading
        )
        async with LightFleet(light) as fleet:
            await fleet.enrol()
            fleet.may_upload.clear()

            async def uploads() -> tuple[Usage, Usage]:
                """Let reports go when every device has one."""
                while fleet.trained < config.devices:
                    await asyncio.sleep(0.05)
                before = Usage.of(server.pid)
                fleet.may_upload.set()
                while sum(one.state is RoundState.COMMITTED for one in server.store.rounds(task)) < 1:
                    on_progress(f"{fleet.endings['reported']} reports")
                    await asyncio.sleep(0.1)
                return before, Usage.of(server.pid)

            before, after = await fleet.run(uploads)
        return sum(one.reported for one in server.store.rounds(task)), before, after


def copying() -> float:
    """Bytes per CPU second of copying memory."""
    source, target = np.ones(COPIED_BYTES, np.uint8), np.empty(COPIED_BYTES, np.uint8)
    return COPIED_BYTES / _least_s(lambda: np.copyto(target, source))


def hashing(body: Float32) -> float:
    """Bytes per CPU second of SHA-256."""
    return body.nbytes / _least_s(lambda: hashlib.sha256(body.data).digest())


def adding(body: Float32) -> float:
    """Bytes per CPU second of adding float32 to a float64 sum."""
    total = ReportSum(body.size)
    return body.nbytes / _least_s(lambda: total.add(body))


def receiving(size_bytes: int) -> float:
    """Bytes per CPU second of taking them from a loopback socket into memory that is there already."""
    data, room = bytes(size_bytes), memoryview(bytearray(size_bytes))
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sending,
        listener.accept()[0] as receiving,
    ):

        def take() -> None:
            sender = threading.Thread(target=sending.sendall, args=(data,))
            sender.start()
            got = 0
            while got < size_bytes:
                got += receiving.recv_into(room[got:])
            sender.join()

        return size_bytes / _least_s(take)


def _least_s(act: Callable[[], object]) -> float:
    """The least CPU seconds of this thread over several runs."""
    act()
    times = []
    for _ in range(REPEATS):
        began = time.thread_time()
        act()
        times.append(time.thread_time() - began)
    return min(times)
