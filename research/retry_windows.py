"""Retry windows: what pacing saves, and what is lost where devices may not stay away for long."""

from __future__ import annotations

from typing import Any

import numpy as np

from research.study import BONAWITZ, Findings, PerSeed, Plot, Row, Series, Study, Table, Trials
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.devices import DAY_S
from simulator.forecast.twin import Twin

SIZES = (1_000, 10_000)
WINDOWS: dict[str, tuple[float, float]] = {
    "1 minute, fixed": (60.0, 60.0),
    "10 minutes, fixed": (600.0, 600.0),
    "1 hour, fixed": (3600.0, 3600.0),
    "paced, at most 10 minutes": (5.0, 600.0),
    "paced, at most 1 hour": (5.0, 3600.0),
    "paced, at most a day": (5.0, 86_400.0),
}
"""The least and the longest window; where they are equal, pacing has no say."""
TASK: dict[str, Any] = {"goal": 50, "example_s": 0.5, "reporting_deadline_s": 600.0, "days": 2, "step_s": 5.0}


def told(*, seed: int, devices: int, window: tuple[float, float]) -> Series:
    """The second of two days: `rounds`, visits of a device (`visits`), the share of visits `in vain`, those of the
    busiest second (`peak`), how long rounds waited for devices in the middle and at the 95th percentile (`fill`,
    `long fill`), and visits `by hour`.
    """
    least, longest = window
    # The twin alone: a forecast refuses windows with which devices of a small population never meet.
    course = Twin(ForecastConfig(seed=seed, devices=devices, retry_min_s=least, retry_max_s=longest, **TASK)).run()
    by_hour = course.check_ins.by_hour
    second = [one for one in course.rounds if one.ended >= DAY_S]
    fills = [one.drawn - one.opened for one in second]
    return {
        "rounds": [float(len(second))],
        "visits": [float(by_hour[24:].sum()) / devices],
        "in vain": [1 - course.assigned / float(by_hour.sum())],
        "peak": [float(course.check_ins.peak_per_s)],
        "fill": [float(np.median(fills)) if fills else None],
        "long fill": [float(np.percentile(fills, 95)) if fills else None],
        "by hour": (by_hour[24:] / devices).tolist(),
    }


def _find(trials: Trials) -> Findings:
    sizes = SIZES[:1] if trials.quick else SIZES
    windows = list(WINDOWS)[-1:] if trials.quick else list(WINDOWS)
    cases = [{"devices": size, "window": WINDOWS[name]} for size in sizes for name in windows]
    each = iter(trials.run(told, cases))
    tables, plots = [], []
    columns = [
        "window",
        "rounds",
        "visits of a device",
        "in vain",
        "visits in the busiest second",
        "fill, s",
        "fill p95, s",
    ]
    for size in sizes:
        rows: list[Row] = []
        curves: dict[str, list[tuple[float, PerSeed]]] = {}
        for name in windows:
            found = next(each)
            figures = ("rounds", "visits", "in vain", "peak", "fill", "long fill")
            rows.append([name, *([one[figure][0] for one in found] for figure in figures)])
            values = zip(*(one["by hour"] for one in found), strict=True)
            curves[name] = [(float(hour), list(at)) for hour, at in enumerate(values)]
        title = f"{size:,} devices"
        tables.append(Table(title=title, columns=columns, rows=rows))
        plots.append(Plot(title=title, x="hour, UTC", y="visits of a device in an hour", curves=curves, log_y=True))
    setup = (
        f"Rounds of {TASK['goal']} reports, 1.3 times as many devices drawn, whose work takes "
        f"{100 * TASK['example_s']:g} s in the median. Devices are charged on four nights of five for about six "
        "hours, in 24 time zones, and all look in within the first hour. They wait 30 s. The second of two days "
        "counts; in vain is of both, as is the busiest second."
    )
    return Findings(setup=setup, tables=tables, plots=plots)


RETRY_WINDOWS = Study(
    "retry-windows", "What does pacing save, and how long must devices be able to stay away?", BONAWITZ, _find
)
