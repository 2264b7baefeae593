"""The oracles of the engine `torch`: gradients of several clients in one call, or of clients that take one step.

Shapes: K clients, D parameters, B batch, M metric sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from export.errors import ExportError, reason
from export.model import GradientOracle, MeasureOracle, Model
from export.rewrites import Traceable
from fedcore.algorithms.algorithm import Broadcast, Report, Trip, Vector
from simulator.errors import EngineError

# Clients that take one step each: the sum of their reports, from one gradient of all their losses.
#
# They begin at the same parameters x. If a report is affine in the gradient, r_k = a_k g_k + b_k, as after a step of
# descent, the sum Σ w_k r_k needs only Σ w_k a_k g_k of the gradients. That is the gradient of Σ w_k a_k loss_k(x), so
# no vector of a single client is computed. Shapes: K clients, D parameters.


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


class CohortOracle:
    """The gradient oracle of the algorithm contract for K clients, each on its own batch.

    batch: fields (K, B, …). mask: float32 (K, B). noise: int32 (K, B), from which dropout draws, if any.
    """

    def __init__(
        self, model: Model, batch: Mapping[str, Tensor], mask_KB: Tensor, noise_KB: Tensor | None = None
    ) -> None:
        self._model, self._batch, self._mask_KB, self._noise_KB = model, dict(batch), mask_KB, noise_KB
        self.sums_KM = mask_KB.new_zeros(mask_KB.shape[0], len(model.metrics))

    def __call__(self, params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """params: (K, D), or (D,) if all clients share them. Returns (K, 1), (K, D), (K, 1).

        Raises EngineError or ExportError when the model does not run.
        """
        with _watched(self._model):
            return self._alone(params) if len(self._mask_KB) == 1 else self._together(params)

    def weighted(self, params_D: Tensor, weight_K: Tensor) -> Tensor:
        """Σ w_k g_k, (D,), at parameters that all clients share: the gradient of the weighted sum of their losses.

        Raises as `__call__`.
        """
        with _watched(self._model):
            leaves = {name: part.detach().requires_grad_() for name, part in self._model.tensors(params_D).items()}
            loss = vmap(self._model.loss, (None, 0, 0, None if self._noise_KB is None else 0))
            loss_K, self.sums_KM = loss(leaves, self._batch, self._mask_KB, self._noise_KB)
            gradients = torch.autograd.grad(loss_K @ weight_K, list(leaves.values()), materialize_grads=True)
            return torch.cat([gradient.reshape(-1) for gradient in gradients])

    def _together(self, params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shared = None if params.dim() == 1 else 0
        gradient = vmap(
            grad_and_value(self._model.loss, has_aux=True),
            (shared, 0, 0, None if self._noise_KB is None else 0),
        )
        tensors = self._model.tensors(params)
        gradients, (loss_K, self.sums_KM) = gradient(tensors, self._batch, self._mask_KB, self._noise_KB)
        flat_KD = torch.cat([gradient.reshape(len(loss_K), -1) for gradient in gradients.values()], 1)
        return loss_K[:, None], flat_KD, self.sums_KM[:, :1]

    def _alone(self, params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One client, without an axis of clients, which would turn every convolution into a slow grouped one."""
        noise = None if self._noise_KB is None else self._noise_KB[0]
        batch = {name: values[0] for name, values in self._batch.items()}
        oracle = GradientOracle(self._model, batch, self._mask_KB[0], noise)
        with ChannelsLast():
            loss, gradient_D, count = oracle(params.reshape(-1))
        self.sums_KM = oracle.sums[None]
        return loss[None], gradient_D[None], count[None]


class CohortMeasure:
    """The oracle of a forward pass for K clients. model: one that evaluates; batch and mask as of CohortOracle."""

    def __init__(self, model: Model, batch: Mapping[str, Tensor], mask_KB: Tensor) -> None:
        self._model, self._batch, self._mask_KB = model, dict(batch), mask_KB
        self.sums_KM = mask_KB.new_zeros(mask_KB.shape[0], len(model.metrics))

    def __call__(self, params: Tensor) -> Tensor:
        """params: (K, D), or (D,) if all clients share them. Returns the sums (K, M).

        Raises EngineError or ExportError when the model does not run.
        """
        with _watched(self._model), torch.no_grad():
            self.sums_KM = self._alone(params) if len(self._mask_KB) == 1 else self._together(params)
        return self.sums_KM

    def _together(self, params: Tensor) -> Tensor:
        measure = vmap(self._model.loss, (None if params.dim() == 1 else 0, 0, 0))
        sums_KM: Tensor = measure(self._model.tensors(params), self._batch, self._mask_KB)[1]
        return sums_KM

    def _alone(self, params: Tensor) -> Tensor:
        batch = {name: values[0] for name, values in self._batch.items()}
        with ChannelsLast():
            return MeasureOracle(self._model, batch, self._mask_KB[0])(params.reshape(-1))[None]


@contextmanager
def _watched(model: Model) -> Iterator[None]:
    """A block in which a model runs. Raises EngineError or ExportError when it does not."""
    try:
        with Traceable():
            yield
    except (ExportError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # anything that the user's own code raises
        raise EngineError(f"the model {model.spec.name} does not run here: {reason(error)}") from error


class ChannelsLast(TorchFunctionMode):
    """Images with their channels last in memory from the first convolution on, which is faster on CPUs.

    Pooling by maximum takes a twentieth of the time.
    """

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # For images with one channel torch always reports that channels are last.
        if func in {torch.conv2d, functional.conv2d} and args and args[0].dim() == 4 and args[0].stride(1) != 1:
            args = (args[0].clone(memory_format=torch.channels_last), *args[1:])
        return func(*args, **(kwargs or {}))
