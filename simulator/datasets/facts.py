"""Facts about a population: users, sizes, fields, and the distribution of labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    counts = label_counts(users)
    return PopulationFacts(
        users=len(users),
        examples=int(users.sizes.sum()),
        per_user={f"p{rank}": int(np.percentile(users.sizes, rank)) for rank in PERCENTILES},
        fields={name: f"{array.dtype}{list(array.shape[1:])}" for name, array in users.fields.items()},
        classes=users.classes,
        labels=[] if counts is None else counts.sum(0).tolist(),
        classes_per_user=None if counts is None else float((counts > 0).sum(1).mean()),
    )


def label_counts(users: Population) -> NDArray[np.int64] | None:
    """The number of each user's examples of each class: (users, classes). Padding, token 0 of a sequence, is not
    counted.

    None if `y` holds no classes.
    """
    if users.classes is None:
        return None
    labels = users.fields["y"].reshape(int(users.starts[-1]), -1).astype(np.int64)
    owners = np.repeat(np.arange(len(users)), users.sizes)[:, None]
    places = (owners * users.classes + labels).ravel()
    counts = np.bincount(places, minlength=len(users) * users.classes).reshape(len(users), users.classes)
    if users.fields["y"].ndim > 1:
        counts[:, 0] = 0
    return counts
