"""MobileNetV2 with group normalisation, for small images: the strides of its first stages are 1.

Sandler, Howard, Zhu, Zhmoginov, Chen, "MobileNetV2: inverted residuals and linear bottlenecks", CVPR 2018, Table 2.
"""

from __future__ import annotations

from torch import Tensor, nn

from export.model import ModelSpec
from export.models.tasks import classifier, image_axes

GROUPS = 8
# expansion, channels, blocks, stride of the first block
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
HEAD = 1280


def _convolution(inside: int, outside: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inside, outside, kernel, stride, padding=kernel // 2, groups=groups, bias=False),
        nn.GroupNorm(GROUPS, outside),
    ]


class _Block(nn.Module):
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


def _network(channels: int, classes: int) -> nn.Module:
    inside = 32
    layers = [*_convolution(channels, inside, 3), nn.ReLU6()]
    for expansion, outside, blocks, stride in STAGES:
        for index in range(blocks):
            layers.append(_Block(inside, outside, expansion, stride if index == 0 else 1))
            inside = outside
    layers += [*_convolution(inside, HEAD), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(HEAD, classes))


def mobilenetv2_gn(shape: tuple[int, ...] = (3, 24, 24), classes: int = 100) -> ModelSpec:
    """D = 2,351,972 by default. `x` is float32 (channels, height, width), `y` the class."""
    channels, _, _ = image_axes("mobilenetv2_gn", shape)
    return classifier("mobilenetv2_gn", lambda: _network(channels, classes), shape, classes)
