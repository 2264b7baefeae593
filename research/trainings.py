"""Trainings as trials of a study: their measurements in named series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from export.model import Model
from fedcore.report import WEIGHT, ReportLayout, Segment, Weighting, metrics_segment
from research.study import PerSeed, mean
from research.trials import Series
from simulator import datasets
from simulator.configuration import SimulationConfig
from simulator.course import overall
from simulator.errors import Diverged
from simulator.simulation import training_on
from simulator.training import Training

LAST = 3
"""The final accuracy is the mean of the last three measurements: one alone depends on the last cohort."""


def averaged_layout(model: Model, weighting: Weighting) -> ReportLayout:
    """The layout of a report of `fedavg`."""
    segments = (
        Segment("delta", model.schema.size, "mean"),
        Segment(WEIGHT, 1, "sum"),
        Segment(metrics_segment("train"), len(model.metrics), "sum", model.metrics),
    )
    return ReportLayout(segments, weighting)


def train(*, seed: int, clients: int | None = None, **config: Any) -> Series:
    """The series of a simulation; `config` has fields of SimulationConfig. See `measured`.

    clients: over how many a data set without users of its own is partitioned, held-out ones included.
    """
    chosen = SimulationConfig(seed=seed, **config)
    users = datasets.load(chosen.dataset, chosen.data, clients, chosen.partition).split(chosen.held_out, seed)
    return measured(training_on(users, chosen), chosen.rounds, chosen.evaluate_every)


def measured(training: Training, rounds: int, every: int) -> Series:
    """A training's series: `loss` of training in every round; and measurements on unseen users every so many rounds.

    Those are `accuracy` and `test_loss` over all examples; `user_mean`, the mean of users' accuracies; and `low` and
    `median`, their 10th and 50th percentile. Once training has diverged the numbers do not exist.
    """
    names = ("accuracy", "test_loss", "user_mean", "low", "median")
    lengths = {"loss": rounds} | dict.fromkeys(names, rounds // every)
    series: dict[str, list[float | None]] = {name: [] for name in lengths}
    try:
        for number in range(1, rounds + 1):
            metrics = training.run_round(number)
            series["loss"].append(next(value for name, value in metrics.items() if name.endswith(".loss")))
            if number % every == 0:
                users = training.measure(number)
                low, median = np.percentile(users["accuracy"], [10, 50]).tolist()
                measurements = {
                    "accuracy": overall(users["accuracy"], training.test),
                    "test_loss": overall(users["loss"], training.test),
                    "user_mean": float(users["accuracy"].mean()),
                    "low": low,
                    "median": median,
                }
                for name, value in measurements.items():
                    series[name].append(value)
    except Diverged:
        pass
    return {name: values + [None] * (lengths[name] - len(values)) for name, values in series.items()}


def finals(trials: Sequence[Series], name: str = "accuracy") -> PerSeed:
    """The mean of a series' last values, for each seed; None where it diverged."""
    return [mean(trial[name][-LAST:]) for trial in trials]


def last(trials: Sequence[Series], name: str) -> PerSeed:
    """A series' last value, for each seed."""
    return [trial[name][-1] for trial in trials]


def curve(trials: Sequence[Series], every: int, name: str = "accuracy") -> list[tuple[float, PerSeed]]:
    """A series as a curve over rounds: (round, the value for each seed)."""
    values = zip(*(trial[name] for trial in trials), strict=True)
    return [(float(every * number), list(at)) for number, at in enumerate(values, 1)]


def settings_in_words(settings: Mapping[str, object]) -> str:
    """Settings of an algorithm as prose: "`client_lr` 0.3, `epochs` 3"."""
    return ", ".join(f"`{name}` {value}" for name, value in settings.items())
