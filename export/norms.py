"""Batch normalisation, which devices cannot train: changed to group normalisation, or held at known statistics.

Group normalisation: Wu, He, "Group normalization", 2018. Statistics of a batch would mix padding with examples, and
those of one user would reach the next.
"""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

M = TypeVar("M", bound=nn.Module)
GROUPS = 32
"""The groups of a layer, as in the paper; fewer where the channels are not a multiple."""


def to_group_norm(module: M, groups: int = GROUPS) -> M:
    """The same module with group normalisation in place of all batch normalisation, its scales and shifts kept.

    Its outputs change, so it has to be trained further.
    """
    for layer in list(module.modules()):
        for name, child in layer.named_children():
            if isinstance(child, _BatchNorm):
                setattr(layer, name, _grouped(child, groups))
    return module


def freeze_statistics(module: M) -> M:
    """The same module, whose batch normalisation keeps the statistics that it has, in training too."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()
    return module


def batch_norms(module: nn.Module) -> list[str]:
    """The paths of all layers of batch normalisation that would compute statistics in training."""
    return [
        path
        for path, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None)
    ]


def untrained(module: nn.Module) -> list[str]:
    """The paths of layers whose statistics are those that every layer begins with: means of 0 and variances of 1."""
    return [
        path
        for path, layer in module.named_modules()
        if isinstance(layer, _BatchNorm)
        and layer.running_mean is not None
        and layer.running_var is not None
        and not layer.running_mean.any()
        and bool((layer.running_var == 1).all())
    ]


def _grouped(layer: _BatchNorm, groups: int) -> nn.GroupNorm:
    channels = layer.num_features
    # A dense layer's channels have one value each, so a group of one channel would be 0 always.
    chosen = 1 if isinstance(layer, nn.BatchNorm1d) else math.gcd(groups, channels)
    made = nn.GroupNorm(chosen, channels, layer.eps, layer.affine)
    if layer.affine:
        with torch.no_grad():
            made.weight.copy_(layer.weight)
            made.bias.copy_(layer.bias)
    return made
