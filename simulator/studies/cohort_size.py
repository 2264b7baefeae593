"""Larger cohorts: rounds, examples and time until a target accuracy, and whom they serve.

Charles et al. 2021, section 3: fewer rounds, but ever less so; more examples; and rounds that wait longer for the
slowest user. A user of n examples takes n (1 + Z) units of time, with Z exponential of mean 1: the shifted exponential
distribution of Lee et al., "Speeding up distributed machine learning using codes", 2018.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simulator.studies.papers import CHARLES
from simulator.studies.study import Findings, PerSeed, Plot, Row, Study, Table
from simulator.studies.trainings import curve, digit_images, finals, rounds_to, settings_in_words, train
from simulator.studies.trials import Trials

COHORTS, EXAMPLES, TARGET = (5, 10, 20, 40, 80), 40, 0.85
WAYS: dict[str, dict[str, Any]] = {
    "fedavg": {"client_lr": 0.5, "epochs": 2, "batch_size": 20},
    "fedadam": {"client_lr": 0.1, "server_lr": 0.03, "epochs": 2, "batch_size": 20},
}


def _find(trials: Trials) -> Findings:
    rounds, every, cohorts = (4, 2, COHORTS[:2]) if trials.quick else (40, 2, COHORTS)
    data, words = digit_images(trials)
    common = data | {"rounds": rounds, "evaluate_every": every}
    cases = [
        common | {"algorithm": name, "settings": settings, "cohort": cohort}
        for name, settings in WAYS.items()
        for cohort in cohorts
    ]
    trained = iter(trials.run(train, cases))
    tables, plots = [], []
    for name, settings in WAYS.items():
        by_cohort = {cohort: next(trained) for cohort in cohorts}
        rows: list[Row] = []
        for cohort, way in by_cohort.items():
            needed = rounds_to(way, TARGET, every)
            examples: PerSeed = [None if count is None else count * cohort * EXAMPLES for count in needed]
            times = [time_of(count, cohort, seed) for count, seed in zip(needed, trials.seeds, strict=True)]
            rows.append([str(cohort), needed, examples, times, finals(way), finals(way, "low"), finals(way, "median")])
        tables.append(
            Table(
                title=f"`{name}` with {settings_in_words(settings)}",
                columns=[
                    "cohort",
                    f"rounds to accuracy {TARGET}",
                    "examples to it",
                    "time to it",
                    f"accuracy after {rounds} rounds",
                    "of the 10th percentile of users",
                    "of the median user",
                ],
                rows=rows,
            )
        )
        curves = {f"cohort {cohort}": curve(way, every) for cohort, way in by_cohort.items()}
        plots.append(Plot(title=f"{name} by cohort", x="round", y="accuracy, unseen users", curves=curves))
    setup = f"{words}; {rounds} rounds. Time is in units of the shortest time in which a user trains on one example."
    return Findings(setup=setup, tables=tables, plots=plots)


def time_of(rounds: float | None, cohort: int, seed: int) -> float | None:
    """The time of so many rounds, each as long as its slowest user, in units of the module's docstring."""
    if rounds is None:
        return None
    drawn = np.random.Generator(np.random.Philox(key=[seed, cohort])).exponential(size=(int(rounds), cohort))
    return float((EXAMPLES * (1 + drawn.max(axis=1))).sum())


COHORT_SIZE = Study(
    "cohort-size", "What do larger cohorts gain in rounds, and what do they cost in examples and time?", CHARLES, _find
)
