"""The two tasks of the reference models: the class of an example, or the next token at every place."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from export.errors import InvalidModel
from export.model import ModelSpec, accuracy, cross_entropy
from export.several_labels import of_tokens
from fedcore.plan import Field


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
