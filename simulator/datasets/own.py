"""Data sets of a user's own: a function that returns a population, or files with the examples of users."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from export.errors import reason
from fedcore.own_code import import_own
from simulator.datasets.user_files import users_of
from simulator.errors import DatasetError
from simulator.population import Population


def is_own(name: str) -> bool:
    """Whether a name is `package.module:function`, or a path: one that exists, or has a separator in it."""
    return ":" in name or "/" in name or Path(name).exists()


def own(name: str) -> Population:
    """The population that `package.module:function` returns, or that lies at a path.

    Raises DatasetError, naming what is wrong with the data.
    """
    return verified(_returned_by(name) if ":" in name else users_of(Path(name)), name)


def verified(users: Population, name: str) -> Population:
    """The same population. Raises DatasetError when a number is not finite, or a label is below 0."""
    for field, array in users.fields.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            row = int(np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(1))[0])
            raise DatasetError(
                f"{name}: field {field!r} of client {_owner(users, row)!r} holds a number that is not finite (NaN or "
                "infinite); fill it in, or leave the example out"
            )
    labels = users.fields.get("y")
    if labels is not None and labels.dtype.kind == "i" and labels.size and labels.min() < 0:
        row = int(np.flatnonzero(labels.reshape(len(labels), -1).min(1) < 0)[0])
        raise DatasetError(
            f"{name}: a label of client {_owner(users, row)!r} is {int(labels[row].min())}; classes count from 0"
        )
    return users


def _owner(users: Population, row: int) -> str:
    return users.clients[int(np.searchsorted(users.starts, row, side="right")) - 1]


def _returned_by(name: str) -> Population:
    module, _, function = name.partition(":")
    try:
        make = getattr(import_own(module), function)
    except Exception as error:  # whatever the user's own code raises
        raise DatasetError(f"cannot import data set {name!r}: {reason(error)}") from error
    try:
        found = make()
    except Exception as error:
        raise DatasetError(f"data set {name} fails with {reason(error)}") from error
    if not isinstance(found, Population):
        raise DatasetError(f"{name} returned {type(found).__name__}, expected simulator.population.Population")
    return found
