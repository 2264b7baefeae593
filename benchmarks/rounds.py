"""One round with many devices that do not train: real HTTP, a coordinator in a process of its own, devices in this one.

Devices that never report or die in the middle of an upload must not stall it. The round waits for as many reports as
there are other devices, less one in fifty as a reserve, and must have them long before its deadline.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from benchmarks.load import POPULATION, LoadConfig, LoadFleet
from benchmarks.null_task import null_coordinator
from benchmarks.options import RoundsOptions
from benchmarks.usage import Usage
from coordinator.rules.states import RoundState
from coordinator.store.tasks import TaskSettings
from muster.local.server import LocalCoordinator
from muster.output import Say

PATIENCE_S = 600.0
SPARE = 50


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One committed round: its seconds from opening to end, and its devices."""

    assigned: int
    reported: int
    seconds: float


class RoundsOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome: attempts at rounds, and the time and memory that both sides used.

    committed, abandoned: attempts at rounds. server_idle_mb: the server's memory before the first device came.
    server_peak_mb: at most. waiting_kb: growth of the server's memory per device, all of which wait at once. sound:
    whether every round was committed at the first attempt.
    """

    devices: int
    size: int
    silent: float
    killed: float
    committed: int
    abandoned: int
    enrol_seconds: float
    seconds: float
    server_cpu_s: float
    clients_cpu_s: float
    server_idle_mb: float
    server_peak_mb: float
    waiting_kb: float
    rounds: list[Round]
    sound: bool
    endings: dict[str, int]
    requests: dict[int, int]


def run(options: RoundsOptions, say: Say) -> RoundsOutcome:
    """Enrol the devices, then run them until the task is completed, for PATIENCE_S a round at most."""
    limit = 2 * options.devices
    bounds = {"connection_limit": limit, "queue_limit": limit, "max_wait_s": PATIENCE_S}
    with null_coordinator(options.size, _settings(options), **bounds) as (server, task):
        return asyncio.run(_run(options, server, task, say))


def _settings(options: RoundsOptions) -> TaskSettings:
    """The task: all devices are selected."""
    gone = options.silent + options.killed
    goal = max(1, round(options.devices * (1 - gone)) - (options.devices // SPARE if gone else 0))
    return TaskSettings(
        population=POPULATION,
        goal=goal,
        rounds=options.rounds,
        over_selection=options.devices / goal,
        selection_timeout_s=PATIENCE_S,
        reporting_deadline_s=PATIENCE_S,
    )


async def _run(options: RoundsOptions, server: LocalCoordinator, task: str, say: Say) -> RoundsOutcome:
    light = LoadConfig(
        coordinator=server.url,
        devices=options.devices,
        silent=options.silent,
        killed=options.killed,
        wait_s=PATIENCE_S,
    )
    async with LoadFleet(light) as fleet:
        say("enrolling")
        began = time.monotonic()
        await fleet.enrol()
        enrolled = time.monotonic()
        idle, own_s = Usage.of(server.pid), time.process_time()
        await fleet.run(lambda: _completed(options, server, task, fleet, say))
        seconds = time.monotonic() - enrolled
        used, own_s = Usage.of(server.pid), time.process_time() - own_s
    committed = server.committed(task)
    abandoned = sum(record.state is RoundState.ABANDONED for record in server.store.rounds(task))
    grown = used.peak_rss_mb - idle.rss_mb
    return RoundsOutcome(
        devices=options.devices,
        size=options.size,
        silent=options.silent,
        killed=options.killed,
        committed=len(committed),
        abandoned=abandoned,
        sound=len(committed) == options.rounds and not abandoned,
        enrol_seconds=enrolled - began,
        seconds=seconds,
        server_cpu_s=used.cpu_s - idle.cpu_s,
        clients_cpu_s=own_s,
        server_idle_mb=idle.rss_mb,
        server_peak_mb=used.peak_rss_mb,
        waiting_kb=1024 * grown / options.devices,
        rounds=[
            Round(assigned=record.assigned, reported=record.reported, seconds=record.seconds or 0.0)
            for record in committed
        ],
        endings=dict(fleet.endings.most_common()),
        requests=dict(fleet.requests.most_common()),
    )


async def _completed(options: RoundsOptions, server: LocalCoordinator, task: str, fleet: LoadFleet, say: Say) -> None:
    until = time.monotonic() + options.rounds * PATIENCE_S
    while time.monotonic() < until:
        committed = await asyncio.to_thread(server.committed, task)
        if len(committed) == options.rounds:
            return
        say(f"round {len(committed) + 1}, {fleet.endings['reported']} reports")
        await asyncio.sleep(0.25)
