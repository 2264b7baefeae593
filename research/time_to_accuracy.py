"""Time to accuracy in virtual time: rounds that wait for their cohort against buffers, at the same concurrency.

The twin of `muster forecast` says whose reports each round counts, and when; the engine trains with them, and an old
report starts from the model that its device was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from research.study import PAPAYA, Findings, PerSeed, Plot, Row, Series, Study, Table, Trials, mean, settings_in_words
from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.course import CommittedRound
from simulator.forecast.training import accuracy_over_time
from simulator.forecast.twin import Twin
from simulator.simulation import training_on

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


def trained(*, seed: int, policy: dict[str, Any], server_lr: float, hours: float) -> Series:
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


def _find(trials: Trials) -> Findings:
    hours, rates = (3.0, SERVER_LRS[1:2]) if trials.quick else (8.0, SERVER_LRS)
    names = list(POLICIES)[2:] if trials.quick else list(POLICIES)
    cases = [{"policy": POLICIES[name], "server_lr": rate, "hours": hours} for name in names for rate in rates]
    each = iter(trials.run(trained, cases))
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
    "time-to-accuracy", "How much sooner is a training done where no device waits for another?", PAPAYA, _find
)
