"""Multinomial logistic regression: one dense layer over flattened inputs."""

from __future__ import annotations

import math

from torch import nn

from export.model import ModelSpec
from export.models.tasks import classifier


def logreg(shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> ModelSpec:
    """D = (inputs + 1) · classes; 650 for the 8×8 digits of the default. `x` is float32 of `shape`, `y` the class."""
    return classifier(
        "logreg", lambda: nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes)), shape, classes
    )
