"""The oracles of the engine `torch`: gradients or measures of several clients in one call, or of a single one.

Shapes: K clients, D parameters, B batch, M metric sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from export.errors import ExportError, reason
from export.model import GradientOracle, MeasureOracle, Model
from export.rewrites import Traceable
from simulator.errors import EngineError


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
