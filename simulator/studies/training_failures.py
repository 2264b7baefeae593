"""Sudden failures of training in large cohorts, and clipping against them.

Charles et al. 2021, section 3.1: the accuracy falls within a round to that of a guess; a few users with long deltas do
it, which clipping bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from simulator.studies.papers import CHARLES
from simulator.studies.study import Findings, PerSeed, Plot, Row, Study, Table
from simulator.studies.trainings import curve, digit_images, finals, settings_in_words, train
from simulator.studies.trials import Series, Trials

COHORTS, RATES = (10, 40), (0.5, 1.0, 2.0)
LEARNT, FALL = 0.5, 0.1
"""The accuracy from which a fall counts, five times that of a guess; and the least fall."""
LOCAL = {"epochs": 2, "batch_size": 20}
WAYS: dict[str, dict[str, Any]] = {
    "no clipping": {"weighting": "uniform"},
    "fixed clipping": {"weighting": "uniform", "clip_norm": 1.0},
    "adaptive clipping": {"weighting": "uniform", "clip_norm": 1.0, "clip_quantile": 0.8},
}


def _find(trials: Trials) -> Findings:
    rounds, cohorts, rates = (3, COHORTS[:1], RATES[:1]) if trials.quick else (30, COHORTS, RATES)
    data, words = digit_images(trials)
    cells = [(name, rate, cohort) for rate in rates for cohort in cohorts for name in WAYS]
    trained = trials.run(
        train,
        [
            data
            | {"settings": WAYS[name] | LOCAL | {"client_lr": rate}}
            | {"rounds": rounds, "evaluate_every": 1, "cohort": cohort}
            for name, rate, cohort in cells
        ],
    )
    by_cell = dict(zip(cells, trained, strict=True))
    rows: list[Row] = [
        [f"{rate:g}", str(cohort), name, falls(way), finals(way)] for (name, rate, cohort), way in by_cell.items()
    ]
    table = Table(
        title=f"Falls of the accuracy by more than {100 * FALL:.0f} points in a round, from {LEARNT:g} or more",
        columns=["client_lr", "cohort", "clipping", "falls", f"accuracy after {rounds} rounds"],
        rows=rows,
    )
    plots = [
        Plot(
            title=f"Cohort {cohorts[-1]}, client_lr {rate:g}",
            x="round",
            y="accuracy, unseen users",
            curves={name: curve(by_cell[name, rate, cohorts[-1]], 1) for name in WAYS},
        )
        for rate in rates[-2:]
    ]
    ways = "; ".join(f"{name}: {settings_in_words(settings)}" for name, settings in WAYS.items())
    setup = f"{words}; `fedavg`, {rounds} rounds; {settings_in_words(LOCAL)}. {ways}."
    return Findings(setup=setup, tables=[table], plots=plots)


def falls(way: Sequence[Series]) -> PerSeed:
    """In how many rounds the accuracy fell by more than FALL from LEARNT or more, for each seed.

    Divergence from there is a fall too. What has not learnt cannot fall: around a guess the accuracy jumps by chance.
    """
    numbers = [[0.0 if value is None else value for value in trial["accuracy"]] for trial in way]
    return [
        float(sum(before >= LEARNT and before - after > FALL for before, after in pairwise(series)))
        for series in numbers
    ]


TRAINING_FAILURES = Study(
    "training-failures", "Does training fail suddenly in large cohorts, and does clipping prevent it?", CHARLES, _find
)
