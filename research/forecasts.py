"""Studies in virtual time: the bias of over-selection, retry windows, and the time to an accuracy.

The slowest fifth of the devices hold two of the ten digits, and nobody else does. Rounds of the twin say whose reports
count, and the engine trains with those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from research.study import (
    BONAWITZ,
    PAPAYA,
    Findings,
    PerSeed,
    Plot,
    Row,
    Series,
    Study,
    Table,
    Trials,
    mean,
    settings_in_words,
)
from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.datasets.bundled import digits
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.course import DAY_S, CommittedRound
from simulator.forecast.training import accuracy_over_time
from simulator.forecast.twin import Twin
from simulator.population import Population
from simulator.simulation import training_on
from simulator.training import ACCURACY, Point, Training

SLOW_DIGITS, EXAMPLES, GOAL, EVERY = (8, 9), 20, 30, 5
FLEET: dict[str, Any] = {
    "devices": 1_000,
    "days": 6,
    "example_s": 2.0,
    "reporting_deadline_s": 7200.0,
    "step_s": 10.0,
}
SELECTIONS: dict[str, dict[str, Any]] = {
    "1.0": {"goal": GOAL, "over_selection": 1.0, "minimum": 20},
    "1.3": {"goal": GOAL, "over_selection": 1.3},
    "1.6": {"goal": GOAL, "over_selection": 1.6},
    "2.0": {"goal": GOAL, "over_selection": 2.0},
    "buffers, 39 at work": {"goal": GOAL, "concurrency": 39},
}
LOCAL = {"client_lr": 0.3, "batch_size": 10, "epochs": 1, "server_lr": 1.0, "weighting": "uniform"}


def users_of(slowest: NDArray[np.bool_], seed: int) -> tuple[Population, Population]:
    """Devices with digits drawn for each, the slowest's among SLOW_DIGITS; and two users who measure: others, slow."""
    chance, (x, y) = np.random.default_rng(seed), (digits().fields[name] for name in ("x", "y"))
    order = chance.permutation(len(y))
    train, test = order[len(y) // 5 :], order[: len(y) // 5]

    def among(rows: NDArray[np.int64], slow: bool) -> NDArray[np.int64]:
        these: NDArray[np.int64] = rows[np.isin(y[rows], SLOW_DIGITS) == slow]
        return these

    held = [chance.choice(among(train, bool(slow)), EXAMPLES) for slow in slowest]
    shards = [{"x": x[rows], "y": y[rows]} for rows in [*held, among(test, False), among(test, True)]]
    names = [f"device {number}" for number in range(len(held))]
    return Population.of(names, shards[:-2], 10), Population.of(["others", "slow"], shards[-2:], 10)


def trained_by_selection(*, seed: int, policy: dict[str, Any], rounds: int) -> Series:
    """A training: the accuracy of `slow` and of `others` every EVERY rounds, the `hours` that they took, the `share` of
    reports that came from the slowest fifth, and how many of that fifth `never` took part, and of all others.
    """
    twin = Twin(ForecastConfig(seed=seed, **FLEET, **policy))
    counted = twin.run().rounds[:rounds]
    slow = twin.devices.slow
    slowest = slow >= np.quantile(slow, 0.8)
    users = users_of(slowest, seed)
    config = SimulationConfig(
        model="logreg",
        algorithm="fedbuff" if "concurrency" in policy else "fedavg",
        settings=LOCAL,
        rounds=rounds,
        evaluate_every=EVERY,
        seed=seed,
    )
    made: list[Training] = []
    measured: list[list[float]] = []

    def make(cohorts: Any) -> Training:
        made.append(training_on(users, config, given=cohorts))
        return made[0]

    def heard(number: int, point: Point) -> None:
        if ACCURACY in point:
            measured.append(made[0].measure(number)["accuracy"].tolist())

    accuracy_over_time(config, counted, heard, make)
    reporters = np.array([device for one in counted for device in one.devices])
    took_part = np.isin(np.arange(len(slow)), reporters)
    others, of_slow = map(list, zip(*measured, strict=True))
    return {
        "others": others,
        "slow": of_slow,
        "hours": [counted[-1].ended / 3600],
        "share": [float(slowest[reporters].mean())],
        "never": [float(1 - took_part[slowest].mean())],
        "others never": [float(1 - took_part[~slowest].mean())],
    }


def _find_bias(trials: Trials) -> Findings:
    rounds = 10 if trials.quick else 100
    names = list(SELECTIONS)[:2] if trials.quick else list(SELECTIONS)
    each = trials.run(trained_by_selection, [{"policy": SELECTIONS[name], "rounds": rounds} for name in names])
    rows: list[Row] = []
    curves: dict[str, list[tuple[float, PerSeed]]] = {}
    for name, found in zip(names, each, strict=True):
        figures = ("hours", "share", "never", "others never", "slow", "others")
        rows.append([name, *([one[figure][-1] for one in found] for figure in figures)])
        values = zip(*(one["slow"] for one in found), strict=True)
        curves[name] = [(float(EVERY * number), list(at)) for number, at in enumerate(values, start=1)]
    columns = ["over-selection", "hours", "reports of slowest", "slowest never", "others never"]
    columns += ["accuracy, slowest", "accuracy, others"]
    setup = (
        f"Data `digits`: {FLEET['devices']:,} devices with {EXAMPLES} examples each, of a random four fifths of "
        "the digits; the slowest fifth of the devices have all the eights and nines, and no others. The other digits "
        f"measure. Model `logreg`; {settings_in_words(LOCAL)}; {rounds} rounds of {GOAL} reports. Devices are "
        "charged on four nights of five for about six hours, and work takes 200 s in the median. A round waits two "
        "hours for its reports; without over-selection 20 are enough then."
    )
    return Findings(
        setup=setup,
        tables=[Table(title=f"After {rounds} rounds", columns=columns, rows=rows)],
        plots=[Plot(title="Digits of the slowest devices", x="round", y="accuracy", curves=curves)],
    )


OVER_SELECTION = Study(
    "over-selection", "What does a model learn of slow devices where rounds do not wait for them?", BONAWITZ, _find_bias
)


# Retry windows: what pacing saves, and what is lost where devices may not stay away for long.


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


def _find_windows(trials: Trials) -> Findings:
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
    "retry-windows", "What does pacing save, and how long must devices be able to stay away?", BONAWITZ, _find_windows
)


# Time to accuracy in virtual time: rounds that wait for their cohort against buffers, at the same concurrency.
#
# The twin of `muster forecast` says whose reports each round counts, and when; the engine trains with them, and an old
# report starts from the model that its device was given.


TARGET, AT_WORK, STEP_H = 0.85, 65, 0.25
POPULATION: dict[str, Any] = {"devices": 3_000, "example_s": 3.0, "reporting_deadline_s": 3600.0, "step_s": 5.0}
POLICIES: dict[str, dict[str, Any]] = {
    "cohorts of 65, the first 50 count": {"goal": 50, "over_selection": 1.3},
    "cohorts of 65, all count": {"goal": 65, "over_selection": 1.0, "minimum": 50},
    "buffers of 50": {"goal": 50, "concurrency": AT_WORK},
    "buffers of 10": {"goal": 10, "concurrency": AT_WORK},
}
SERVER_LRS = (1.0, 3.0, 10.0)
SETTINGS = {"client_lr": 0.3, "batch_size": 10, "epochs": 1}
MOST_ROUNDS = 10_000


def trained_for_hours(*, seed: int, policy: dict[str, Any], server_lr: float, hours: float) -> Series:
    """A training in the rounds of a twin: `accuracy` every quarter of an hour, and when and after how many reports it
    came to the target (`hours`, `reports`); `rounds` an hour, the mean versions that reports were `behind`, and the
    share of work that no round counted (`wasted`).
    """
    course = Twin(ForecastConfig(seed=seed, **POPULATION, **policy)).run(seconds=3600 * hours)
    rounds = course.rounds
    config = SimulationConfig(
        model="logreg",
        dataset="digits",
        algorithm="fedbuff" if "concurrency" in policy else "fedavg",
        settings=SETTINGS | {"server_lr": server_lr, "weighting": "uniform"},
        rounds=MOST_ROUNDS,
        evaluate_every=1,
        seed=seed,
    )
    users = datasets.load(config.dataset, None, None, config.partition).split(config.held_out, seed)
    found = accuracy_over_time(
        config, rounds, lambda number, point: None, lambda cohorts: training_on(users, config, given=cohorts)
    )
    reached = next((number for number, (_, accuracy) in enumerate(found, 1) if accuracy >= TARGET), None)
    return {
        "accuracy": _every(found, hours),
        "hours": [None if reached is None else found[reached - 1][0]],
        "reports": [None if reached is None else float(_reports(rounds[:reached]))],
        "rounds": [len(rounds) / hours],
        "behind": [float(np.mean([behind for one in rounds for behind in one.behind]))],
        "wasted": [course.wasted_s / float(course.spent_s.sum())],
    }


def _every(found: Sequence[tuple[float, float]], hours: float) -> list[float | None]:
    """The last accuracy before each quarter of an hour; None before there was one."""
    ends = [end for end, _ in found]
    last = np.searchsorted(ends, STEP_H * np.arange(1, 1 + int(hours / STEP_H)), side="right") - 1
    return [None if at < 0 else found[at][1] for at in last.tolist()]


def _reports(rounds: Sequence[CommittedRound]) -> int:
    return sum(len(one.devices) for one in rounds)


def _best(by_rate: Sequence[list[Series]]) -> int:
    """Which rate comes to the target first, or to the best accuracy where none does."""

    def rank(trials: list[Series]) -> tuple[float, float]:
        hours, accuracy = mean([one["hours"][0] for one in trials]), mean([one["accuracy"][-1] for one in trials])
        return (float("inf") if hours is None else hours), -(accuracy or 0.0)

    return min(range(len(by_rate)), key=lambda one: rank(by_rate[one]))


def _find_times(trials: Trials) -> Findings:
    hours, rates = (3.0, SERVER_LRS[1:2]) if trials.quick else (8.0, SERVER_LRS)
    names = list(POLICIES)[2:] if trials.quick else list(POLICIES)
    cases = [{"policy": POLICIES[name], "server_lr": rate, "hours": hours} for name in names for rate in rates]
    each = iter(trials.run(trained_for_hours, cases))
    rows: list[Row] = []
    curves: dict[str, list[tuple[float, PerSeed]]] = {}
    for name in names:
        by_rate = [next(each) for _ in rates]
        best = _best(by_rate)
        found = by_rate[best]
        figures = ("hours", "reports", "rounds", "behind", "wasted")
        rows.append([name, f"{rates[best]:g}", *([one[figure][0] for one in found] for figure in figures)])
        values = zip(*(one["accuracy"] for one in found), strict=True)
        curves[name] = [(STEP_H * number, list(at)) for number, at in enumerate(values, start=1) if None not in at]
    columns = ["policy", "server_lr", f"hours to {TARGET}", "reports until then", "rounds an hour", "behind", "wasted"]
    setup = (
        f"Data `digits` over 75 users, 60 of whom train; model `logreg`; {settings_in_words(SETTINGS)}, each policy "
        f"with the best of the server learning rates {', '.join(f'{rate:g}' for rate in rates)}. "
        f"{POPULATION['devices']:,} devices, charged on four nights of five for about six hours, each with the "
        "examples of one user; speed has nothing to do with the data. Work takes "
        f"{100 * POPULATION['example_s']:g} s in the median, and one assignment in twenty is lost. At most "
        f"{AT_WORK} devices work at a time."
    )
    return Findings(
        setup=setup,
        tables=[Table(title="Time to the target", columns=columns, rows=rows)],
        plots=[Plot(title="Accuracy in virtual time", x="hour", y="accuracy, unseen users", curves=curves)],
    )


TIME_TO_ACCURACY = Study(
    "time-to-accuracy", "How much sooner is a training done where no device waits for another?", PAPAYA, _find_times
)
