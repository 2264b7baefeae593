"""A check that the numbers of a population are finite, and no label is below 0, but where it is ignored."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcore.plan import IGNORED
from simulator.errors import DatasetError
from simulator.population import Population


def verified(users: Population, name: str) -> Population:
    """The same population.

    Raises DatasetError when a number is not finite, or a label is below 0. Of several labels some may be IGNORED.
    """
    for field, array in users.fields.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            row = int(np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(1))[0])
            raise DatasetError(
                f"{name}: field {field!r} of client {_owner(users, row)!r} holds a number that is not finite (NaN or "
                "infinite); fill it in, or leave the example out"
            )
    labels: NDArray[Any] | None = users.labels
    if labels is None or labels.dtype.kind != "i":
        return users
    below = (labels < 0) & ((labels != IGNORED) | (labels.ndim == 1))
    if below.any():
        row, *place = (int(axis[0]) for axis in np.nonzero(below))
        raise DatasetError(
            f"{name}: a label of client {_owner(users, row)!r} is {labels[row, *place]}; classes count from 0"
        )
    return users


def _owner(users: Population, row: int) -> str:
    return users.clients[int(np.searchsorted(users.starts, row, side="right")) - 1]
