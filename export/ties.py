"""Ties, among which torch chooses arbitrarily: in `topk`, and in a sort that need not be stable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

WORDS = (
    "{} met equal values, of which torch takes any and devices take the first, so that places and gradients differ; "
    "sort(..., stable=True) takes the first everywhere. "
)


class Ties(TorchFunctionMode):
    """Watches a running model. words: a message if it met ties; else empty."""

    def __init__(self) -> None:
        super().__init__()
        self.words = ""

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in CHOOSING and CHOOSING[func](*args, **kwargs):
            self.words = WORDS.format(func.__name__)
        return func(*args, **kwargs)


def _among_largest(inputs: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> bool:
    """Whether any of the k largest equals another value."""
    ordered = inputs.detach().sort(dim=dim, descending=largest).values
    return _neighbours(ordered.narrow(dim, 0, min(k + 1, ordered.shape[dim])), dim)


def _anywhere(inputs: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = False) -> bool:
    """Whether any two values are equal, unless the sort is stable."""
    return not stable and _neighbours(inputs.detach().sort(dim=dim).values, dim)


def _neighbours(ordered: Tensor, dim: int) -> bool:
    return bool((ordered.diff(dim=dim) == 0).any())


CHOOSING: dict[Any, Callable[..., bool]] = {
    **dict.fromkeys([torch.topk, Tensor.topk], _among_largest),
    **dict.fromkeys([torch.sort, Tensor.sort, torch.argsort, Tensor.argsort], _anywhere),
}
