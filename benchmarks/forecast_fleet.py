"""The twin against real fleets: light devices that do what the twin's do, on a real coordinator, in real time.

Three profiles: devices that are always there; devices that come once in each of short days, and leave; and slow devices
of heavy-tailed speed of which many vanish. The fleets run at the same time, each with a coordinator of its own. The
twin runs the same tasks on the same devices for as long, with several seeds.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.load import POPULATION, LoadConfig
from benchmarks.null_task import null_coordinator
from benchmarks.options import ForecastFleetOptions
from benchmarks.usage import cpu_s
from benchmarks.working_fleet import WorkingFleet
from coordinator.rules.eligibility import Requires
from coordinator.rules.states import RoundState
from muster.local.server import LocalCoordinator
from muster.output import Say
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.devices import DAY_S, WAIT_S, Devices
from simulator.forecast.twin import Twin

SIZE = 1000
FIRST_S = 20.0
SEEDS = 8
SHORT_DAY_S, THERE_S, MISSED = 160.0, 90.0, 0.2
"""The short day, how long a device is there in the median, and the share of days on which it is not."""
_STEPS = "muster_round_step_seconds"
TOLERANCES = {"rounds": 0.2, "attempts": 0.2, "assigned": 0.2, "reports": 0.2, "round_s": 0.2, "check_ins": 0.1}
"""How far a fleet may be from the mean of its twins, as a share of it."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in the time: committed rounds, attempts at rounds that ended, devices drawn, reports counted, the
    mean seconds from a draw to its last report, and visits."""

    profile: str
    side: str
    rounds: float
    attempts: float
    assigned: float
    reports: float
    round_s: float
    check_ins: float


class ForecastFleetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of both sides. apart: of each figure, a fleet's distance from its twins' mean, as a share of it.

    cores_used: CPU seconds a second of all devices, and of all coordinators. late_s: how late the devices' clock rang,
    in the mean: where that is much, the machine was too busy to measure.
    """

    devices: int
    seconds: float
    sides: list[Figures]
    apart: dict[str, dict[str, float]]
    tolerances: dict[str, float]
    cores_used: dict[str, float]
    late_s: float
    sound: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """A population and its task, modelled and real."""

    name: str
    config: ForecastConfig
    server: LocalCoordinator
    task: str


def run(options: ForecastFleetOptions, say: Say) -> ForecastFleetOutcome:
    """Run the fleets for the time, then their twins."""
    with tempfile.TemporaryDirectory(prefix="muster-twin-") as folder, ExitStack() as stack:
        profiles = []
        for name, config in _configs(options, Path(folder)).items():
            # Light devices state no conditions.
            task = replace(config.task, population=POPULATION, requires=Requires())
            settings = {
                "connection_limit": 4 * options.devices,
                "queue_limit": 4 * options.devices,
                "retry_min_s": config.retry_min_s,
                "retry_max_s": config.retry_max_s,
            }
            profiles.append(Profile(name, config, *stack.enter_context(null_coordinator(SIZE, task, **settings))))
        began_s = time.process_time(), _server_s(profiles)
        fleets, late_s = asyncio.run(_all(options, profiles, say))
        used_s = time.process_time() - began_s[0], _server_s(profiles) - began_s[1]
        say("twins")
        twins = [_twins(options, one) for one in profiles]
    apart = {
        fleet.profile: {name: _apart(getattr(fleet, name), getattr(twin, name)) for name in TOLERANCES}
        for fleet, twin in zip(fleets, twins, strict=True)
    }
    return ForecastFleetOutcome(
        devices=options.devices,
        seconds=options.seconds,
        sides=[side for both in zip(fleets, twins, strict=True) for side in both],
        apart=apart,
        tolerances=TOLERANCES,
        cores_used={
            name: round(used / options.seconds, 3)
            for name, used in zip(("devices", "coordinators"), used_s, strict=True)
        },
        late_s=round(late_s, 4),
        sound=all(abs(by_name[name]) <= most for by_name in apart.values() for name, most in TOLERANCES.items()),
    )


def _apart(fleet: float, twin: float) -> float:
    return round((fleet - twin) / max(twin, 1.0), 3)


def _mean(seconds: Sequence[float]) -> float:
    return statistics.fmean(seconds) if seconds else 0.0


def _server_s(profiles: list[Profile]) -> float:
    return sum(cpu_s(one.server.pid) for one in profiles)


def _configs(options: ForecastFleetOptions, folder: Path) -> Mapping[str, ForecastConfig]:
    always, windows = folder / "always.csv", folder / "windows.csv"
    always.write_text(f"device,start_s,end_s\nalways,0,{DAY_S}\n")
    windows.write_text("device,start_s,end_s\n" + "".join(_short_days(options)))
    fewest = max(1, options.devices * 3 // 40)
    common = ForecastConfig(
        devices=options.devices,
        goal=max(1, options.devices // 10),
        rounds=1_000_000,
        max_attempts=1_000,
        selection_timeout_s=20.0,
        reporting_deadline_s=60.0,
        first_within_s=FIRST_S,
        trace=always,
        median_examples=100.0,
        example_s=0.05,
        bytes_down=0,
        bytes_up=0,
        step_s=0.25,
    )
    return {
        "always there": common,
        "short days": replace(common, trace=windows, minimum=fewest),
        "slow": replace(
            common,
            example_s=0.08,
            speed_spread=1.0,
            drop_out=0.2,
            reporting_deadline_s=24.0,
            minimum=fewest,
        ),
    }


def _short_days(options: ForecastFleetOptions) -> list[str]:
    """The stretches of a trace: each device has its own time of the short day, around one that all have in common."""
    chance, lines = np.random.default_rng(0), []
    for device in range(options.devices):
        begins = chance.normal(SHORT_DAY_S / 3, SHORT_DAY_S / 6) % SHORT_DAY_S
        lasts = min(THERE_S * np.exp(chance.normal(0, 0.4)), SHORT_DAY_S - 1.0)
        for day in range(-1, 1 + int(options.seconds / SHORT_DAY_S)):
            start = max(0.0, begins + day * SHORT_DAY_S)
            end = begins + day * SHORT_DAY_S + lasts
            if chance.random() >= MISSED and start < end:
                lines.append(f"{device},{start:.2f},{end:.2f}\n")
    return lines


def _twins(options: ForecastFleetOptions, profile: Profile) -> Figures:
    modelled = Devices.drawn(profile.config)
    seeds = [_twin(options, replace(profile.config, seed=seed), modelled) for seed in range(SEEDS)]
    return Figures(
        profile=profile.name,
        side="twins' mean",
        **{name: round(statistics.fmean(one[name] for one in seeds), 2) for name in TOLERANCES},
    )


def _twin(options: ForecastFleetOptions, config: ForecastConfig, modelled: Devices) -> dict[str, float]:
    course = Twin(config, modelled).run(seconds=options.seconds)
    return {
        "rounds": len(course.rounds),
        "attempts": len(course.rounds) + course.abandoned.total(),
        "assigned": course.assigned,
        "reports": sum(len(one.devices) for one in course.rounds),
        "round_s": _mean([one.ended - one.drawn for one in course.rounds]),
        "check_ins": int(course.check_ins.by_hour.sum()),
    }


async def _all(options: ForecastFleetOptions, profiles: list[Profile], say: Say) -> tuple[list[Figures], float]:
    """The figures of all fleets, and how late the clock rang, in the mean."""
    ready = asyncio.Barrier(len(profiles))
    late_s: list[float] = []
    fleets = await asyncio.gather(*(_fleet(options, one, ready, late_s, say) for one in profiles))
    return fleets, statistics.fmean(late_s)


async def _fleet(
    options: ForecastFleetOptions, profile: Profile, ready: asyncio.Barrier, late_s: list[float], say: Say
) -> Figures:
    config, server = profile.config, profile.server
    light = LoadConfig(coordinator=server.url, devices=options.devices, wait_s=WAIT_S)
    async with WorkingFleet(light, Devices.drawn(config), config.drop_out, FIRST_S) as fleet:
        say("enrolling")
        await fleet.enrol()
        await ready.wait()
        await fleet.run(lambda: _pass(options.seconds, late_s, say))
        rounds = await asyncio.to_thread(server.store.rounds, profile.task)
        samples = await asyncio.to_thread(server.samples, _STEPS)
    steps = {sample.name: sample.value for sample in samples if sample.labels.get("step") == "reporting"}
    committed = [record for record in rounds if record.state is RoundState.COMMITTED]
    return Figures(
        profile=profile.name,
        side="fleet",
        rounds=len(committed),
        attempts=sum(record.state.ended for record in rounds),
        assigned=sum(record.assigned for record in rounds),
        reports=sum(record.reported for record in committed),
        round_s=round(steps.get(f"{_STEPS}_sum", 0.0) / max(1.0, steps.get(f"{_STEPS}_count", 0.0)), 2),
        check_ins=fleet.check_ins,
    )


async def _pass(seconds: float, late_s: list[float], say: Say) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        say(f"{left:.0f} s left")
        due = time.monotonic() + min(1.0, left)
        await asyncio.sleep(min(1.0, left))
        late_s.append(time.monotonic() - due)
