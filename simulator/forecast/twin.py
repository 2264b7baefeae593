"""The twin: a population that comes and goes in virtual time; its check that a round fills, and its answers.

Time moves in steps, of a second by default; within one, work ends at its exact time. Devices that nobody needs cost a
row of an array each time that they come. With `bulk` devices that stand close to each other in the queue get one
window, which counts all of them; without, each gets its own.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.rules import pacing
from fedcore.bundle import Bundle
from fedcore.compression import upload_bytes
from fedcore.params import FLOAT_BYTES
from fedcore.wire.messages import RetryWindow
from simulator.errors import ForecastError
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.course import DAY_S, WAIT_S, CommittedRound, Course, Devices, Drawing, Rows, Times
from simulator.forecast.task_rounds import TaskRounds

CLOSE = 0.02
"""Devices get one window together if the last stands behind the first by at most this share of the queue."""
_CHUNK = 64


class Twin:
    """A population and its tasks. devices: by default those that the configuration's seed draws.

    beside: further tasks of the population, which differ from `config` in no setting of it.
    """

    def __init__(
        self,
        config: ForecastConfig,
        devices: Devices | None = None,
        *,
        beside: Sequence[ForecastConfig] = (),
        bulk: bool = True,
    ) -> None:
        self.devices, self._bulk, self._step_s = devices or Devices.drawn(config), bulk, config.step_s
        self._days_s, self._chance = config.days * DAY_S, np.random.default_rng((config.seed, 1))
        self.course = Course.of(len(self.devices), config.days)
        self._drawing = Drawing(shared=bool(beside))
        self.tasks = [TaskRounds(config, self.devices, self.course, self._drawing, 0)]
        for number, other in enumerate(beside, start=1):
            # The same draws for the same seed: of each device only what the task costs it differs.
            modelled = replace(Devices.drawn(other), stretches=self.devices.stretches)
            self.tasks.append(TaskRounds(other, modelled, self.course.beside(), self._drawing, number))
        self._due = self._chance.uniform(0.0, config.first_within_s, len(self.devices))
        self._pace = pacing.Pace(0.0)
        self._bounds = RetryWindow(config.retry_min_s, max(config.retry_min_s, config.retry_max_s))
        self._returns: dict[int, RetryWindow] = {}
        self._soon: dict[int, Rows] = {}
        self._step = self._chunk_ends = 0

    def run(self, on_hour: Callable[[int], None] = lambda hour: None, seconds: float | None = None) -> Course:
        """Simulate all of the days, or only so many seconds, or until the task is paused.

        on_hour: called with the hours that are over.
        """
        hour, steps = 0, int((self._days_s if seconds is None else seconds) / self._step_s)
        for start in range(0, steps, _CHUNK):
            self._chunk_ends = min(start + _CHUNK, steps)
            soon = np.flatnonzero(self._due < self._chunk_ends * self._step_s)
            self._soon = self._by_step(soon, start)
            for step in range(start, self._chunk_ends):
                self._advance(step)
            if all(task.course.paused for task in self.tasks):
                break
            if (over := int(self._chunk_ends * self._step_s // pacing.HOUR_S)) > hour:
                on_hour(hour := over)
        return self.course

    def _by_step(self, rows: Rows, least: int) -> dict[int, Rows]:
        """These rows by the step in which they are due, which is `least` or later."""
        if not len(rows):
            return {}
        steps = np.maximum((self._due[rows] / self._step_s).astype(np.int64), least)
        order = np.argsort(steps, kind="stable")
        values, first = np.unique(steps[order], return_index=True)
        return dict(zip(values.tolist(), np.split(rows[order], first[1:]), strict=True))

    def _advance(self, step: int) -> None:
        """One step. Everything in it happens at its end, but for work, which ends when it ends."""
        now, drawing = (step + 1) * self._step_s, self._drawing
        self._step = step
        rows = self._soon.pop(step, None)
        if rows is not None:
            self._arrive(rows, now)
        for task in self.tasks:
            task.advance(now)
        if drawing.drawn:
            self._pace = pacing.drawn(pacing.observe(self._pace, float(drawing.drawn), now, self._demand(now)))
            drawing.drawn = 0
        if drawing.free:
            self._come_back(drawing.free, now)
            drawing.free.clear()
        if drawing.turned_away:
            self._send_away(np.array(drawing.turned_away, np.int64), now, "not-selected")
            drawing.turned_away.clear()
        late = []
        for row, until in drawing.waiting.items():
            if until > now:
                break
            late.append(row)
        for row in late:
            del drawing.waiting[row]
        if late:
            self._send_away(np.array(late, np.int64), now, "not-selected")

    def _arrive(self, rows: Rows, now: float) -> None:
        until = self.devices.stretches.can_until(rows, now)
        away = rows[until == 0.0]
        if len(away):
            self._come(away, self.devices.stretches.next_stretch(away, now))
        rows = rows[until > 0.0]
        if not len(rows):
            return
        self.course.check_ins.add(len(rows), now)
        self._due[rows] = np.inf
        fits = np.any([task.devices.obstacle[rows] == 0 for task in self.tasks], axis=0)
        unfit, obstacle = rows[~fits], self.devices.obstacle[rows[~fits]]
        for index in np.unique(obstacle):
            self._send_idle(unfit[obstacle == index], now, self.devices.obstacles[index])
        usual = self._usual(now)
        for row in rows[fits].tolist():
            fitting = [task for task in self.tasks if not task.devices.obstacle[row]]
            offered = [task for task in fitting if not task.is_resting(row, now)]
            if offered:
                self._drawing.waiting[row] = now + WAIT_S
                self._returns[row] = pacing.after(
                    usual, min(task.settings.min_separation_s for task in offered), self._bounds
                )
            else:
                self._rest(row, min(task.remaining(row, now) for task in fitting), now)

    def _demand(self, now: float) -> pacing.Demand | None:
        return pacing.together([task.demand(now) for task in self.tasks if not task.course.paused])

    # --- windows

    def _send_away(self, rows: Rows, now: float, why: str) -> None:
        demand = self._demand(now)
        for row in rows.tolist():
            del self._returns[row]
        while len(rows):
            count = min(self._together(demand), len(rows))
            self._pace = pacing.observe(self._pace, float(count), now, demand)
            self._pace, when = pacing.window(self._pace, demand, self._bounds, float(count))
            self._sent(rows[:count], when, now, why)
            rows = rows[count:]

    def _together(self, demand: pacing.Demand | None) -> int:
        """How many of the devices that come next may get one window: all for a place, or close in the queue."""
        if demand is None:
            return 1
        free = demand.places - self._pace.booked
        many = free if free >= 1 else 1.0 if free > 0 and not self._pace.queued else CLOSE * self._pace.queued
        return max(1, int(many)) if self._bulk else 1

    def _send_idle(self, rows: Rows, now: float, why: str) -> None:
        demand = self._demand(now)
        while len(rows):
            many = (
                max(pacing.IDLE_S * pacing.IDLE_PER_S - self._pace.idle, CLOSE * self._pace.idle, 1.0)
                if self._bulk
                else 1.0
            )
            count = min(int(many), len(rows))
            self._pace = pacing.observe(self._pace, float(count), now, demand)
            self._pace, when = pacing.idle_window(self._pace, self._bounds, float(count))
            self._sent(rows[:count], when, now, why)
            rows = rows[count:]

    def _rest(self, row: int, remaining: tuple[float, int], now: float) -> None:
        seconds, rounds = remaining
        demand = self._demand(now)
        rest_s = max(seconds, rounds * demand.every_s if demand else 0.0)
        self._sent(np.array([row]), pacing.after(self._usual(now, 1.0), rest_s, self._bounds), now, "resting")

    def _usual(self, now: float, devices: float = 0.0) -> RetryWindow:
        """The window of a device that comes now, for when its work or its rest is over. It takes no place."""
        demand = self._demand(now)
        self._pace = pacing.observe(self._pace, devices, now, demand)
        return pacing.window(self._pace, demand, self._bounds)[1]

    def _come_back(self, rows: list[int], now: float) -> None:
        """Devices whose work is over come back when they were told at the beginning of their session."""
        windows = [self._returns.pop(row) for row in rows]
        first, last = np.array([(one.min_s, one.max_s) for one in windows]).T
        self._come(np.array(rows, np.int64), now + self._chance.uniform(first, last))

    def _sent(self, rows: Rows, when: RetryWindow, now: float, why: str) -> None:
        self.course.sent_away(rows, when, why)
        self._come(rows, self._within(when, len(rows), now))

    def _within(self, when: RetryWindow, count: int, now: float) -> Times:
        return now + self._chance.uniform(when.min_s, when.max_s, count)

    def _come(self, rows: Rows, at: Times) -> None:
        """Make devices due; those of this chunk of time are put into it."""
        self._due[rows] = at
        early = rows[at < self._chunk_ends * self._step_s]
        for step, more in self._by_step(early, self._step + 1).items():
            had = self._soon.get(step)
            self._soon[step] = more if had is None else np.concatenate((had, more))


_SETTINGS = {"examples": "min_examples", "conditions": "needs_unmetered", "labels": "where"}
_LOOKED_AT = 100_000
_LUCK = 4.0
"""A round that needs this many standard deviations more than it can expect does not come about."""


def check_fills(config: ForecastConfig, devices: Devices) -> None:
    """Raise ForecastError, naming the setting that leaves too few devices, where no round could come to its minimum."""
    policy = config.task.policy
    least = 1 if policy.buffered else policy.minimum
    left = np.ones(len(devices), np.bool_)
    if len(devices) < least:
        raise _starved(config, "devices", len(devices), least)
    for index, obstacle in enumerate(devices.obstacles[1:], start=1):
        left &= devices.obstacle != index
        if left.sum() < least:
            untold = f" ({devices.untold:,} tell no labels)" if obstacle == "labels" else ""
            raise _starved(config, _SETTINGS[obstacle], int(left.sum()), least, untold)
    left &= devices.work_s < policy.reporting_deadline_s
    if left.sum() < least:
        work_s = float(np.median(devices.work_s))
        raise _starved(
            config, "reporting_deadline_s", int(left.sum()), least, f"; work takes {work_s:,.0f} s in the median"
        )
    stretches = "charging_s" if config.trace is None else "trace"
    left &= devices.work_s < devices.stretches.longest_s()
    if left.sum() < least:
        raise _starved(config, stretches, int(left.sum()), least, ", the others leave before their work is done")
    if (there := _at_best(devices, left)) < least:
        raise _starved(config, stretches, there, least, ", at the best hour of a day")
    waiting = there * WAIT_S / (WAIT_S + config.retry_min_s)
    if waiting + _LUCK * math.sqrt(waiting) < least:
        words = f", who wait at the same time, for {WAIT_S:g} s, at the best hour of a day"
        raise _starved(config, "retry_min_s", int(waiting), least, words)
    _check_luck(config)


def _check_luck(config: ForecastConfig) -> None:
    """Refuse rounds that lose so many devices that even their replacements do not bring them to the minimum."""
    policy, lost = config.task.policy, config.drop_out
    if policy.buffered and lost < 1:
        return
    drawn = policy.cohort * (1 + lost)
    most = drawn * (1 - lost) + _LUCK * math.sqrt(drawn * lost * (1 - lost))
    if most < policy.minimum:
        words = (
            f"{most:.0f} reports of a round of {policy.cohort} devices at best, and it counts from {policy.minimum} on"
        )
        raise ForecastError(f"no round can fill: drop_out={lost:g} leaves {words}; lower it or minimum, or draw more")


def _at_best(devices: Devices, left: NDArray[np.bool_]) -> int:
    """How many of the devices that are left can come at once, at the best hour of the second day."""
    rows = np.flatnonzero(left)
    some = rows[:: max(1, len(rows) // _LOOKED_AT)]
    hours = DAY_S + 3600.0 * np.arange(24)
    most = max(int(np.count_nonzero(devices.stretches.can_until(some, hour))) for hour in hours)
    return most * len(rows) // len(some)


def _starved(config: ForecastConfig, name: str, left: int, least: int, more: str = "") -> ForecastError:
    return ForecastError(
        f"no round can fill: {name}={getattr(config, name)} leaves {left:,} of {config.devices:,} devices{more}, and a "
        f"round counts from {least:,} on; change it or goal"
    )


# A forecast: the answers that the course of a twin gives, and the costs of a plan for a device.


def costs_of(bundle: Bundle) -> dict[str, Any]:
    """The settings of a forecast that a bundle gives, for the format whose steps take longest.

    A step's time is that of the machine which exported the plan. Graphs and frozen vectors are kept between rounds, so
    a device downloads the checkpoint alone. Of a plan of two trips each setting is that of the dearer one. Raises
    PlanError.
    """
    trips = bundle.plan.trips
    step_s = max(evidence.footprint.step_cpu_ms for evidence in bundle.certificate.formats.values()) / 1000
    return {
        "example_s": step_s * max(sum(one.loop.epochs / one.loop.batch_size for one in trip.passes) for trip in trips),
        "bytes_down": FLOAT_BYTES * max(sum(vector.size for vector in trip.broadcast) for trip in trips),
        "bytes_up": max(upload_bytes(trip.report) for trip in trips),
    }


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of a figure."""

    p5: float
    p50: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """Those of these values; None without any."""
        return cls(*(round(float(value), 3) for value in np.percentile(values, (5, 50, 95)))) if values else None


class Phone(msgspec.Struct, frozen=True):
    """What a phone spends in a day: the mean one, and the one that spends more than 99 of 100 others."""

    cpu_s: float
    cpu_s_p99: float
    bytes: float
    bytes_p99: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What will happen. Times are in virtual time from the start.

    matching, untold: devices that match the target, and that tell no labels; None without a target.
    rounds: committed; rounds_a_day: by day. fill_s: from the moment when a round could draw to its draw; round_s: from
    the draw to the commit. turned_away: visits by reason. assignments: by how they ended. never_took_part: share of all
    devices; never_by_zone, never_by_speed: the same of those at each time zone, and of each fifth by speed. phone: CPU
    seconds and bytes a day. wasted: share of CPU time that no round counted. accuracy: of users never seen, after
    hours, where rounds trained. done_at_h: when the rounds asked for were committed; None if they were not. paused:
    when and why the task stopped. cpu_s, peak_mb: what this forecast took itself. beside: of further tasks, of which
    visits are those of all tasks.
    """

    devices: int
    matching: int | None
    untold: int | None
    days: int
    rounds: int
    rounds_a_day: list[int]
    rounds_by_hour: list[int]
    done_at_h: float | None
    fill_s: Percentiles | None
    round_s: Percentiles | None
    abandoned: dict[str, int]
    check_ins: int
    check_ins_per_s_at_peak: int
    check_ins_by_hour: list[int]
    turned_away: dict[str, int]
    reports: int
    reports_per_s_at_peak: int
    assignments: dict[str, int]
    never_took_part: float
    never_by_zone: dict[str, float]
    never_by_speed: dict[str, float]
    phone: Phone
    wasted: float
    accuracy: list[tuple[float, float]] = []
    paused: str
    cpu_s: float
    peak_mb: float
    beside: list[Forecast] = []


def forecast(
    config: ForecastConfig,
    on_hour: Callable[[int], None] = lambda hour: None,
    train: Callable[[Sequence[CommittedRound]], list[tuple[float, float]]] = lambda rounds: [],
    beside: Sequence[ForecastConfig] = (),
) -> Forecast:
    """Run the twin of a configuration. Raises ForecastError.

    on_hour: called with the virtual hours that are over. train: gives the accuracy that such rounds come to, by hours.
    beside: further tasks of the population (`ForecastConfig.beside`), which do not train.
    """
    started = time.process_time()
    twin, configs = Twin(config, beside=beside), (config, *beside)
    for one, task in zip(configs, twin.tasks, strict=True):
        check_fills(one, task.devices)
    twin.run(on_hour)
    found, *others = [_answers(one, task, started) for one, task in zip(configs, twin.tasks, strict=True)]
    return msgspec.structs.replace(found, accuracy=train(twin.course.rounds), beside=others)


def _answers(config: ForecastConfig, task: TaskRounds, started: float) -> Forecast:
    course, days = task.course, config.days
    rounds, never, cpu_s = course.rounds, course.took_part == 0, float(course.spent_s.sum())
    hours = np.array([one.ended // 3600 for one in rounds], np.int64)
    by_hour, zone = np.bincount(hours, minlength=24 * days), task.devices.zone
    zones = np.unique(zone).tolist() if config.trace is None else []
    return Forecast(
        devices=config.devices,
        matching=task.devices.matching if config.where else None,
        untold=task.devices.untold if config.where else None,
        days=days,
        rounds=len(rounds),
        rounds_a_day=by_hour.reshape(days, 24).sum(axis=1).tolist(),
        rounds_by_hour=by_hour.tolist(),
        done_at_h=round(rounds[config.rounds - 1].ended / 3600, 2) if len(rounds) >= config.rounds else None,
        fill_s=Percentiles.of([one.drawn - one.opened for one in rounds]),
        round_s=Percentiles.of([one.ended - one.drawn for one in rounds]),
        abandoned=dict(course.abandoned),
        check_ins=int(course.check_ins.by_hour.sum()),
        check_ins_per_s_at_peak=course.check_ins.peak_per_s,
        check_ins_by_hour=course.check_ins.by_hour.tolist(),
        turned_away=dict(course.turned_away),
        reports=int(course.took_part.sum()),
        reports_per_s_at_peak=course.reports.peak_per_s,
        assignments=dict(course.ended),
        never_took_part=_share(never),
        never_by_zone={f"UTC{at if at <= 12 else at - 24:+d}": _share(never[zone == at]) for at in zones},
        never_by_speed=_by_speed(never, task.devices.slow),
        phone=_phone(course, days),
        wasted=round(course.wasted_s / cpu_s, 4) if cpu_s else 0.0,
        paused="" if course.paused is None else f"after {course.paused[0] / 3600:.1f} h: {course.paused[1]}",
        cpu_s=round(time.process_time() - started, 2),
        peak_mb=round(_peak_mb(), 1),
    )


def _share(never: NDArray[np.bool_]) -> float:
    return round(float(np.mean(never)), 4)


def _by_speed(never: NDArray[np.bool_], slow: NDArray[np.float32]) -> dict[str, float]:
    names = ("fastest", "fast", "middle", "slow", "slowest")
    parts = np.array_split(np.argsort(slow, kind="stable"), len(names))
    return {name: _share(never[part]) for name, part in zip(names, parts, strict=True) if len(part)}


def _phone(course: Course, days: int) -> Phone:
    spent = [figure for each in (course.spent_s, course.moved) for figure in (np.mean(each), np.percentile(each, 99))]
    return Phone(*(round(float(figure / days), 3) for figure in spent))


def _peak_mb() -> float:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
