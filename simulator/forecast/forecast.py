"""A forecast: the answers that the course of a twin gives, and the costs of a plan for a device."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedcore.bundle import Bundle
from fedcore.compression import upload_bytes
from fedcore.params import FLOAT_BYTES
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.course import CommittedRound, Course
from simulator.forecast.task_rounds import TaskRounds
from simulator.forecast.twin import Twin, check_fills


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

    rounds: committed; rounds_a_day: by day. fill_s: from the moment when a round could draw to its draw; round_s: from
    the draw to the commit. turned_away: visits by reason. assignments: by how they ended. never_took_part: share of all
    devices; never_by_zone, never_by_speed: the same of those at each time zone, and of each fifth by speed. phone: CPU
    seconds and bytes a day. wasted: share of CPU time that no round counted. accuracy: of users never seen, after
    hours, where rounds trained. done_at_h: when the rounds asked for were committed; None if they were not. paused:
    when and why the task stopped. cpu_s, peak_mb: what this forecast took itself. beside: of further tasks, of which
    visits are those of all tasks.
    """

    devices: int
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
