"""Facts about a population: users, sizes, fields, and the distribution of labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcore.errors import QuestionError
from fedcore.plan import Field
from simulator.population import Population

PERCENTILES = (0, 5, 25, 50, 75, 95, 100)


@dataclass(frozen=True, slots=True)
class PopulationFacts:
    """The facts, JSON-ready.

    per_user: percentiles of the number of examples. fields: type and shape by name. labels: the number of examples of
    each class, or of occurrences of each token; empty without classes. classes_per_user: the mean number of classes of
    a user.
    """

    users: int
    examples: int
    per_user: dict[str, int]
    fields: dict[str, str]
    classes: int | None
    labels: list[int]
    classes_per_user: float | None


def facts_of(users: Population) -> PopulationFacts:
    """The facts about a population."""
    labels, each = _labels(users)
    return PopulationFacts(
        users=len(users),
        examples=int(users.sizes.sum()),
        per_user={f"p{rank}": int(np.percentile(users.sizes, rank)) for rank in PERCENTILES},
        fields=users.kinds,
        classes=users.classes,
        labels=labels.tolist(),
        classes_per_user=each,
    )


def _labels(users: Population) -> tuple[NDArray[np.int64], float | None]:
    """How often each class occurs, and the mean number of a user's classes: what `muster ask labels y` answers.

    Large vocabularies, for which no report has room, are counted here.
    """
    from export.questions.builtin import builtin  # loads torch
    from simulator.questions import ask_population

    if users.classes is None or users.labels is None:
        return np.zeros(0, np.int64), None
    y = np.maximum(users.labels, 0).astype(np.int64)
    asked = Population(users.clients, {"y": y}, users.starts, users.classes)
    rows, devices = np.zeros((2, users.classes), np.int64)
    try:
        question = builtin("labels", ["y"], [Field("y", "int64", y.shape[1:], users.classes)], minimum_devices=1)
    except QuestionError:
        counts = label_counts(users)
        return (rows, 0.0) if counts is None else (counts.sum(0), float((counts > 0).sum(1).mean()))
    found = np.array([row[:3] for row in ask_population(question, asked).rows], np.int64)
    rows[found[:, 0]], devices[found[:, 0]] = found[:, 1], found[:, 2]
    if y.ndim > 1:  # padding, what has no label, or what is ignored
        rows[0] = devices[0] = 0
    return rows, float(devices.sum() / len(users))


def label_counts(users: Population) -> NDArray[np.int64] | None:
    """The number of each user's examples of each class: (users, classes). Of several labels, those that are 0
    or ignored are not counted.

    None if the labels are no classes.
    """
    if users.classes is None or users.labels is None:
        return None
    labels = np.maximum(users.labels, 0).reshape(int(users.starts[-1]), -1).astype(np.int64)
    owners = np.repeat(np.arange(len(users)), users.sizes)[:, None]
    places = (owners * users.classes + labels).ravel()
    counts = np.bincount(places, minlength=len(users) * users.classes).reshape(len(users), users.classes)
    if users.labels.ndim > 1:
        counts[:, 0] = 0
    return counts
