"""A convolutional network for handwritten characters of many classes: three strided convolutions and a dense layer.

Smooth activations, and strides instead of max-pools, on purpose: docs/decisions/0009-smooth-reference-models.md.
Without the group normalisation (Wu, He 2018) training makes no progress for a hundred rounds.
"""

from __future__ import annotations

from torch import nn

from export.model import ModelSpec
from export.models.tasks import classifier, image_axes


def omniglot_cnn(shape: tuple[int, ...] = (1, 28, 28), classes: int = 136) -> ModelSpec:
    """D = 162,920 by default. `x` is float32 (channels, height, width), `y` the class."""
    channels, height, width = image_axes("omniglot_cnn", shape)
    return classifier(
        "omniglot_cnn",
        lambda: nn.Sequential(
            nn.Conv2d(channels, 16, 3, stride=2, padding=1),
            nn.GroupNorm(2, 16),
            nn.SiLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GroupNorm(4, 32),
            nn.SiLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.GroupNorm(8, 64),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(64 * -(-height // 8) * -(-width // 8), classes),
        ),
        shape,
        classes,
    )
