"""The convolutional network of the federated EMNIST studies.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021, Table 5.
"""

from __future__ import annotations

from torch import nn

from export.model import ModelSpec
from export.models.tasks import classifier, image_axes


def emnist_cnn(shape: tuple[int, ...] = (1, 28, 28), classes: int = 62) -> ModelSpec:
    """D = 1,206,590 for 28×28 images of one channel. `x` is float32 (channels, height, width), `y` the class."""
    channels, height, width = image_axes("emnist_cnn", shape)
    return classifier(
        "emnist_cnn",
        lambda: nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, classes),
        ),
        shape,
        classes,
    )
