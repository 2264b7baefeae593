"""The twin of forecasts against real fleets: light devices that do what the twin's do, on real coordinators.

Under three profiles: devices that are always there; devices that come once in each of short days, and leave; and slow
devices of heavy-tailed speed of which many vanish.
"""

import asyncio
import statistics
import time
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.load import POPULATION, Call, LoadConfig, LoadFleet, Refusal, null_coordinator
from coordinator.rules.states import Requires, RoundState
from fedcore.wire.messages import Abort, Rejected, encode
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.course import DAY_S, WAIT_S, Devices
from simulator.forecast.twin import Twin

FIRST_S, SEEDS = 20.0, 8
SHORT_DAY_S, THERE_S, MISSED = 160.0, 90.0, 0.2
"""The short day, how long a device is there in the median, and the share of days on which it is not."""
STEPS = "muster_round_step_seconds"
TOLERANCES = {"rounds": 0.2, "attempts": 0.2, "assigned": 0.2, "reports": 0.2, "round_s": 0.2, "check_ins": 0.1}
"""How far a fleet may be from the mean of its twins, as a share of it."""


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("profile", ["always there", "short days", "slow"])
def test_a_fleet_does_what_its_twins_do(tmp_path, capsys, profile):
    devices, seconds = 200, 480.0
    config = configs(devices, seconds, tmp_path)[profile]
    task = replace(config.task, population=POPULATION, requires=Requires())  # light devices state no conditions
    limits = dict.fromkeys(("connection_limit", "queue_limit"), 4 * devices)
    retry = {"retry_min_s": config.retry_min_s, "retry_max_s": config.retry_max_s}
    with null_coordinator(1000, task, **limits, **retry) as (server, name):
        fleet = asyncio.run(fleet_of(config, server, name, seconds))
    modelled = Devices.drawn(config)
    twins = [twin(replace(config, seed=seed), modelled, seconds) for seed in range(SEEDS)]
    expected = {figure: statistics.fmean(one[figure] for one in twins) for figure in TOLERANCES}
    with capsys.disabled():
        print(f"\n{profile}: {fleet}, twins {expected}")
    for figure, most in TOLERANCES.items():
        assert abs(fleet[figure] - expected[figure]) <= most * max(expected[figure], 1.0), figure


def configs(devices, seconds, folder):
    always, windows = folder / "always.csv", folder / "windows.csv"
    always.write_text(f"device,start_s,end_s\nalways,0,{DAY_S}\n")
    windows.write_text("device,start_s,end_s\n" + "".join(short_days(devices, seconds)))
    fewest = max(1, devices * 3 // 40)
    common = ForecastConfig(
        devices=devices, goal=max(1, devices // 10), rounds=1_000_000, max_attempts=1_000, selection_timeout_s=20.0,
        reporting_deadline_s=60.0, first_within_s=FIRST_S, trace=always, median_examples=100.0, example_s=0.05,
        bytes_down=0, bytes_up=0, step_s=0.25,
    )  # fmt: skip
    slow = {"example_s": 0.08, "speed_spread": 1.0, "drop_out": 0.2, "reporting_deadline_s": 24.0}
    return {
        "always there": common,
        "short days": replace(common, trace=windows, minimum=fewest),
        "slow": replace(common, minimum=fewest, **slow),
    }


def short_days(devices, seconds):
    """The stretches of a trace: each device has its own time of the short day, around one that all have in common."""
    chance = np.random.default_rng(0)
    for device in range(devices):
        begins = chance.normal(SHORT_DAY_S / 3, SHORT_DAY_S / 6) % SHORT_DAY_S
        lasts = min(THERE_S * np.exp(chance.normal(0, 0.4)), SHORT_DAY_S - 1.0)
        for day in range(-1, 1 + int(seconds / SHORT_DAY_S)):
            start = max(0.0, begins + day * SHORT_DAY_S)
            end = begins + day * SHORT_DAY_S + lasts
            if chance.random() >= MISSED and start < end:
                yield f"{device},{start:.2f},{end:.2f}\n"


def twin(config, modelled, seconds):
    course = Twin(config, modelled).run(seconds=seconds)
    lengths = [one.ended - one.drawn for one in course.rounds]
    return {
        "rounds": len(course.rounds),
        "attempts": len(course.rounds) + course.abandoned.total(),
        "assigned": course.assigned,
        "reports": sum(len(one.devices) for one in course.rounds),
        "round_s": statistics.fmean(lengths) if lengths else 0.0,
        "check_ins": int(course.check_ins.by_hour.sum()),
    }


async def fleet_of(config, server, task, seconds):
    light = LoadConfig(coordinator=server.url, devices=config.devices, wait_s=WAIT_S)
    async with WorkingFleet(light, Devices.drawn(config), config.drop_out, FIRST_S) as fleet:
        await fleet.enrol()
        await fleet.run(lambda: asyncio.sleep(seconds))
        rounds = await asyncio.to_thread(server.store.rounds, task)
        samples = await asyncio.to_thread(server.samples, STEPS)
    steps = {sample.name: sample.value for sample in samples if sample.labels.get("step") == "reporting"}
    committed = [record for record in rounds if record.state is RoundState.COMMITTED]
    return {
        "rounds": len(committed),
        "attempts": sum(record.state.ended for record in rounds),
        "assigned": sum(record.assigned for record in rounds),
        "reports": sum(record.reported for record in committed),
        "round_s": steps.get(f"{STEPS}_sum", 0.0) / max(1.0, steps.get(f"{STEPS}_count", 0.0)),
        "check_ins": fleet.check_ins,
    }


class WorkingFleet(LoadFleet):
    """A fleet whose devices are the rows of a modelled population.

    modelled: when each can come, and how long its work takes. drop_out: the chance that a device vanishes in an
    assignment. first_within_s: within which all come for the first time. `check_ins` counts visits.
    """

    def __init__(self, config, modelled, drop_out, first_within_s):
        super().__init__(config)
        self._modelled, self._drop_out, self._first_within_s = modelled, drop_out, first_within_s
        self._rows = {}
        self._began = 0.0
        self.check_ins = 0

    async def _run(self, device):
        if not self._rows:
            self._began = time.monotonic()
        self._rows[id(device)] = np.array([len(self._rows)])
        await asyncio.sleep(self._random.uniform(0, self._first_within_s))
        await super()._run(device)

    async def _session(self, device):
        row, stretches = self._rows[id(device)], self._modelled.stretches
        if not stretches.can_until(row, self._now()).any():
            now = self._now()
            await asyncio.sleep(float(stretches.next_stretch(row, now)[0]) - now)
        self.check_ins += 1
        answer, retry = await self._drawn(device)
        if isinstance(answer, Rejected):
            return answer.reason, self._delay_s(answer)
        leaves_s = max(0.0, float(stretches.can_until(row, self._now())[0]) - self._now())
        ending = await self._assigned(device, answer, float(self._modelled.work_s[row[0]]), leaves_s)
        return ending, self._random.uniform(retry.min_s, retry.max_s)

    async def _assigned(self, device, given, works_s, leaves_s):
        """Work on an assignment until it is done, or this device vanishes or leaves, or is not needed."""
        vanishes = self._random.random() < self._drop_out
        ends_s = works_s * self._random.random() if vanishes else works_s
        hold = asyncio.create_task(self._hold(device, given))
        try:
            await asyncio.wait([hold], timeout=min(ends_s, leaves_s))
            if hold.done():
                return "not needed"
            if leaves_s < ends_s:
                call = Call("POST", f"/v1/assignments/{given.assignment}:abort", encode(Abort(reason="conditions")))
                await self._retrying(lambda: self._ask(device, call))
                return "left"
            if vanishes:
                return "vanished"
            ending, _ = await self._work(device, given)
        except Refusal:
            return "not needed"
        finally:
            hold.cancel()
        return ending

    def _now(self):
        return time.monotonic() - self._began
