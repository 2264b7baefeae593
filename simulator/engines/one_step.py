"""Clients that take one step each: the sum of their reports, from one gradient of all their losses.

They begin at the same parameters x. If a report is affine in the gradient, r_k = a_k g_k + b_k, as after a step of
descent, the sum Σ w_k r_k needs only Σ w_k a_k g_k of the gradients. That is the gradient of Σ w_k a_k loss_k(x), so no
vector of a single client is computed. Shapes: K clients, D parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedcore.algorithms.algorithm import Broadcast, Report, Trip, Vector


class NotAffine(Exception):
    """A report is not affine in one gradient at parameters that all clients share."""


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """A vector of every client, `slope · gradient + offset`, with the operators that keep it so.

    slope, offset: numbers, or tensors that broadcast to `(K, D)`. Any other operation of an algorithm is an error.
    """

    slope: Vector
    offset: Vector = 0.0

    def __add__(self, other: Any) -> Affine:
        if isinstance(other, Affine):
            return Affine(self.slope + other.slope, self.offset + other.offset)
        return Affine(self.slope, self.offset + other)

    __radd__ = __add__

    def __neg__(self) -> Affine:
        return Affine(-self.slope, -self.offset)

    def __sub__(self, other: Any) -> Affine:
        if isinstance(other, Affine):
            return self + -other
        return Affine(self.slope, self.offset - other)

    def __rsub__(self, other: Any) -> Affine:
        return Affine(-self.slope, other - self.offset)

    def __mul__(self, other: Any) -> Affine:
        return NotImplemented if isinstance(other, Affine) else Affine(self.slope * other, self.offset * other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Affine:
        return NotImplemented if isinstance(other, Affine) else Affine(self.slope / other, self.offset / other)

    def __eq__(self, other: object) -> bool:  # which every object has otherwise
        raise NotAffine

    def __hash__(self) -> int:
        raise NotAffine

    def __bool__(self) -> bool:
        raise NotAffine


@dataclass(frozen=True, slots=True)
class OneStep:
    """The reports of K clients after their only step. point: (D,), where their gradients g_k are taken."""

    point: Tensor
    report: Mapping[str, Affine | Tensor]

    def gradient_weights(self, weight_K: Tensor) -> Tensor:
        """The v_k of the sum Σ v_k g_k that the reports need. Raises NotAffine if they need several such sums."""
        weights = [weight_K * _by_client(part.slope) for part in self.report.values() if isinstance(part, Affine)]
        if not weights or any(not torch.equal(other, weights[0]) for other in weights):
            raise NotAffine
        weights_K: Tensor = weights[0]
        return weights_K

    def sums(self, gradient_D: Tensor, weight_K: Tensor) -> Report:
        """The weighted sums of the reports. gradient_D: Σ v_k g_k."""
        return {name: _sum(part, gradient_D, weight_K) for name, part in self.report.items()}


def one_step(trip: Trip, received: Broadcast, count_K1: Tensor) -> OneStep:
    """The reports of clients after the only step of a trip's only pass. Raises NotAffine.

    count_K1: the examples of each in its batch.
    """
    (stage,) = trip.passes
    points = []

    def grad(params: Tensor) -> tuple[None, Affine, Tensor]:
        points.append(params)
        return None, Affine(1.0), count_K1

    try:
        carry = stage.step(stage.begin(received), received, grad)
        report = trip.report(received, {stage.name: carry})
    except Exception as error:  # whatever an algorithm does that only tensors can; they also say what is wrong with it
        raise NotAffine from error
    alone = len(points) == 1 and points[0].dim() == 1
    if not alone or not all(isinstance(part, Affine | Tensor) for part in report.values()):
        raise NotAffine
    return OneStep(points[0], report)


def _by_client(slope: Vector) -> Vector:
    """The part of a slope that differs between clients: numbers (K,), or 1 if none differs."""
    if not isinstance(slope, Tensor) or slope.dim() == 1:
        return 1.0
    if slope.shape[1] > 1:
        raise NotAffine
    return slope[:, 0]


def _sum(part: Affine | Tensor, gradient_D: Tensor, weight_K: Tensor) -> Tensor:
    """The weighted sum of a report; `gradient_D` already has the part of the slope that differs between clients."""
    if isinstance(part, Tensor):
        return part * weight_K.sum() if part.dim() == 1 else weight_K @ part
    offset_D = part.offset if isinstance(part.offset, Tensor) else gradient_D.new_tensor([part.offset])
    shared = part.slope if isinstance(part.slope, Tensor) and part.slope.dim() == 1 else None
    summed_D = _sum(offset_D, gradient_D, weight_K)
    if shared is not None:
        return torch.addcmul(summed_D, shared, gradient_D)
    return torch.add(summed_D, gradient_D, alpha=1 if isinstance(part.slope, Tensor) else part.slope)
