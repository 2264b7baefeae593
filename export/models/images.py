"""Built-in models of images and of rows of numbers."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn import functional

from export.model import ModelSpec
from export.tasks import classifier, image_axes
from fedcore.plan import Field


def logreg(shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> ModelSpec:
    """D = (inputs + 1) · classes; 650 for the 8×8 digits of the default. `x` is float32 of `shape`, `y` the class."""
    return classifier(
        "logreg", lambda: nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes)), shape, classes
    )


# A network with one hidden layer; by default 43-64-6, for recognising activities from phone accelerometers.
#
# The activation is smooth on purpose: docs/decisions/0009-smooth-reference-models.md.


def mlp(shape: tuple[int, ...] = (43,), classes: int = 6, hidden: int = 64) -> ModelSpec:
    """D = 3,206 by default. `x` is float32 of `shape`, flattened; `y` the class."""
    return classifier(
        "mlp",
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.SiLU(), nn.Linear(hidden, classes)),
        shape,
        classes,
    )


# Least squares: one linear output without bias, and half the squared error.
#
# With the examples of `simulator/datasets/synthetic.py` a client's loss is exactly a quadratic of its choice.


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


# A small convolutional network for handwritten digits: convolution, max-pool, convolution, dense.
#
# Smooth activations and one early max-pool on purpose: docs/decisions/0009-smooth-reference-models.md.


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


# The convolutional network of the federated EMNIST studies.
#
# Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021, Table 5.


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


# A convolutional network for handwritten characters of many classes: three strided convolutions and a dense layer.
#
# Smooth activations, and strides instead of max-pools, on purpose: docs/decisions/0009-smooth-reference-models.md.
# Without the group normalisation (Wu, He 2018) training makes no progress for a hundred rounds.


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


MOBILE_GROUPS = 8
# expansion, channels, blocks, stride of the first block
MOBILE_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
# MobileNetV2 with group normalisation, for small images: the strides of its first stages are 1.
#
# Sandler, Howard, Zhu, Zhmoginov, Chen, "MobileNetV2: inverted residuals and linear bottlenecks", CVPR 2018, Table 2.

HEAD = 1280


def _convolution(inside: int, outside: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inside, outside, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.GroupNorm(MOBILE_GROUPS, outside),
    ]


class _InvertedResidual(nn.Module):
    """Expand, filter each channel by itself, project; the input is added where the shape allows."""

    def __init__(self, inside: int, outside: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = inside * expansion
        expand = [*_convolution(inside, hidden), nn.ReLU6()] if expansion > 1 else []
        depthwise = [*_convolution(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6()]
        self.body = nn.Sequential(*expand, *depthwise, *_convolution(hidden, outside))
        self.residual = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        after: Tensor = self.body(x)
        return x + after if self.residual else after


def _mobilenet(channels: int, classes: int) -> nn.Module:
    inside = 32
    layers = [*_convolution(channels, inside, 3), nn.ReLU6()]
    for expansion, outside, blocks, stride in MOBILE_STAGES:
        for index in range(blocks):
            layers.append(_InvertedResidual(inside, outside, expansion, stride if index == 0 else 1))
            inside = outside
    layers += [*_convolution(inside, HEAD), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(HEAD, classes))


def mobilenetv2_gn(shape: tuple[int, ...] = (3, 24, 24), classes: int = 100) -> ModelSpec:
    """D = 2,351,972 by default. `x` is float32 (channels, height, width), `y` the class."""
    channels, _, _ = image_axes("mobilenetv2_gn", shape)
    return classifier("mobilenetv2_gn", lambda: _mobilenet(channels, classes), shape, classes)


RESIDUAL_GROUPS = 2
RESIDUAL_STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))


class _Residual(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(RESIDUAL_GROUPS, outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(RESIDUAL_GROUPS, outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut.append(nn.Conv2d(inside, outside, 1, stride, bias=False))
            self.shortcut.append(nn.GroupNorm(RESIDUAL_GROUPS, outside))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


def _resnet(channels: int, classes: int) -> nn.Module:
    inside = RESIDUAL_STAGES[0][0]
    layers: list[nn.Module] = [
        nn.Conv2d(channels, inside, 3, padding=1, bias=False),
        nn.GroupNorm(RESIDUAL_GROUPS, inside),
        nn.ReLU(),
    ]
    for outside, stride in RESIDUAL_STAGES:
        layers += [_Residual(inside, outside, stride), _Residual(outside, outside, 1)]
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


# ResNet-18 with group normalisation, for small images.
#
# He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016; group normalisation with two groups as
# in Hsieh, Phanishayee, Mutlu, Gibbons, "The non-IID data quagmire of decentralized machine learning", ICML 2020, and
# 24×24 crops of CIFAR-100 as in Reddi et al., "Adaptive federated optimization", ICLR 2021.


def resnet18_gn(shape: tuple[int, ...] = (3, 24, 24), classes: int = 100) -> ModelSpec:
    """D = 11,220,132 by default. `x` is float32 (channels, height, width), `y` the class."""
    channels, _, _ = image_axes("resnet18_gn", shape)
    return classifier("resnet18_gn", lambda: _resnet(channels, classes), shape, classes)
