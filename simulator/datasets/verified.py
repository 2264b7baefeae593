"""A check that the numbers of a population are finite, and no label is below 0."""

from __future__ import annotations

import numpy as np

from simulator.errors import DatasetError
from simulator.population import Population


def verified(users: Population, name: str) -> Population:
    """The same population. Raises DatasetError when a number is not finite, or a label is below 0."""
    for field, array in users.fields.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            row = int(np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(1))[0])
            raise DatasetError(
                f"{name}: field {field!r} of client {_owner(users, row)!r} holds a number that is not finite (NaN or "
                "infinite); fill it in, or leave the example out"
            )
    labels = users.labels
    if labels is not None and labels.dtype.kind == "i" and labels.size and labels.min() < 0:
        row = int(np.flatnonzero(labels.reshape(len(labels), -1).min(1) < 0)[0])
        raise DatasetError(
            f"{name}: a label of client {_owner(users, row)!r} is {int(labels[row].min())}; classes count from 0"
        )
    return users


def _owner(users: Population, row: int) -> str:
    return users.clients[int(np.searchsorted(users.starts, row, side="right")) - 1]
