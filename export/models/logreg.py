"""Multinomial logistic regression: one dense layer over flattened inputs."""

from __future__ import annotations

import math

from torch import nn

from export.model import ModelSpec, accuracy, cross_entropy
from fedcore.plan import Field


def logreg(shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> ModelSpec:
    """D = (inputs + 1) · classes; 650 for the 8×8 digits of the default. `x` is float32 of `shape`, `y` the class."""
    return ModelSpec(
        name="logreg",
        make=lambda: nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes)),
        loss=cross_entropy,
        inputs=(Field("x", "float32", shape),),
        label=Field("y", "int64", high=classes),
        metrics={"accuracy": accuracy},
    )
