"""Local steps against the size of the cohort: which should grow, when users train on more examples in a round?

Charles et al. 2021 vary both.
"""

from __future__ import annotations

import functools

from simulator.studies.papers import CHARLES
from simulator.studies.study import Findings, Grid, Study
from simulator.studies.trainings import digit_images, finals, rounds_to, settings_in_words, train
from simulator.studies.trials import Trials

COHORTS, EPOCHS, TARGET = (5, 20, 80), (1, 2, 4, 8), 0.85
SETTINGS = {"client_lr": 0.2, "batch_size": 20}


def _find(trials: Trials) -> Findings:
    rounds, every = (4, 2) if trials.quick else (30, 2)
    cohorts, epochs = (COHORTS[:2], EPOCHS[:2]) if trials.quick else (COHORTS, EPOCHS)
    data, words = digit_images(trials)
    common = data | {"rounds": rounds, "evaluate_every": every}
    cases = [
        common | {"cohort": cohort, "settings": SETTINGS | {"epochs": sweeps}}
        for sweeps in epochs
        for cohort in cohorts
    ]
    trained = iter(trials.run(train, cases))
    by_cell = [[next(trained) for _ in cohorts] for _ in epochs]
    grid = functools.partial(Grid, row_name="epochs", rows=epochs, column_name="cohort", columns=cohorts)
    accuracies = [[finals(way) for way in row] for row in by_cell]
    needed = [[rounds_to(way, TARGET, every) for way in row] for row in by_cell]
    return Findings(
        setup=f"{words}; `fedavg` with {settings_in_words(SETTINGS)}; {rounds} rounds. An epoch has two steps.",
        grids=[
            grid(title=f"Accuracy after {rounds} rounds", values=accuracies),
            grid(title=f"Rounds to accuracy {TARGET}", values=needed),
        ],
    )


LOCAL_STEPS = Study("local-steps", "Are more local steps as good as a larger cohort?", CHARLES, _find)
