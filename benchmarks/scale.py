"""Replicas of one population: CPU of a rejected check-in, at those that do not drive it and at the one that does.

The same of reports: `benchmarks.report`.

The peer is a coordinator alone, with the same task on a database of its own, in the same run. What answers check-ins is
the main thread of a process, and what hears of them at the driver is its turn, once a second: CPU of these two is
counted. So neither what else the machine does, nor what a process does when nobody comes, is in the figures.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.load import POPULATION, LoadConfig, LoadFleet, Refusal, null_bundle
from benchmarks.postgresql import Cluster, binaries, cluster
from benchmarks.report import task_of
from benchmarks.runner import ScaleOptions
from benchmarks.usage import main_thread_s
from coordinator.api.service import Service
from coordinator.rules.pacing import MARK_BYTES, Return, Tally, notice_of, text_of
from coordinator.settings import load_settings
from coordinator.store.tasks import TaskSettings
from muster.local.server import LocalCoordinator, ServerError, local_coordinator
from muster.output import Say

CALLERS = 16
TARGETS = {"checkin_ratio": 1.1, "checkin_driver_share": 0.02}
TASK = TaskSettings(population=POPULATION, goal=1, rounds=1, min_examples=1000)
"""No light device holds enough examples: every one is rejected."""
_HEARD = 2000
_AWAY_S = 60.0
_DUE_S = 1.1
_FOLLOWS_WITHIN_S = 120.0


def run(options: ScaleOptions, say: Say) -> dict[str, Any]:
    """CPU of rejected check-ins, in microseconds each. Raises ServerError without PostgreSQL's programs.

    alone_us: of the coordinator that is alone. follower_us: of a replica that does not drive the population, where the
    check-ins come. Both are medians over blocks. checkin_ratio: the latter's share of the former in the block beside
    it, the median over pairs of blocks, as a processor's speed changes from one minute to the next. heard_us: of the
    driver for each that it hears of. heard_ms: of the driver for a second in which it hears of any, beyond that.
    driver_us: both together, where two followers answer as many as they can on a core each. checkin_driver_share: its
    share of alone_us.
    """
    programs = binaries()
    if programs is None:
        raise ServerError("there is no PostgreSQL here: install its server, with pg_ctl on the PATH")
    with cluster(programs) as server, tempfile.TemporaryDirectory(prefix="muster-scale-") as folder:
        say("a driver that hears of many")
        heard_ms, heard_us = _hearing(
            _shared(server, Path(folder) / "driver"), Path(folder) / "driver", options.blocks + 2
        )
        say("starting")
        single, several = Path(folder) / "alone", Path(folder) / "shared"
        with (
            _coordinators(server, single, 1, TASK, 10) as (alone,),
            _coordinators(server, several, 3, TASK, 10) as (driver, *followers),
        ):
            pairs = asyncio.run(_run(options, alone, driver, followers, say))
        single, several = Path(folder) / "reports-alone", Path(folder) / "reports"
        task = task_of(options.reports, options.rounds)
        with (
            _coordinators(server, single, 1, task, report.REPLICA_SIZE) as (alone,),
            _coordinators(server, several, 2, task, report.REPLICA_SIZE) as (driver, replica),
        ):
            reports = asyncio.run(report.measure(options, alone, driver, replica, say))
    alone_us = median(pair.alone_us for pair in pairs)
    follower_us = median(pair.follower_us for pair in pairs)
    driver_us = heard_us + heard_ms * 1e-3 * follower_us / len(followers)
    return {
        "devices": options.devices,
        "check_ins": sum(pair.check_ins for pair in pairs),
        "alone_us": alone_us,
        "follower_us": follower_us,
        "heard_us": heard_us,
        "heard_ms": heard_ms,
        "driver_us": driver_us,
        "checkin_ratio": median(pair.follower_us / pair.alone_us for pair in pairs),
        "checkin_driver_share": driver_us / alone_us,
        "reports": reports,
        "targets": TARGETS | report.REPLICA_TARGETS,
    }


def _shared(server: Cluster, folder: Path) -> dict[str, Any]:
    """The settings of coordinators that share a new database. Devices may come again at once, and each visit counts."""
    files = {name: folder / name for name in ("blobs", "keys")}
    return {"database": server.without_tables(), **files, "retry_min_s": 0, "retry_max_s": 0, "connection_limit": 8192}


@contextmanager
def _coordinators(
    server: Cluster, folder: Path, count: int, task: TaskSettings, size: int
) -> Iterator[list[LocalCoordinator]]:
    """Coordinators on a database with one task, on `size` parameters; the first one drives it."""
    given = _shared(server, folder)
    with ExitStack() as stack:
        started: list[LocalCoordinator] = []
        for number in range(count):
            started.append(stack.enter_context(local_coordinator(folder / str(number), **given)))
            if number == 0:
                started[0].store.register_task(null_bundle(folder / "plan", size), task)
        yield started


def _hearing(given: Mapping[str, Any], folder: Path, turns: int) -> tuple[float, float]:
    """A driver's CPU milliseconds for a second in which it hears of any, and microseconds for each of which it hears.

    The driver is here, without its thread.
    """
    folder.mkdir()
    service = Service.open(load_settings(given))
    service.membership.listen_at("http://127.0.0.1:9")
    service.store.register_task(null_bundle(folder / "plan", 10), TASK)
    service.driver.recover()

    def turn(visits: int) -> float:
        told = Return(time.monotonic() + _AWAY_S, time.monotonic() + _AWAY_S)
        each = [(secrets.token_bytes(MARK_BYTES), told) for _ in range(visits)]
        with service.store.database.writing() as records:
            (notice,) = [notice_of(stored.said) for stored in records.notices.changed({})]
            tally = Tally.of(notice.generation, each, {("task", "examples"): 1})
            records.notices.tell([(POPULATION, text_of(tally))] if visits else [])
        time.sleep(_DUE_S)
        began = time.thread_time()
        service.driver.turn(())
        return time.thread_time() - began

    try:
        service.driver.turn(())  # which publishes the generation
        turn(1)
        # In turns, as a processor's speed changes; the least of several, as whatever else a process does only adds.
        measured = [[turn(visits) for visits in (0, 1, _HEARD)] for _ in range(turns)]
        none, one, many = map(min, zip(*measured, strict=True))
    finally:
        service.store.close()
    return 1e3 * (one - none), 1e6 * (many - one) / (_HEARD - 1)


class _Pair(NamedTuple):
    """Check-ins of two blocks, and microseconds of each at the coordinator that is alone and at a follower."""

    check_ins: int
    alone_us: float
    follower_us: float


async def _run(
    options: ScaleOptions,
    alone: LocalCoordinator,
    driver: LocalCoordinator,
    followers: Sequence[LocalCoordinator],
    say: Say,
) -> list[_Pair]:
    """Blocks in turns: at the coordinator that is alone, and at one of the followers."""
    async with AsyncExitStack() as stack:
        by_itself = await _fleet(stack, alone, options.devices)
        at_driver = await _fleet(stack, driver, options.devices)
        elsewhere = [await _fleet(stack, follower, 0) for follower in followers]
        for fleet, follower in zip(elsewhere, followers, strict=True):
            fleet.devices = at_driver.devices
            await _until_it_follows(fleet, follower)
        pairs: list[_Pair] = []
        for number in range(options.blocks):
            say(f"check-ins: pair {number + 1} of {options.blocks}")
            one = number % len(followers)
            first, alone_s = await _block(by_itself, alone.pid, options.seconds)
            second, follower_s = await _block(elsewhere[one], followers[one].pid, options.seconds)
            pairs.append(_Pair(first + second, 1e6 * alone_s / first, 1e6 * follower_s / second))
    return pairs


async def _fleet(stack: AsyncExitStack, coordinator: LocalCoordinator, devices: int) -> LoadFleet:
    fleet = await stack.enter_async_context(LoadFleet(LoadConfig(coordinator=coordinator.url, devices=devices)))
    await fleet.enrol()
    return fleet


async def _until_it_follows(fleet: LoadFleet, follower: LocalCoordinator) -> None:
    """Check in at a replica until it answers itself. Raises ServerError."""
    until = time.monotonic() + _FOLLOWS_WITHIN_S
    while not any(sample.value for sample in follower.samples("muster_check_ins")):
        if time.monotonic() > until:
            raise ServerError("a replica does not send devices away itself; look at its log")
        await fleet.check_in(fleet.devices[0])
        await asyncio.sleep(0.5)


async def _block(fleet: LoadFleet, pid: int, seconds: float) -> tuple[int, float]:
    """Check-ins at a coordinator until its main thread has used so much CPU: how many, and the CPU."""
    answered, before = 0, main_thread_s(pid)

    async def call(number: int) -> None:
        nonlocal answered
        turns = cycle(fleet.devices[number::CALLERS])
        while main_thread_s(pid) - before < seconds:
            try:
                await fleet.check_in(next(turns))
                answered += 1
            except Refusal as refusal:  # the machine has other work
                await asyncio.sleep(refusal.retry_after_s)

    await asyncio.gather(*map(call, range(CALLERS)))
    return answered, main_thread_s(pid) - before
