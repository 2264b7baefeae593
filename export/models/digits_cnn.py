"""A small convolutional network for handwritten digits: convolution, max-pool, convolution, dense.

Smooth activations and one early max-pool on purpose: docs/decisions/0009-smooth-reference-models.md.
"""

from __future__ import annotations

from torch import nn

from export.model import ModelSpec
from export.models.tasks import classifier, image_axes


def digits_cnn(shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> ModelSpec:
    """D = 3,818 for 8×8 images of one channel. `x` is float32 (channels, height, width), `y` the class."""
    channels, height, width = image_axes("digits_cnn", shape)
    return classifier(
        "digits_cnn",
        lambda: nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(16 * (height // 2) * (width // 2), classes),
        ),
        shape,
        classes,
    )
