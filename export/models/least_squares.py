"""Least squares: one linear output without bias, and half the squared error.

With the examples of `simulator/datasets/synthetic.py` a client's loss is exactly a quadratic of its choice.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from export.model import ModelSpec
from fedcore.plan import Field


def half_squared_error(outputs: Tensor, label: Tensor) -> Tensor:
    """½ (output − label)², per example (B,), of outputs and labels (B,)."""
    return (outputs - label) ** 2 / 2


def least_squares(shape: tuple[int, ...] = (16,)) -> ModelSpec:
    """D = 16 by default, the size of an example. `x` is float32 of `shape`, flattened; `y` is a float32 number."""
    return ModelSpec(
        name="least_squares",
        make=lambda: nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 1, bias=False), nn.Flatten(0)),
        loss=half_squared_error,
        inputs=(Field("x", "float32", shape),),
        label=Field("y", "float32"),
    )
