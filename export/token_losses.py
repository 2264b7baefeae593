"""Losses and accuracies of a label at every place, as means over the places that count.

Shapes: B batch, T places, C classes.
"""

from __future__ import annotations

from torch import Tensor, nn

from export.model import PerExample

IGNORED = -100
"""The label of what does not count, as torch's cross-entropy has it."""


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


def mean_where(counts: Tensor, values: Tensor) -> Tensor:
    """The means (B,) of the values (B, T) that count, of which each example may have none."""
    real = counts.float()
    return (values * real).sum(1) / real.sum(1).clamp(min=1)
