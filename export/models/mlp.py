"""A network with one hidden layer; by default 43-64-6, for recognising activities from phone accelerometers.

The activation is smooth on purpose: docs/decisions/0009-smooth-reference-models.md.
"""

from __future__ import annotations

import math

from torch import nn

from export.model import ModelSpec
from export.models.tasks import classifier


def mlp(shape: tuple[int, ...] = (43,), classes: int = 6, hidden: int = 64) -> ModelSpec:
    """D = 3,206 by default. `x` is float32 of `shape`, flattened; `y` the class."""
    return classifier(
        "mlp",
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.SiLU(), nn.Linear(hidden, classes)),
        shape,
        classes,
    )
