"""Reports at a replica that does not drive their round: its CPU, the driver's, and transactions that write.

The peer is a coordinator alone, as in `benchmarks.scale`. CPU seconds are of all threads of a process, from the first
report of a round to its commit, so what a commit takes is the driver's, without those of as long a time in which nobody
comes. Devices hold no assignments here: that costs the driver what it did, for each device that it draws and not for
each report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median
from typing import Any, NamedTuple

import sqlalchemy

from benchmarks.load import LoadConfig, LoadFleet
from benchmarks.report import DEADLINE_S, upload
from benchmarks.runner import ScaleOptions
from benchmarks.usage import cpu_s
from muster.local.server import LocalCoordinator
from muster.output import Say

SIZE = 40_000
"""Values of a report: 160 kB."""
TARGETS = {"report_ratio": 1.15, "report_driver_share": 0.1, "writes_per_report": 1 / 8}
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
