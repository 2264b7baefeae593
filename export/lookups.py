"""Indexing by tensors, as look-ups and sums of whole rows, which every runtime has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from export.errors import UnsupportedOperator

aten = torch.ops.aten
Indices = Sequence[Tensor | None]


class _Rows:
    """The indexed axes of `inputs` as one axis of rows, and the row number of each place."""

    def __init__(self, inputs: Tensor, indices: Indices) -> None:
        indexed = {axis: index for axis, index in enumerate(indices) if index is not None}
        axes = list(indexed)
        rest = [axis for axis in range(inputs.dim()) if axis not in indexed]
        self.shape, self._order = inputs.shape, [*axes, *rest]
        self._rest = [inputs.shape[axis] for axis in rest]
        # torch puts the axes of the places where the indexed axes were, or in front if others lie between these.
        self._front = 0 if axes != list(range(axes[0], axes[-1] + 1)) else axes[0]
        self.places = self._numbers(inputs, indexed)

    @staticmethod
    def _numbers(inputs: Tensor, indexed: dict[int, Tensor]) -> Tensor:
        def number(size: int, counted: Tensor) -> Tensor:
            return torch.where(counted < 0, counted + size, counted)

        (first, start), *others = [(axis, index.long()) for axis, index in indexed.items()]
        places = number(inputs.shape[first], start)
        for axis, counted in others:
            places = places * inputs.shape[axis] + number(inputs.shape[axis], counted)
        return places

    def laid_out(self, inputs: Tensor) -> Tensor:
        """Values of the shape of `inputs` as (rows, values of a row)."""
        return inputs.permute(self._order).reshape(-1, math.prod(self._rest))

    def put_back(self, rows: Tensor) -> Tensor:
        """The inverse of `laid_out`."""
        whole = rows.reshape([self.shape[axis] for axis in self._order])
        return whole.permute([self._order.index(axis) for axis in range(len(self._order))])

    def at_places(self, rows: Tensor) -> Tensor:
        """(places, values of a row) with the axes in torch's order."""
        deep = self.places.dim()
        apart = rows.reshape(*self.places.shape, *self._rest)
        return apart.movedim(tuple(range(deep)), tuple(range(self._front, self._front + deep)))

    def of_places(self, values: Tensor) -> Tensor:
        """The inverse of `at_places`, for values that may have to be broadcast first."""
        deep = self.places.dim()
        shape = [*self._rest[: self._front], *self.places.shape, *self._rest[self._front :]]
        apart = values.expand(shape).movedim(tuple(range(self._front, self._front + deep)), tuple(range(deep)))
        return apart.reshape(-1, math.prod(self._rest))


def _has_mask(indices: Indices) -> bool:
    return any(index is not None and index.dtype in {torch.bool, torch.uint8} for index in indices)


def index(inputs: Tensor, indices: Indices) -> Any:
    """Rows of a table, looked up. Indexing by a mask is unchanged (NotImplemented), as its size depends on values."""
    if _has_mask(indices):
        return NotImplemented
    rows = _Rows(inputs, indices)
    values: Tensor = aten.embedding(rows.laid_out(inputs), rows.places.reshape(-1))
    return rows.at_places(values)


def index_put(inputs: Tensor, indices: Indices, values: Tensor, accumulate: bool = False) -> Any:
    """Write or add rows at indices. One index of the first axis is unchanged (NotImplemented)."""
    if _has_mask(indices):
        raise UnsupportedOperator("aten.index_put with a mask; use torch.where instead")
    only = indices[0] if len(indices) == 1 else None
    if only is not None and values.shape == (*only.shape, *inputs.shape[1:]):
        return NotImplemented
    rows = _Rows(inputs, indices)
    placed = (rows.places.reshape(-1),)
    written = aten.index_put(rows.laid_out(inputs), placed, rows.of_places(values), accumulate)
    return rows.put_back(written)


def index_select(inputs: Tensor, dim: int, places: Tensor) -> Any:
    """Look-ups along one axis, at places that cannot count from the end."""
    if not inputs.dim() or not inputs.numel():
        return NotImplemented
    moved = inputs.movedim(dim, 0)
    values: Tensor = aten.embedding(moved.reshape(moved.shape[0], -1), places.reshape(-1))
    return values.reshape(-1, *moved.shape[1:]).movedim(0, dim)
