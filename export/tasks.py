"""The tasks of the built-in models, with losses and figures of several labels in an example."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from export.errors import InvalidModel
from export.model import ModelSpec, PerExample, accuracy, cross_entropy
from fedcore.plan import IGNORED, Field

# Losses and figures of several labels in an example, at places or of kinds, as means over those that count.
#
# Shapes: B batch, T places, C classes.


def of_tokens(ignored: int) -> tuple[PerExample, PerExample]:
    """Cross-entropy and accuracy of logits (B, T, C) against labels (B, T), per example (B,).

    Labels that are `ignored` do not count; an example of such only has the loss and the accuracy 0.
    """

    def loss(outputs: Tensor, label: Tensor) -> Tensor:
        each = nn.functional.cross_entropy(outputs.flatten(0, 1), label.flatten(), reduction="none")
        return mean_where(label != ignored, each.reshape(label.shape))

    def right(outputs: Tensor, label: Tensor) -> Tensor:
        return mean_where(label != ignored, outputs.argmax(-1) == label)

    return loss, right


def cross_entropy_of_labels(outputs: Tensor, label: Tensor) -> Tensor:
    """Mean binary cross-entropy of logits (B, C) against labels (B, C) of 0, 1 and IGNORED, per example (B,)."""
    each = nn.functional.binary_cross_entropy_with_logits(outputs, (label == 1).float(), reduction="none")
    return mean_where(label != IGNORED, each)


def labels_right(outputs: Tensor, label: Tensor) -> Tensor:
    """The share of labels that are right, per example (B,); a label is given by a logit above 0."""
    return mean_where(label != IGNORED, (outputs > 0) == (label == 1))


def f1_of_labels(outputs: Tensor, label: Tensor) -> Tensor:
    """F1 of the labels that are given, per example (B,): 1 where there are none, and none are given.

    Godbole, Sarawagi, "Discriminative methods for multi-labeled classification", 2004.
    """
    given, true = ((outputs > 0) & (label != IGNORED)).float(), (label == 1).float()
    both, sizes = (given * true).sum(1), given.sum(1) + true.sum(1)
    return torch.where(sizes > 0, 2 * both / sizes.clamp(min=1), 1.0)


def mean_where(counts: Tensor, values: Tensor) -> Tensor:
    """The means (B,) of the values (B, T) that count; 0 for an example without any."""
    real = counts.float()
    return (values * real).sum(1) / real.sum(1).clamp(min=1)


def classifier(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], classes: int) -> ModelSpec:
    """`x` is float32 of `shape`, `y` its class."""
    return ModelSpec(
        name=name,
        make=make,
        loss=cross_entropy,
        inputs=(Field("x", "float32", shape),),
        label=Field("y", "int64", high=classes),
        metrics={"accuracy": accuracy},
    )


def image_axes(name: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Channels, height and width. Raises InvalidModel when `shape` has other axes."""
    if len(shape) != 3:
        raise InvalidModel(f"{name} reads images (channels, height, width), not examples of shape {list(shape)}")
    return shape[0], shape[1], shape[2]


def next_token(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], classes: int) -> ModelSpec:
    """`x` and `y` are int64 (length,): tokens, and the ones that follow; 0 is padding.

    Raises InvalidModel when `shape` has more axes than one.
    """
    if len(shape) != 1:
        raise InvalidModel(f"{name} reads sequences of one axis, not examples of shape {list(shape)}")
    loss, right = of_tokens(0)
    return ModelSpec(
        name=name,
        make=make,
        loss=loss,
        inputs=(Field("x", "int64", shape, high=classes),),
        label=Field("y", "int64", shape, high=classes),
        metrics={"accuracy": right},
    )
