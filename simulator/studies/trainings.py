"""Trainings as trials of a study: their measurements in named series."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from export.model import Model
from export.models import load as load_model
from export.normalising import Normaliser
from fedcore.algorithms import create, module_of
from fedcore.codecs.compression import Compression
from fedcore.report import WEIGHT, ReportLayout, Segment, Weighting, metrics_segment
from simulator import datasets
from simulator.cohorts import Cohorts
from simulator.configuration import SimulationConfig
from simulator.course import overall
from simulator.engines.choice import Choice
from simulator.engines.computing import Computing
from simulator.errors import Diverged
from simulator.fine_tuning import FineTuning
from simulator.population import Population
from simulator.private_training import PrivateSums
from simulator.studies.study import PerSeed, mean
from simulator.studies.trials import Series, Trials
from simulator.sums_of_rounds import sums_of
from simulator.texts import with_tokens
from simulator.training import EngineTraining, Training

TOGETHER = 64
"""Clients that are vectorised together: the networks of studies are small, so many at once cost less time."""
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


def training_on(
    users: tuple[Population, Population],
    config: SimulationConfig,
    private: PrivateSums | None = None,
    normaliser: Normaliser | None = None,
    given: Sequence[Sequence[int]] = (),
) -> Training:
    """The federated training of a configuration on users of the caller's: those who train, and those who measure.

    private: the noise on sums, instead of what the configuration asks for. normaliser: of an input, before the model.
    given: who trains in each round, in place of cohorts that are drawn.
    """
    spec = load_model(config.model, users[0].shape, users[0].classes)
    spec = spec if normaliser is None else normaliser.before(spec)
    users = with_tokens(users[0], spec), with_tokens(users[1], spec)
    model = Model(spec.with_local(config.local), config.seed)
    algorithm = create(config.algorithm, config.settings, [module_of(config.algorithm)])
    privacy = config.privacy
    cohorts = Cohorts(
        config.cohort, config.schedule, config.same_cohort, privacy.min_separation_rounds, privacy.poisson, given
    )
    sums, masked = sums_of(config, model, algorithm, cohorts, len(users[0]))
    choice = Choice(Computing(at_once=TOGETHER), "a study's")
    compression = Compression.parse(config.compress)
    return EngineTraining(
        model,
        algorithm,
        users,
        cohorts=cohorts,
        choice=choice,
        seed=config.seed,
        compression=compression,
        private=private or sums,
        masked=masked,
        fine_tuning=FineTuning.of(algorithm, config.fine_tune) if config.fine_tune else None,
    )


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


def digit_images(trials: Trials) -> tuple[dict[str, Any], str]:
    """MNIST's digits over 250 users, 200 of them for training, as arguments of `train`; and in words.

    In quick studies the bundled digits over 40 users.
    """
    if trials.quick:
        return {"dataset": "digits", "clients": 40, "model": "logreg"}, "Data `digits` over 40 users, model `logreg`"
    words = "Data `mnist_10k` over 250 users with 40 examples each, of whom 200 train; model `mlp`"
    return {"dataset": "mnist_10k", "data": trials.data, "clients": 250, "model": "mlp"}, words


def finals(trials: Sequence[Series], name: str = "accuracy") -> PerSeed:
    """The mean of a series' last values, for each seed; None where it diverged."""
    return [mean(trial[name][-LAST:]) for trial in trials]


def last(trials: Sequence[Series], name: str) -> PerSeed:
    """A series' last value, for each seed."""
    return [trial[name][-1] for trial in trials]


def least(trials: Sequence[Series], prefix: str) -> str:
    """What follows `prefix` in the name of the series whose last value is least in the mean; never a diverged one's."""

    def score(name: str) -> float:
        value = mean(last(trials, name))
        return math.inf if value is None else value

    return min((name for name in trials[0] if name.startswith(prefix)), key=score).removeprefix(prefix)


def rounds_to(trials: Sequence[Series], target: float, every: int) -> PerSeed:
    """The rounds until the accuracy was first measured at the target, for each seed; None where it never was."""
    reached = [
        [number for number, value in enumerate(trial["accuracy"], 1) if (value or 0) >= target] for trial in trials
    ]
    return [float(every * numbers[0]) if numbers else None for numbers in reached]


def curve(trials: Sequence[Series], every: int, name: str = "accuracy", start: int = 1) -> list[tuple[float, PerSeed]]:
    """A series as a curve over rounds: (round, the value for each seed). start: of the first value."""
    values = zip(*(trial[name] for trial in trials), strict=True)
    return [(float(every * number), list(at)) for number, at in enumerate(values, start)]


def settings_in_words(settings: Mapping[str, object]) -> str:
    """Settings of an algorithm as prose: "`client_lr` 0.3, `epochs` 3"."""
    return ", ".join(f"`{name}` {value}" for name, value in settings.items())
