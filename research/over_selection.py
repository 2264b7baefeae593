"""Over-selection's bias: who is left out of rounds that do not wait, and what the model then knows of their data.

The slowest fifth of the devices hold two of the ten digits, and nobody else does. Rounds of the twin say whose reports
count, and the engine trains with those.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from research.study import BONAWITZ, Findings, PerSeed, Plot, Row, Series, Study, Table, Trials, settings_in_words
from simulator.configuration import SimulationConfig
from simulator.datasets.bundled import digits
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.training import accuracy_over_time
from simulator.forecast.twin import Twin
from simulator.population import Population
from simulator.simulation import training_on
from simulator.training import ACCURACY, Point, Training

SLOW_DIGITS, EXAMPLES, GOAL, EVERY = (8, 9), 20, 30, 5
POPULATION: dict[str, Any] = {
    "devices": 1_000,
    "days": 6,
    "example_s": 2.0,
    "reporting_deadline_s": 7200.0,
    "step_s": 10.0,
}
POLICIES: dict[str, dict[str, Any]] = {
    "1.0": {"goal": GOAL, "over_selection": 1.0, "minimum": 20},
    "1.3": {"goal": GOAL, "over_selection": 1.3},
    "1.6": {"goal": GOAL, "over_selection": 1.6},
    "2.0": {"goal": GOAL, "over_selection": 2.0},
    "buffers, 39 at work": {"goal": GOAL, "concurrency": 39},
}
SETTINGS = {"client_lr": 0.3, "batch_size": 10, "epochs": 1, "server_lr": 1.0, "weighting": "uniform"}


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


def trained(*, seed: int, policy: dict[str, Any], rounds: int) -> Series:
    """A training: the accuracy of `slow` and of `others` every EVERY rounds, the `hours` that they took, the `share` of
    reports that came from the slowest fifth, and how many of that fifth `never` took part, and of all others.
    """
    twin = Twin(ForecastConfig(seed=seed, **POPULATION, **policy))
    counted = twin.run().rounds[:rounds]
    slow = twin.devices.slow
    slowest = slow >= np.quantile(slow, 0.8)
    users = users_of(slowest, seed)
    config = SimulationConfig(
        model="logreg",
        algorithm="fedbuff" if "concurrency" in policy else "fedavg",
        settings=SETTINGS,
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


def _find(trials: Trials) -> Findings:
    rounds = 10 if trials.quick else 100
    names = list(POLICIES)[:2] if trials.quick else list(POLICIES)
    each = trials.run(trained, [{"policy": POLICIES[name], "rounds": rounds} for name in names])
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
        f"Data `digits`: {POPULATION['devices']:,} devices with {EXAMPLES} examples each, of a random four fifths of "
        "the digits; the slowest fifth of the devices have all the eights and nines, and no others. The other digits "
        f"measure. Model `logreg`; {settings_in_words(SETTINGS)}; {rounds} rounds of {GOAL} reports. Devices are "
        "charged on four nights of five for about six hours, and work takes 200 s in the median. A round waits two "
        "hours for its reports; without over-selection 20 are enough then."
    )
    return Findings(
        setup=setup,
        tables=[Table(title=f"After {rounds} rounds", columns=columns, rows=rows)],
        plots=[Plot(title="Digits of the slowest devices", x="round", y="accuracy", curves=curves)],
    )


OVER_SELECTION = Study(
    "over-selection", "What does a model learn of slow devices where rounds do not wait for them?", BONAWITZ, _find
)
