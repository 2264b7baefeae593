"""One round with many devices that do not train: real HTTP, a coordinator in a process of its own, devices in this one.

Devices that never report, and devices that die in the middle of an upload, must not stall it: the round wants as many
reports as there are other devices, less one in fifty for luck, and must have them long before its deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from coordinator.rules.rounds import RoundState
from coordinator.store.tasks import CoordinatorStore, TaskSettings
from muster.bench.machine import describe_machine
from muster.bench.null_task import null_coordinator
from muster.bench.usage import Usage
from muster.server import LocalCoordinator
from simulator.fleet.load import LoadConfig, LoadFleet

POPULATION = "light"
PATIENCE_S = 600.0
SPARE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsConfig:
    """What to run: rounds of all `devices`, each reporting on `size` parameters."""

    devices: int
    rounds: int = 1
    size: int = 1000
    silent: float = 0.0
    killed: float = 0.0

    def settings(self) -> TaskSettings:
        """The task: everybody is selected."""
        gone = self.silent + self.killed
        goal = max(1, round(self.devices * (1 - gone)) - (self.devices // SPARE if gone else 0))
        return TaskSettings(
            population=POPULATION,
            goal=goal,
            rounds=self.rounds,
            over_selection=self.devices / goal,
            selection_timeout_s=PATIENCE_S,
            reporting_deadline_s=PATIENCE_S,
        )


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One committed round: from its opening to its end in seconds, and what each side used meanwhile."""

    assigned: int
    reported: int
    seconds: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the benchmark, and where it was made.

    committed, abandoned: attempts at rounds. server_idle_mb: the server's memory before the first device came.
    server_peak_mb: at most. waiting_kb: what the server's memory grew by, per device, all of which wait at once. sound:
    whether every round was committed at the first attempt.
    """

    benchmark: str
    date: str
    machine: str
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


def run(config: RoundsConfig, on_progress: Callable[[str], None]) -> Result:
    """Enrol the devices, then let them live until the task is completed, for PATIENCE_S a round at most."""
    limit = 2 * config.devices
    bounds = {"connection_limit": limit, "queue_limit": limit, "max_wait_s": PATIENCE_S}
    with null_coordinator(config.size, config.settings(), **bounds) as (server, task):
        return asyncio.run(_run(config, server, task, on_progress))


async def _run(config: RoundsConfig, server: LocalCoordinator, task: str, on_progress: Callable[[str], None]) -> Result:
    light = LoadConfig(
        coordinator=server.url,
        population=POPULATION,
        devices=config.devices,
        silent=config.silent,
        killed=config.killed,
        wait_s=PATIENCE_S,
    )
    async with LoadFleet(light) as fleet:
        on_progress("enrolling")
        began = time.monotonic()
        await fleet.enrol()
        enrolled = time.monotonic()
        idle, own = Usage.of(server.pid), time.process_time()
        await fleet.run(lambda: _completed(config, server.store, task, fleet, on_progress))
        seconds = time.monotonic() - enrolled
        used, own = Usage.of(server.pid), time.process_time() - own
    rounds = server.store.rounds(task)
    committed = sum(one.state is RoundState.COMMITTED for one in rounds)
    abandoned = sum(one.state is RoundState.ABANDONED for one in rounds)
    grown = used.peak_rss_mb - idle.rss_mb
    return Result(
        benchmark="rounds",
        date=datetime.now(UTC).date().isoformat(),
        machine=describe_machine(),
        devices=config.devices,
        size=config.size,
        silent=config.silent,
        killed=config.killed,
        committed=committed,
        abandoned=abandoned,
        sound=committed == config.rounds and not abandoned,
        enrol_seconds=enrolled - began,
        seconds=seconds,
        server_cpu_s=used.cpu_s - idle.cpu_s,
        clients_cpu_s=own,
        server_idle_mb=idle.rss_mb,
        server_peak_mb=used.peak_rss_mb,
        waiting_kb=1024 * grown / config.devices,
        rounds=[
            Round(assigned=one.assigned, reported=one.reported, seconds=one.seconds or 0.0)
            for one in rounds
            if one.state is RoundState.COMMITTED
        ],
        endings=dict(fleet.endings.most_common()),
        requests=dict(fleet.requests.most_common()),
    )


async def _completed(
    config: RoundsConfig, store: CoordinatorStore, task: str, fleet: LoadFleet, on_progress: Callable[[str], None]
) -> None:
    until = time.monotonic() + config.rounds * PATIENCE_S
    while time.monotonic() < until:
        rounds = await asyncio.to_thread(store.rounds, task)
        if sum(one.state is RoundState.COMMITTED for one in rounds) == config.rounds:
            return
        on_progress(f"round {len(rounds)}, {fleet.endings['reported']} reports")
        await asyncio.sleep(0.25)
