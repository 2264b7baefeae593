"""LSTM layers, group normalisation and look-ups in few operators that every runtime has.

The input projection of all steps is one product. The backward pass has only time-dependent work in the loop: factors of
all steps are computed at once, and every weight gradient is one product after the loop. The loop itself is `unrolled`,
or the trace's table replaces it by `scanned`, which is one operator for any number of steps.

A step is z = x Wᵢᵀ + h Wₕᵀ + b with gates i, f, o = σ(z) and g = tanh(z), c' = f c + i g, h' = o tanh c'. Backward, δc
grows by δh · o (1 − tanh² c'), and the gradient of z is, in the order i, f, g, o,

    (δc, δc, δc, δh) · (g i (1 − i), c f (1 − f), i (1 − g²), tanh c' · o (1 − o))

The second factor does not depend on later steps.

Shapes: T steps, B batch, I inputs, H hidden, P hidden after a projection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from export.errors import UnsupportedOperator

Cell = Callable[..., list[Tensor]]
"""One step of a loop over time: from the state, the step's parts and shared values to the next state and results."""


def unrolled(
    cell: Cell, state: Sequence[Tensor], parts: Sequence[Tensor], shared: Sequence[Tensor], reverse: bool = False
) -> list[Tensor]:
    """The last state, and the results of all steps, each (T, …).

    parts: of all steps too, (T, …). reverse: begin with the last step.
    """
    steps = range(parts[0].shape[0])
    results: list[Sequence[Tensor]] = []
    for step in reversed(steps) if reverse else steps:
        after = cell(*state, *(part[step] for part in parts), *shared)
        state, result = after[: len(state)], after[len(state) :]
        results.append(result)
    return [*state, *map(torch.stack, zip(*results[:: -1 if reverse else 1], strict=True))]


def scanned(
    cell: Cell, state: Sequence[Tensor], parts: Sequence[Tensor], shared: Sequence[Tensor], reverse: bool = False
) -> list[Tensor]:
    """As `unrolled`, by torch's operator, which has no reverse, and whose results may not share memory."""

    def apart(*inputs: Tensor) -> list[Tensor]:
        return [value.clone() for value in cell(*inputs)]

    if not reverse:
        return list(scan_op(apart, state, parts, shared))
    after = scan_op(apart, state, [part.flip(0) for part in parts], shared)
    return [*after[: len(state)], *(result.flip(0) for result in after[len(state) :])]


def _over_time(*loop: Any, **options: Any) -> list[Tensor]:
    mode = get_proxy_mode()
    forms: Any = mode.decomposition_table if mode else {}
    outputs: list[Tensor] = forms.get(unrolled, unrolled)(*loop, **options)
    return outputs


def _forward_cell(h: Tensor, c: Tensor, projected: Tensor, recurrent: Tensor, *projection: Tensor) -> list[Tensor]:
    """The next h (B, P) and c (B, H); then these two again, and the gates: i and f (B, 2H), g and o (B, H)."""
    size = c.shape[-1]
    both, g, o = torch.split(projected + h @ recurrent, [2 * size, size, size], 1)
    both, candidate, leave = both.sigmoid(), g.tanh(), o.sigmoid()
    entry, forget = torch.split(both, size, 1)
    c = forget * c + entry * candidate
    h = leave * c.tanh()
    for weight in projection:
        h = h @ weight.t()
    return [h, c, h, c, both, candidate, leave]


def _backward_cell(  # noqa: PLR0913, PLR0917, two of state, four of a step, and the weights
    d_h: Tensor,
    d_c: Tensor,
    d_output: Tensor,
    to_c: Tensor,
    to_gates: Tensor,
    forget: Tensor,
    from_hidden: Tensor,
    *projection: Tensor,
) -> list[Tensor]:
    """The gradients of h (B, P) and c (B, H) before a step; of the gates' inputs (B, 4H), and of h after the step."""
    d_h = d_output + d_h
    d_out = d_h
    for weight in projection:
        d_out = d_h @ weight
    d_c = d_c + d_out * to_c
    d_gates = torch.cat([d_c, d_c, d_c, d_out], -1) * to_gates
    return [d_gates @ from_hidden, d_c * forget, d_gates, *(d_h for _ in projection)]


class LstmLayer(torch.autograd.Function):
    """One direction of one layer; the gates lie in torch's order i, f, g, o."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        inputs: Tensor, h: Tensor, c: Tensor, from_input: Tensor, from_hidden: Tensor, bias: Tensor, *projection: Tensor
    ) -> tuple[Tensor, ...]:
        """inputs (T, B, I), h (B, P), c (B, H), from_input (4H, I), from_hidden (4H, P), bias (4H), projection (P, H).

        Without a projection P is H. Gives outputs (T, B, P), the last h and c; and, for the backward pass, c after
        every step (T, B, H), and the gates: i and f (T, B, 2H), g and o (T, B, H).
        """
        projected = inputs @ from_input.t() + bias
        shared = [from_hidden.t().contiguous(), *projection]
        last_h, last_c, outputs, *saved = _over_time(_forward_cell, [h, c], [projected], shared)
        return outputs, last_h.clone(), last_c.clone(), *saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the backward pass needs."""
        x, h, c, from_input, from_hidden, _, *projection = inputs
        ctx.save_for_backward(x, h, c, from_input, from_hidden, output[0], *output[3:], *projection)
        ctx.mark_non_differentiable(*output[3:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Gradients of every argument of `forward`."""
        x, h, c, from_input, from_hidden, outputs, after, both, candidate, leave, *projection = ctx.saved_tensors
        d_outputs, d_h, d_c = grads[:3]
        entry, forget = torch.split(both, c.shape[-1], -1)
        before, cell = (torch.cat([first.unsqueeze(0), rest[:-1]]) for first, rest in ((h, outputs), (c, after)))
        tanh_c = after.tanh()
        # The factors from a gradient of the cell's output and of c to each gate's input; none depends on the steps
        # after.
        to_c = leave * (1 - tanh_c * tanh_c)
        to_gates = torch.cat(
            [
                candidate * entry * (1 - entry),
                cell * forget * (1 - forget),
                entry * (1 - candidate * candidate),
                tanh_c * leave * (1 - leave),
            ],
            -1,
        )
        parts = [d_outputs, to_c, to_gates, forget]
        d_h, d_c, d_gates, *d_after = _over_time(
            _backward_cell, [d_h, d_c], parts, [from_hidden, *projection], reverse=True
        )
        flat = d_gates.flatten(0, 1)
        d_from_input, d_from_hidden = flat.t() @ x.flatten(0, 1), flat.t() @ before.flatten(0, 1)
        d_projection = [part.flatten(0, 1).t() @ (leave * tanh_c).flatten(0, 1) for part in d_after]
        d_inputs = (flat @ from_input).reshape(x.shape)
        return d_inputs, d_h, d_c, d_from_input, d_from_hidden, flat.sum(0), *d_projection


def lstm(  # noqa: PLR0913, PLR0917, torch's own signature
    inputs: Tensor,
    states: tuple[Tensor, Tensor],
    weights: list[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`torch.lstm`: outputs (T, B, P·ways), and the last h (layers·ways, B, P) and c (layers·ways, B, H).

    P is H, but for layers with a projection from H to P.
    """
    projected = states[0].shape[-1] != states[1].shape[-1]
    per_layer = (4 if has_biases else 2) + projected
    x = inputs.transpose(0, 1) if batch_first else inputs
    last_h, last_c = [], []
    for layer in range(layers):
        ways = []
        for way in range(1 + bidirectional):
            index = layer * (1 + bidirectional) + way
            from_input, from_hidden, *more = weights[index * per_layer : (index + 1) * per_layer]
            bias = more[0] + more[1] if has_biases else from_input.new_zeros(from_input.shape[0])
            arguments = (x.flip(0) if way else x, states[0][index], states[1][index], from_input, from_hidden, bias)
            projection = more[-1:] if projected else []
            results = LstmLayer.apply(*arguments, *projection)  # type: ignore[no-untyped-call]
            ways.append(results[0].flip(0) if way else results[0])
            last_h.append(results[1])
            last_c.append(results[2])
        x = torch.cat(ways, -1) if bidirectional else ways[0]
        if dropout and train and layer < layers - 1:
            x = torch.nn.functional.dropout(x.transpose(0, 1), dropout, train).transpose(0, 1)
    return x.transpose(0, 1) if batch_first else x, torch.stack(last_h), torch.stack(last_c)


# Group normalisation in few operators, with statistics by sums, so that the gradient rarely reads the large arrays.
#
# Shapes: B batch, C channels, G groups, S positions of a channel; values are seen as (B, G, C / G, S).


def group_norm(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten.native_group_norm`: the normalised values, and mean and 1 / deviation of each group (B, G).

    sizes: batch, channels, positions, groups and epsilon, as the operator has them.
    """
    *_, groups, epsilon = sizes
    x = _by_group(inputs, groups)
    mean = x.mean((2, 3), keepdim=True)
    centred = x - mean
    rstd = ((centred * centred).mean((2, 3), keepdim=True) + epsilon).rsqrt()
    out = centred * (rstd if weight is None else rstd * _each_channel(weight, groups))
    out = out if bias is None else out + _each_channel(bias, groups)
    return out.reshape(inputs.shape), mean.squeeze((2, 3)), rstd.squeeze((2, 3))


def group_norm_backward(
    grad_output: Tensor, inputs: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *sizes: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias, by two sums over positions. sizes: with the mask of those wanted behind."""
    _, channels, positions, groups, output_mask = sizes
    grad, x = _by_group(grad_output, groups), _by_group(inputs, groups)
    rstd = rstd[:, :, None, None]
    centred = x - mean[:, :, None, None]
    sums, along = grad.sum(3, keepdim=True), (grad * centred).sum(3, keepdim=True) * rstd
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        gain = rstd if weight is None else rstd * _each_channel(weight, groups)
        share = gain * (groups / (positions * channels))
        level, slope = ((share * part).sum(2, keepdim=True) for part in (sums, along))
        grad_input = (grad * gain - centred * (slope * rstd) - level).reshape(inputs.shape)
    if output_mask[1]:
        grad_weight = along.sum(0).reshape(channels)
    if output_mask[2]:
        grad_bias = sums.sum(0).reshape(channels)
    return grad_input, grad_weight, grad_bias


def _by_group(values: Tensor, groups: int) -> Tensor:
    batch, channels, *positions = values.shape
    return values.reshape(batch, groups, channels // groups, math.prod(positions))


def _each_channel(values: Tensor, groups: int) -> Tensor:
    """(C,) -> (G, C / G, 1), which broadcasts to all positions."""
    return values.reshape(groups, -1, 1)


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
