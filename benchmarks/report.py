"""The CPU seconds of a report in the coordinator that drives its round, and at a replica that does not.

The yardstick is a plain loop on one thread: receive a body from a loopback socket into memory that is there already,
take its SHA-256, and add its values, float32, to a float64 sum. Another process sends one body after the other on one
connection; nothing is parsed, checked, stored or answered. The coordinator does the same work, and the rest: HTTP, the
signature of the request, Content-Digest, rows, a receipt, and in the end the round's commit. Its CPU seconds are those
of all threads of its process, user and system, from the first report of a round to the commit.

Both are taken in turns, as many bodies each: a pair is the loop and then a round, and its ratio is the loop's CPU
seconds by the round's. Other work on the machine slows both; the figure is the median over the pairs of one run. The
devices are of `benchmarks.load`, in this process: each makes its report first, and sends nothing else during
the measurement.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import sqlalchemy

from benchmarks.load import POPULATION, LoadConfig, LoadFleet, null_coordinator
from benchmarks.runner import ReportOptions, ScaleOptions
from benchmarks.usage import Usage, cpu_s
from coordinator.store.tasks import TaskSettings
from muster.local.server import LocalCoordinator
from muster.output import Say

DEADLINE_S = 600.0
_SENDER = """
import socket, sys
port, size_bytes, count = map(int, sys.argv[1:])
body = bytes(size_bytes)
with socket.create_connection(("127.0.0.1", port)) as connection:
    for _ in range(count):
        connection.sendall(body)
"""
TARGETS = {1_000_000: 0.6, 40_000: 0.3}
"""The least that the ratio should be, by the values of a report."""


def run(options: ReportOptions, say: Say) -> dict[str, Any]:
    """The costs of reports of every size, `uploading` of them at a time. Raises ServerError without a coordinator."""
    return {
        "devices": options.devices,
        "uploading": options.uploading,
        "costs": [asyncio.run(_measure(options, size, say)) for size in options.size or TARGETS],
    }


def task_of(devices: int, rounds: int) -> TaskSettings:
    """The task: all devices are selected and counted. One round more than is measured warms up."""
    return TaskSettings(
        population=POPULATION,
        goal=devices,
        rounds=rounds + 1,
        over_selection=1.0,
        selection_timeout_s=DEADLINE_S,
        reporting_deadline_s=DEADLINE_S,
    )


async def _measure(options: ReportOptions, size: int, say: Say) -> dict[str, Any]:
    """The cost of reports of `size` values: medians over `pairs`.

    ratio: the coordinator's speed as a part of the yardstick's. target: the least that it should be, or None.
    server_before_mb, server_peak_mb: memory of the coordinator's process before the first report, and its peak.
    """
    pairs: list[dict[str, float]] = []
    with null_coordinator(size, task_of(options.devices, options.pairs)) as (server, task):
        light = LoadConfig(
            coordinator=server.url,
            devices=options.devices,
            uploading=options.uploading,
            pause_s=DEADLINE_S,  # longer than a round: a device with a receipt asks nothing more
        )
        async with LoadFleet(light) as fleet:
            await fleet.enrol()
            before = Usage.of(server.pid)
            for number in range(options.pairs + 1):
                say(f"{size} values, {max(0, number - 1)} of {options.pairs} pairs")
                parts = await asyncio.to_thread(yardstick, size, options.devices)
                (seconds,), _ = await fleet.run(lambda: upload(fleet, server, task, options.devices, [server.pid]))
                if number > 0:
                    pairs.append(_pair(parts, seconds, options.devices))
        after = Usage.of(server.pid)
    return {
        "size": size,
        "ratio": median(pair["yardstick_ms"] / pair["coordinator_ms"] for pair in pairs),
        "target": TARGETS.get(size),
        "coordinator_ms": median(pair["coordinator_ms"] for pair in pairs),
        "yardstick_ms": median(pair["yardstick_ms"] for pair in pairs),
        "pairs": pairs,
        "server_before_mb": before.rss_mb,
        "server_peak_mb": after.peak_rss_mb,
    }


def _pair(parts: tuple[float, float, float], seconds: float, count: int) -> dict[str, float]:
    """CPU milliseconds of one report: of the coordinator, and of the yardstick, which is the sum of the other three."""
    received, hashed, added = (1e3 * part / count for part in parts)
    return {
        "coordinator_ms": 1e3 * seconds / count,
        "yardstick_ms": received + hashed + added,
        "received_ms": received,
        "hashed_ms": hashed,
        "added_ms": added,
    }


async def upload(
    fleet: LoadFleet, server: LocalCoordinator, task: str, devices: int, pids: Sequence[int]
) -> tuple[list[float], float]:
    """CPU seconds of processes from the first report, once every device has one, to the round's commit; seconds."""
    ready = fleet.trained + devices
    fleet.may_upload.clear()
    while fleet.trained < ready:
        await asyncio.sleep(0.02)
    rounds = server.committed(task)
    began, at = [cpu_s(pid) for pid in pids], time.monotonic()
    fleet.may_upload.set()
    while len(server.committed(task)) == len(rounds):
        await asyncio.sleep(0.05)
    return [cpu_s(pid) - before for pid, before in zip(pids, began, strict=True)], time.monotonic() - at


def yardstick(size: int, count: int) -> tuple[float, float, float]:
    """CPU seconds of this thread for `count` bodies of `size` values: received, hashed, added."""
    body = np.empty(4 * size, np.uint8).data
    values, total, spent = np.frombuffer(body, np.float32), np.zeros(size), [0.0, 0.0, 0.0]
    with socket.create_server(("127.0.0.1", 0)) as listener, _sending(listener, len(body), count) as receiving:
        for _ in range(count):
            times = [time.thread_time()]
            received = 0
            while received < len(body):
                received += receiving.recv_into(body[received:])
            times.append(time.thread_time())
            hashlib.sha256(body).digest()
            times.append(time.thread_time())
            total += values
            times.append(time.thread_time())
            spent = [sum_s + after - before for sum_s, before, after in zip(spent, times, times[1:], strict=False)]
    return spent[0], spent[1], spent[2]


@contextmanager
def _sending(listener: socket.socket, size_bytes: int, count: int) -> Iterator[socket.socket]:
    """A connection on which one process sends `count` bodies, as the coordinator's devices are one process."""
    numbers = (listener.getsockname()[1], size_bytes, count)
    with subprocess.Popen([sys.executable, "-c", _SENDER, *map(str, numbers)]) as sender:
        try:
            with listener.accept()[0] as connection:
                yield connection
        finally:
            sender.kill()


# Reports at a replica that does not drive their round: its CPU, the driver's, and transactions that write.
#
# The peer is a coordinator alone, as in `benchmarks.scale`. CPU seconds are of all threads of a process, from the first
# report of a round to its commit, so what a commit takes is the driver's, without those of as long a time in which
# nobody comes. Devices hold no assignments here: that costs the driver what it did, for each device that it draws and
# not for each report.


REPLICA_SIZE = 40_000
"""Values of a report: 160 kB."""
REPLICA_TARGETS = {"report_ratio": 1.15, "report_driver_share": 0.1, "writes_per_report": 1 / 8}
_UPLOADING = 32
_IDLE_S = 3.0


class _Pair(NamedTuple):
    """CPU seconds of a round at the coordinator alone, and of one at the replica; transactions that wrote in that."""

    alone_s: float
    replica_s: float
    driver_s: float
    writes: int


async def measure(
    options: ScaleOptions, alone: LocalCoordinator, driver: LocalCoordinator, replica: LocalCoordinator, say: Say
) -> dict[str, Any]:
    """CPU of reports, in microseconds each: medians over rounds, at the coordinator alone and at a replica in turns.

    report_replica_us, report_driver_us: of a replica that does not drive their round, where all of them come, and of
    the one that drives it. report_ratio, report_driver_share: these two, as shares of that of the coordinator alone in
    the round beside theirs. writes_per_report: transactions of PostgreSQL that wrote, in rounds at the replica.
    """
    async with AsyncExitStack() as stack:
        by_itself, elsewhere = [await _fleet(stack, one, options.reports) for one in (alone, replica)]
        pairs: list[_Pair] = []
        for number in range(options.rounds + 1):
            say(f"reports: pair {number} of {options.rounds}" if number else "reports: warming up")
            (alone_s,) = await _round(by_itself, alone, [alone.pid])
            before = _writes(driver)
            replica_s, driver_s = await _round(elsewhere, driver, [replica.pid, driver.pid])
            pairs.append(_Pair(alone_s, replica_s, driver_s, _writes(driver) - before))
    del pairs[0]  # which warmed up
    each = 1e6 / options.reports
    return {
        "reports": options.rounds * options.reports,
        "report_alone_us": each * median(pair.alone_s for pair in pairs),
        "report_replica_us": each * median(pair.replica_s for pair in pairs),
        "report_driver_us": each * median(pair.driver_s for pair in pairs),
        "report_ratio": median(pair.replica_s / pair.alone_s for pair in pairs),
        "report_driver_share": median(pair.driver_s / pair.alone_s for pair in pairs),
        "writes_per_report": median(pair.writes for pair in pairs) / options.reports,
    }


async def _fleet(stack: AsyncExitStack, coordinator: LocalCoordinator, devices: int) -> LoadFleet:
    light = LoadConfig(
        coordinator=coordinator.url, devices=devices, uploading=_UPLOADING, pause_s=DEADLINE_S, holds=False
    )
    fleet = await stack.enter_async_context(LoadFleet(light))
    await fleet.enrol()
    return fleet


async def _round(fleet: LoadFleet, driver: LocalCoordinator, pids: Sequence[int]) -> list[float]:
    """CPU seconds of processes for the reports of a round, without what they take when nobody comes."""
    (task,) = await asyncio.to_thread(driver.store.tasks)
    devices, before = len(fleet.devices), [cpu_s(pid) for pid in pids]
    await asyncio.sleep(_IDLE_S)
    idle = [(cpu_s(pid) - earlier) / _IDLE_S for pid, earlier in zip(pids, before, strict=True)]
    took, seconds = await fleet.run(lambda: upload(fleet, driver, task.id, devices, pids))
    return [all_s - idle_s * seconds for all_s, idle_s in zip(took, idle, strict=True)]


def _writes(coordinator: LocalCoordinator) -> int:
    """How many transactions have written, on the server of a coordinator's database, since it began."""
    with coordinator.store.database.engine.connect() as connection:
        found: int = connection.scalar(sqlalchemy.text("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"))
        return found
