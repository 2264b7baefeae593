"""The twin against a real fleet: light devices that work as long as the twin's do, on a real coordinator, in real time.

Every device can come at any time. Its work takes the seconds that the twin drew for it, and it vanishes with the same
chance. It comes back when the coordinator says. The twin runs the same task for as long, with several seeds.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.load import POPULATION, Call, LoadConfig, LoadDevice, LoadFleet, Refusal
from benchmarks.null_task import null_coordinator
from benchmarks.options import ForecastFleetOptions
from coordinator.rules.eligibility import Requires
from coordinator.rules.states import RoundState
from fedcore.wire.messages import AssignmentAnswer, Rejected
from muster.local.server import LocalCoordinator
from muster.output import Say
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.devices import Devices
from simulator.forecast.stretches import DAY_S
from simulator.forecast.twin import WAIT_S, Twin

SIZE = 1000
_STEPS = "muster_round_step_seconds"
FIRST_S = 10.0
HOLD_S = 3.0
SEEDS = 8
TOLERANCES = {"rounds": 0.25, "assigned": 0.25, "reports": 0.25, "round_s": 0.25, "check_ins": 0.35}
"""How far the fleet may be from the mean of the twins, as a share of it."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in the time: committed and abandoned rounds, devices drawn, reports counted, the mean seconds
    from a draw to a commit, and sessions."""

    side: str
    rounds: float
    abandoned: float
    assigned: float
    reports: float
    round_s: float
    check_ins: float


class ForecastFleetOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of both sides. apart: of each figure, the fleet's distance from the twins' mean, as a share of it."""

    devices: int
    seconds: float
    sides: list[Figures]
    apart: dict[str, float]
    tolerances: dict[str, float]
    sound: bool


class WorkingFleet(LoadFleet):
    """Light devices whose work takes time. works_s: of each device; drop_out: the chance that it vanishes in one."""

    def __init__(self, config: LoadConfig, works_s: list[float], drop_out: float) -> None:
        super().__init__(config)
        self._works_s, self._drop_out = works_s, drop_out
        self._place: dict[int, int] = {}

    async def _run(self, device: LoadDevice) -> None:
        self._place.setdefault(id(device), len(self._place))
        await asyncio.sleep(self._random.uniform(0, FIRST_S))
        await super()._run(device)

    async def _session(self, device: LoadDevice) -> tuple[str, float]:
        check_in = await self._retrying(lambda: self.check_in(device))
        if isinstance(check_in, Rejected):
            return check_in.reason, self._delay_s(check_in)
        call = Call("POST", f"/v1/sessions/{check_in.session}/assignments", prefer_s=WAIT_S)
        answer: AssignmentAnswer = await self._retrying(lambda: self._message(device, call, AssignmentAnswer))
        if isinstance(answer, Rejected):
            return answer.reason, self._delay_s(answer)
        works_s = self._works_s[self._place[id(device)]]
        rest_s = self._random.uniform(check_in.retry.min_s, check_in.retry.max_s) if check_in.retry else FIRST_S
        hold = asyncio.create_task(self._hold(device, answer))
        try:
            if self._random.random() < self._drop_out:
                await asyncio.sleep(works_s * self._random.random())
                return "vanished", rest_s
            await asyncio.wait([hold], timeout=works_s)
            if hold.done():
                return "not needed", rest_s
            ending, _ = await self._work(device, answer)
            return ending, rest_s
        except Refusal:
            return "not needed", rest_s
        finally:
            hold.cancel()


def run(options: ForecastFleetOptions, say: Say) -> ForecastFleetOutcome:
    """Run the fleet for the time, then its twins."""
    with tempfile.TemporaryDirectory(prefix="muster-twin-") as folder:
        config = _config(options, Path(folder) / "always.csv")
        fleet = _real(options, config, say)
        say("twins")
        twins = [_twin(options, replace(config, seed=seed)) for seed in range(SEEDS)]
    mean = Figures(
        side="twins' mean", **{name: statistics.fmean(getattr(twin, name) for twin in twins) for name in _NAMES}
    )
    apart = {name: round(getattr(fleet, name) / getattr(mean, name) - 1, 3) for name in TOLERANCES}
    return ForecastFleetOutcome(
        devices=options.devices,
        seconds=options.seconds,
        sides=[fleet, mean],
        apart=apart,
        tolerances=TOLERANCES,
        sound=all(abs(apart[name]) <= most for name, most in TOLERANCES.items()),
    )


_NAMES = Figures.__struct_fields__[1:]


def _config(options: ForecastFleetOptions, trace: Path) -> ForecastConfig:
    trace.write_text(f"device,start_s,end_s\nalways,0,{DAY_S}\n")
    return ForecastConfig(
        devices=options.devices,
        goal=options.goal,
        rounds=1_000_000,
        selection_timeout_s=20.0,
        reporting_deadline_s=6 * options.work_s,
        first_within_s=FIRST_S,
        trace=trace,
        median_examples=100.0,
        example_s=options.work_s / 100.0,
        bytes_down=0,
        bytes_up=0,
        drop_out=options.drop_out,
        step_s=0.25,
    )


def _twin(options: ForecastFleetOptions, config: ForecastConfig) -> Figures:
    course = Twin(config).run(seconds=options.seconds)
    return Figures(
        side="twin",
        rounds=len(course.rounds),
        abandoned=course.abandoned.total(),
        assigned=course.assigned,
        reports=sum(len(one.devices) for one in course.rounds),
        round_s=statistics.fmean(one.ended - one.drawn for one in course.rounds),
        check_ins=int(course.check_ins.by_hour.sum()),
    )


def _real(options: ForecastFleetOptions, config: ForecastConfig, say: Say) -> Figures:
    bounds = {"connection_limit": 4 * options.devices, "queue_limit": 4 * options.devices}
    # Light devices state no conditions.
    task = replace(config.task, population=POPULATION, requires=Requires())
    with null_coordinator(SIZE, task, **bounds) as (server, task_id):
        return asyncio.run(_run(options, config, server, task_id, say))


async def _run(
    options: ForecastFleetOptions, config: ForecastConfig, server: LocalCoordinator, task: str, say: Say
) -> Figures:
    works_s = Devices.drawn(config).work_s.tolist()
    light = LoadConfig(coordinator=server.url, devices=options.devices, wait_s=HOLD_S)
    async with WorkingFleet(light, works_s, options.drop_out) as fleet:
        say("enrolling")
        await fleet.enrol()
        await fleet.run(lambda: _pass(options.seconds, fleet, say))
        rounds = await asyncio.to_thread(server.store.rounds, task)
        steps = {
            sample.name: sample.value for sample in server.samples(_STEPS) if sample.labels.get("step") == "reporting"
        }
    committed = [record for record in rounds if record.state is RoundState.COMMITTED]
    return Figures(
        side="fleet",
        rounds=len(committed),
        abandoned=sum(record.state is RoundState.ABANDONED for record in rounds),
        assigned=sum(record.assigned for record in rounds),
        reports=sum(record.reported for record in committed),
        round_s=steps[f"{_STEPS}_sum"] / steps[f"{_STEPS}_count"],
        check_ins=fleet.endings.total() - fleet.endings["unreachable"],
    )


async def _pass(seconds: float, fleet: WorkingFleet, say: Say) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        say(f"{left:.0f} s left, {fleet.endings['reported']} reports")
        await asyncio.sleep(min(1.0, left))
