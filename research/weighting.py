"""Weights of users in the mean: by their examples, or all alike.

Wang et al. 2021, section 3: by examples the loss over all examples is minimised, alike that over users. Those who train
measure too, on examples that they hold out: the weights decide whose loss counts.
"""

from __future__ import annotations

from typing import Any

from research import study
from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.datasets.synthetic import synthetic
from simulator.simulation import training_on

LOCAL = {
    "synthetic": {"client_lr": 0.03, "epochs": 1, "batch_size": 50},
    "wisdm": {"client_lr": 0.1, "epochs": 1, "batch_size": 40},
}
WEIGHTINGS = ("examples", "uniform")
COHORT = 10


def train_weighted(*, seed: int, **config: Any) -> study.Series:
    """The series of a simulation whose users measure on some of their own examples, which they do not train on.

    dataset: "synthetic" for 60 users of synthetic(1, 1), or a data set by name.
    """
    chosen = SimulationConfig(seed=seed, **config)
    users = synthetic(60, seed=seed) if chosen.dataset == "synthetic" else datasets.load(chosen.dataset, chosen.data)
    split = users.split_examples(chosen.held_out, seed)
    return study.measured(training_on(split, chosen), chosen.rounds, chosen.evaluate_every)


def _find(trials: study.Trials) -> study.Findings:
    rounds, every = (2, 1) if trials.quick else (30, 2)
    tables, plots, setups = [], [], []
    for dataset, settings in LOCAL.items():
        if dataset == "wisdm" and trials.quick:
            continue
        common = {"dataset": dataset, "data": trials.data, "model": "logreg", "rounds": rounds, "evaluate_every": every}
        cases = [
            common | {"cohort": COHORT, "settings": settings | {"weighting": weighting}} for weighting in WEIGHTINGS
        ]
        trained = dict(zip(WEIGHTINGS, trials.run(train_weighted, cases), strict=True))
        rows: list[study.Row] = [
            [name, *(study.finals(way, measure) for measure in ("accuracy", "user_mean", "low"))]
            for name, way in trained.items()
        ]
        columns = ["weighting", "accuracy over examples", "mean over users", "10th percentile of users"]
        tables.append(study.Table(title=f"Data {dataset}, after {rounds} rounds", columns=columns, rows=rows))
        curves = {name: study.curve(way, every, "user_mean") for name, way in trained.items()}
        plots.append(study.Plot(title=f"Data {dataset}", x="round", y="accuracy, mean over users", curves=curves))
        setups.append(f"`{dataset}`: {study.settings_in_words(settings)}.")
    setup = (
        f"`fedavg` on model `logreg`, cohorts of {COHORT}; users hold out a fifth of their examples. {' '.join(setups)}"
    )
    return study.Findings(setup=setup, tables=tables, plots=plots)


WEIGHTING = study.Study("weighting", "Should users weigh by their examples, or all alike?", study.FIELD_GUIDE, _find)
