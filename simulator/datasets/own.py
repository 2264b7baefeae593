"""A user's own data sets: a function that returns a population, or files with the examples of users."""

from __future__ import annotations

from pathlib import Path

from export.errors import reason
from fedcore.own_code import import_own
from simulator.datasets.user_files import users_of
from simulator.errors import DatasetError
from simulator.population import Population


def is_own(name: str) -> bool:
    """Whether a name is `package.module:function`, or a path that exists or has a separator."""
    return ":" in name or "/" in name or Path(name).exists()


def own(name: str) -> Population:
    """The population that `package.module:function` returns, or the one at a path.

    Raises DatasetError, naming what is wrong with the data.
    """
    path = Path(name)
    return users_of(path) if path.exists() or ":" not in name else _returned_by(name)


def _returned_by(name: str) -> Population:
    module, _, function = name.partition(":")
    try:
        make = getattr(import_own(module), function)
    except Exception as error:  # whatever the user's own code raises
        raise DatasetError(
            f"cannot import data set {name!r}: {reason(error)}; it is read as package.module:function, since no file "
            "or folder is called so"
        ) from error
    try:
        population = make()
    except Exception as error:
        raise DatasetError(f"data set {name} fails with {reason(error)}") from error
    if not isinstance(population, Population):
        raise DatasetError(f"{name} returned {type(population).__name__}, expected simulator.population.Population")
    return population
