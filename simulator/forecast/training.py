"""Training on the cohorts that a twin drew: accuracy as a function of virtual time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from coordinator.rules.buffers import discount, staleness_weight
from simulator.configuration import SimulationConfig
from simulator.engines.memory import one_thread
from simulator.errors import ForecastError
from simulator.forecast.course import CommittedRound
from simulator.simulation import Overrides, training_of
from simulator.training import ACCURACY, SERVER, Limits, Point, Training, Vectors, measured

Make = Callable[[Sequence[Sequence[int]]], Training]
"""Makes the training whose rounds have these cohorts."""

_MODEL = f"{SERVER}.params"
_DISCOUNTS = {"fedavg": False, "fedbuff": True}
"""Algorithms that only add the mean delta to the model, and whether they take less of it where reports are old."""


@one_thread()
def accuracy_over_time(
    config: SimulationConfig,
    rounds: Sequence[CommittedRound],
    on_round: Callable[[int, Point], None],
    make: Make | None = None,
) -> list[tuple[float, float]]:
    """The accuracy of held-out users by hours of virtual time, after training in these rounds.

    A device holds the examples of one user, the same in every round: that of its row, modulo their number. A report of
    a buffered round starts from the model that its device was given. Rounds beyond those of the configuration are left
    out. make: by default makes the training that the configuration names. Raises ForecastError without a round, and
    for an algorithm that cannot take old reports; and as `simulate`.
    """
    if not rounds:
        raise ForecastError("no round was committed, so there is nothing to train: raise days, or lower goal")
    rounds = rounds[: config.rounds]
    if any(any(one.behind) for one in rounds) and config.algorithm not in _DISCOUNTS:
        raise ForecastError(
            f"algorithm {config.algorithm} does not train with the old reports of buffered rounds here; "
            f"take {' or '.join(sorted(_DISCOUNTS))}"
        )
    by_age = [_by_age(one) for one in rounds]
    # The twin says who trains: a size of its own would only have to fit the users.
    parts = [devices for ages in by_age for devices in ages.values()]
    named = replace(config, cohort=1)
    training = make(parts) if make else training_of(named, given=Overrides(cohorts=parts))
    models = deque([training.vectors()], maxlen=1 + max(max(ages) for ages in by_age))
    limits = Limits(min(config.rounds, len(rounds)), config.target_accuracy, config.patience)
    course: list[Point] = []
    found: list[tuple[float, float]] = []
    trained = 0
    while limits.ending(course) is None:
        number = len(course) + 1
        metrics = _round(training, trained, by_age[number - 1], models)
        trained += len(by_age[number - 1])
        point: Point = {"round": number} | metrics
        if number % config.evaluate_every == 0 or number == limits.rounds:
            point |= measured(training.measure(number), training.test)
        if ACCURACY in point:
            found.append((round(rounds[number - 1].ended / 3600, 3), point[ACCURACY]))
        course.append(point)
        on_round(number, point)
    return found


def _by_age(one: CommittedRound) -> Mapping[int, Sequence[int]]:
    """The devices of a round by how many versions their models were behind."""
    ages: defaultdict[int, list[int]] = defaultdict(list)
    for device, behind in zip(one.devices, one.behind, strict=True):
        ages[behind].append(device)
    return ages


def _round(
    training: Training, trained: int, ages: Mapping[int, Sequence[int]], models: deque[Vectors]
) -> dict[str, float]:
    """Train one round, of which the reports of each age are a cohort of the training, after `trained` others.

    models: the last ones, which grow by that of the round. Gives the metrics of the youngest reports.
    """
    metrics: dict[str, float] = {}
    if set(ages) == {0}:
        metrics = training.run_round(trained + 1)
        models.append(training.vectors())
        return metrics
    moved = np.zeros_like(models[-1][_MODEL], np.float64)
    total = 0.0
    for number, behind in enumerate(ages, start=trained + 1):
        start = models[-1 - behind]
        training.restore(start)
        metrics = training.run_round(number)
        by_examples = training.facts.settings["weighting"] == "examples"
        weight = staleness_weight(behind) * (metrics["examples"] if by_examples else len(ages[behind]))
        moved += weight * (training.vectors()[_MODEL] - start[_MODEL])
        total += weight
    counts = [len(ages.get(behind, ())) for behind in range(max(ages) + 1)]
    share = discount(counts) if _DISCOUNTS[training.facts.algorithm] else 1.0
    latest = models[-1]
    models.append(latest | {_MODEL: (latest[_MODEL] + share * moved / total).astype(np.float32)})
    training.restore(models[-1])
    return metrics
