"""Arguments of the Python API, whose kinds are checked where they come in: an error then speaks of what was given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

MODEL = "a name, or a ModelSpec, which says how to make a module, its loss and its inputs (docs/models.md)"
ALGORITHM = "a name, or an object such as FedAdam(client_lr=0.1) (docs/algorithms.md)"
SETTINGS = 'a mapping such as {"client_lr": 0.1}'


def of_kind(name: str, value: object, kinds: tuple[type, ...], expected: str) -> None:
    """Raise TypeError, saying what is expected, unless the value of an argument is of one of the kinds."""
    if not isinstance(value, kinds):
        given = f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
        raise TypeError(f"{name} is {given}; expected {expected}")


def check_trained(model: object, algorithm: object, settings: object) -> None:
    """Raise TypeError unless a model, an algorithm and its settings are what `simulate` and `export` take."""
    from export.model import ModelSpec  # needs torch, which a coordinator has not

    of_kind("model", model, (str, ModelSpec), MODEL)
    made = dataclasses.is_dataclass(algorithm) and not isinstance(algorithm, type) and hasattr(algorithm, "weighting")
    if not made:
        of_kind("algorithm", algorithm, (str,), ALGORITHM)
    of_kind("settings", settings, (Mapping, type(None)), SETTINGS)
    if settings and made:
        raise TypeError("settings are for an algorithm that is named: an object has its own")
