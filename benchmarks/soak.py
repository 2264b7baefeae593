"""Rounds for a long time, with devices that fall silent and die: memory, files and rows must not grow without end.

Memory is sampled every few seconds, and a line is fitted to the samples after a warm-up. When the last device has
gone, nothing may be left: no more open files than at the start, and no open assignment of a round that is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import sqlalchemy

from benchmarks.load import POPULATION, LoadConfig, LoadFleet
from benchmarks.null_task import null_coordinator
from benchmarks.options import SoakOptions
from benchmarks.usage import Usage
from coordinator.rules.states import AssignmentState
from coordinator.store.tables import ASSIGNMENTS, ROUNDS
from coordinator.store.tasks import CoordinatorStore, TaskSettings
from muster.local.server import LocalCoordinator
from muster.output import Say

SILENT, KILLED = 0.08, 0.2
WARM_UP = 0.2
"""The share of the time in which caches fill and the allocator reaches its size."""
SAMPLE_EVERY_S = 5.0
QUIET_S = 10.0
"""Seconds after the last device until its connections are closed; less in a run that is shorter itself."""


class SoakOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome: attempts at rounds, and memory, open files and rows of the coordinator.

    slope_mb_per_hour: of the server's memory after the warm-up, by least squares; rss_mb: twenty samples of it, evenly
    spaced. descriptors: open files before the first device, at most, and after the last. waiting_rows: waiting
    assignments of ended rounds.
    """

    minutes: float
    devices: int
    size: int
    committed: int
    abandoned: int
    longest_round_s: float
    reports: int
    server_cpu_s: float
    slope_mb_per_hour: float
    rss_mb: list[float]
    descriptors: tuple[int, int, int]
    waiting_rows: int
    endings: dict[str, int]
    requests: dict[int, int]


class _Sample(NamedTuple):
    at_s: float
    used: Usage


def run(options: SoakOptions, say: Say) -> SoakOutcome:
    """Run the devices for the given time, then count what is left."""
    with null_coordinator(options.size, _settings(options)) as (server, task):
        return asyncio.run(_run(options, server, task, say))


def _settings(options: SoakOptions) -> TaskSettings:
    """The task: more rounds than there is time for, each with more devices than it needs."""
    goal = max(1, options.devices // 6)
    return TaskSettings(
        population=POPULATION,
        goal=goal,
        minimum=max(1, goal // 2),
        rounds=1_000_000,
        over_selection=2.0,
        selection_timeout_s=10.0,
        reporting_deadline_s=20.0,
    )


async def _run(options: SoakOptions, server: LocalCoordinator, task: str, say: Say) -> SoakOutcome:
    store = server.store
    before, samples = Usage.of(server.pid), []
    light = LoadConfig(
        coordinator=server.url,
        devices=options.devices,
        silent=SILENT,
        killed=KILLED,
        pause_s=1.0,
        wait_s=20.0,
    )

    async def watch() -> None:
        began = time.monotonic()
        while (at_s := time.monotonic() - began) < 60 * options.minutes:
            samples.append(_Sample(at_s, Usage.of(server.pid)))
            say(f"{samples[-1].used.rss_mb:.0f} MB, {fleet.endings['reported']} reports")
            await asyncio.sleep(min(SAMPLE_EVERY_S, 6 * options.minutes))

    async with LoadFleet(light) as fleet:
        await fleet.enrol()
        await fleet.run(watch)
    store.cancel(task)
    await asyncio.sleep(min(QUIET_S, 60 * options.minutes))
    rounds = server.committed(task)
    return SoakOutcome(
        minutes=options.minutes,
        devices=options.devices,
        size=options.size,
        committed=len(rounds),
        abandoned=len(store.rounds(task)) - len(rounds),
        longest_round_s=max((record.seconds or 0.0 for record in rounds), default=0.0),
        reports=fleet.endings["reported"],
        server_cpu_s=Usage.of(server.pid).cpu_s - before.cpu_s,
        slope_mb_per_hour=slope_per_hour([(sample.at_s, sample.used.rss_mb) for sample in samples]),
        rss_mb=[round(sample.used.rss_mb, 1) for sample in samples[:: max(1, len(samples) // 20)]],
        descriptors=(
            before.descriptors,
            max(sample.used.descriptors for sample in samples),
            Usage.of(server.pid).descriptors,
        ),
        waiting_rows=_waiting_rows(store, task),
        endings=dict(fleet.endings.most_common()),
        requests=dict(fleet.requests.most_common()),
    )


def slope_per_hour(samples: Sequence[tuple[float, float]]) -> float:
    """The slope of a value per hour: the line of least squares through (seconds, value) after the warm-up."""
    warm = np.array(samples[int(WARM_UP * len(samples)) :])
    return float(np.polyfit(warm[:, 0] / 3600, warm[:, 1], 1)[0]) if len(warm) > 1 else 0.0


def _waiting_rows(store: CoordinatorStore, task: str) -> int:
    over = (ROUNDS.c.task == task) & ROUNDS.c.ended_at.is_not(None)
    waiting = over & (ASSIGNMENTS.c.state == AssignmentState.ASSIGNED)
    query = sqlalchemy.select(sqlalchemy.func.count()).select_from(ASSIGNMENTS.join(ROUNDS)).where(waiting)
    with store.database.engine.connect() as connection:
        return connection.scalar(query) or 0
