"""A forecast: the answers that the course of a twin gives."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.course import Course
from simulator.forecast.starved import check_fills
from simulator.forecast.stretches import DAY_S
from simulator.forecast.twin import Twin


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of a figure."""

    p5: float
    p50: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        """Those of these values; None without any."""
        return cls(*(round(float(value), 3) for value in np.percentile(values, (5, 50, 95)))) if values else None


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What will happen. Times are in virtual time from the start.

    rounds: committed; rounds_a_day: by day. fill_s: from the moment when a round could draw to its draw; round_s: from
    the draw to the commit. turned_away: visits by reason. assignments: by how they ended. never_took_part: share of all
    devices. cpu_s_a_day, bytes_a_day: of the mean device. wasted: share of CPU time that no round counted. done_at_h:
    when the rounds asked for were committed; None if they were not. paused: when and why the task stopped. cpu_s,
    peak_mb: what this forecast took itself.
    """

    devices: int
    days: int
    rounds: int
    rounds_a_day: list[int]
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
    cpu_s_a_day: float
    bytes_a_day: float
    wasted: float
    paused: str
    cpu_s: float
    peak_mb: float


def forecast(config: ForecastConfig, on_hour: Callable[[int], None] = lambda hour: None) -> Forecast:
    """Run the twin of a configuration; calls `on_hour` with the virtual hours that are over. Raises ForecastError."""
    started = time.process_time()
    twin = Twin(config)
    check_fills(config, twin.devices)
    course = twin.run(on_hour)
    return _answers(config, course, time.process_time() - started)


def _answers(config: ForecastConfig, course: Course, cpu_s: float) -> Forecast:
    rounds, days = course.rounds, config.days
    by_day = np.bincount([int(one.ended // DAY_S) for one in rounds], minlength=days)[:days] if rounds else [0] * days
    device_days = config.devices * days
    return Forecast(
        devices=config.devices,
        days=days,
        rounds=len(rounds),
        rounds_a_day=[int(count) for count in by_day],
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
        never_took_part=round(float(np.mean(course.took_part == 0)), 4),
        cpu_s_a_day=round(course.cpu_s / device_days, 3),
        bytes_a_day=round((course.bytes_down + course.bytes_up) / device_days),
        wasted=round(course.wasted_s / course.cpu_s, 4) if course.cpu_s else 0.0,
        paused="" if course.paused is None else f"after {course.paused[0] / 3600:.1f} h: {course.paused[1]}",
        cpu_s=round(cpu_s, 2),
        peak_mb=round(_peak_mb(), 1),
    )


def _peak_mb() -> float:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
