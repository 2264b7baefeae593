"""LSTM layers as differentiable functions that trace into few, large operators.

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

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan_op
from torch.fx.experimental.proxy_tensor import get_proxy_mode

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
