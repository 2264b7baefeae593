"""ResNet-18 with group normalisation, for small images.

He, Zhang, Ren, Sun, "Deep residual learning for image recognition", CVPR 2016; group normalisation with two groups as
in Hsieh, Phanishayee, Mutlu, Gibbons, "The non-IID data quagmire of decentralized machine learning", ICML 2020, and
24×24 crops of CIFAR-100 as in Reddi et al., "Adaptive federated optimization", ICLR 2021.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from export.model import ModelSpec
from export.models.tasks import classifier, image_axes

GROUPS = 2
STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))


class _Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(GROUPS, outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(GROUPS, outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut.append(nn.Conv2d(inside, outside, 1, stride, bias=False))
            self.shortcut.append(nn.GroupNorm(GROUPS, outside))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


def _network(channels: int, classes: int) -> nn.Module:
    inside = STAGES[0][0]
    layers: list[nn.Module] = [
        nn.Conv2d(channels, inside, 3, padding=1, bias=False),
        nn.GroupNorm(GROUPS, inside),
        nn.ReLU(),
    ]
    for outside, stride in STAGES:
        layers += [_Block(inside, outside, stride), _Block(outside, outside, 1)]
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


def resnet18_gn(shape: tuple[int, ...] = (3, 24, 24), classes: int = 100) -> ModelSpec:
    """D = 11,220,132 by default. `x` is float32 (channels, height, width), `y` the class."""
    channels, _, _ = image_axes("resnet18_gn", shape)
    return classifier("resnet18_gn", lambda: _network(channels, classes), shape, classes)
