"""A small convolutional network for handwritten digits: two convolutions, two max-pools, one dense layer."""

from __future__ import annotations

from torch import nn

from export.model import ModelSpec, accuracy, cross_entropy
from fedcore.plan import Field


def digits_cnn(shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> ModelSpec:
    """D = 6,090 for 8×8 images of one channel. `x` is float32 (channels, height, width), `y` the class."""
    channels, height, width = shape
    features = 32 * (height // 4) * (width // 4)
    return ModelSpec(
        name="digits_cnn",
        make=lambda: nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(features, classes),
        ),
        loss=cross_entropy,
        inputs=(Field("x", "float32", shape),),
        label=Field("y", "int64", high=classes),
        metrics={"accuracy": accuracy},
    )
