"""A small convolutional network for handwritten digits: convolution, max-pool, convolution, dense.

Smooth activations and one early max-pool on purpose: docs/decisions/0009-smooth-reference-models.md.
"""

from __future__ import annotations

from torch import nn

from export.errors import InvalidModel
from export.model import ModelSpec, accuracy, cross_entropy
from fedcore.plan import Field


def digits_cnn(shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> ModelSpec:
    """D = 3,818 for 8×8 images of one channel. `x` is float32 (channels, height, width), `y` the class."""
    if len(shape) != 3:
        raise InvalidModel(f"digits_cnn reads images (channels, height, width), not examples of shape {list(shape)}")
    channels, height, width = shape
    return ModelSpec(
        name="digits_cnn",
        make=lambda: nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(16 * (height // 2) * (width // 2), classes),
        ),
        loss=cross_entropy,
        inputs=(Field("x", "float32", shape),),
        label=Field("y", "int64", high=classes),
        metrics={"accuracy": accuracy},
    )
