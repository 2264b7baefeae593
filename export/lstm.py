"""An LSTM layer as one differentiable function that traces into few, large operators.

The input projection of all steps is one product, the steps are unrolled, and the backward pass keeps what depends on
time in the loop alone: factors of all steps are made at once, and every weight gradient is one product after the loop.
Derivation: docs/decisions/0010-forms-before-tracing.md.

Shapes: T steps, B batch, I inputs, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LstmLayer(torch.autograd.Function):
    """One direction of one layer; the gates lie in torch's order i, f, g, o."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        inputs: Tensor, h: Tensor, c: Tensor, from_input: Tensor, from_hidden: Tensor, bias: Tensor
    ) -> tuple[Tensor, ...]:
        """inputs (T, B, I), h and c (B, H), from_input (4H, I), from_hidden (4H, H), bias (4H).

        Gives outputs (T, B, H), the last h and c (B, H); and, for the backward pass, h before every step, c before and
        after it, and the gates, each (T, B, H).
        """
        projected = inputs @ from_input.t() + bias
        recurrent, size = from_hidden.t().contiguous(), h.shape[-1]
        before: list[Tensor] = []
        cells, gates, outputs = [c], [], []
        for step in range(inputs.shape[0]):
            before.append(h)
            both, g, o = torch.split(projected[step] + h @ recurrent, [2 * size, size, size], 1)
            entry, forget = torch.split(both.sigmoid(), size, 1)
            candidate, leave = g.tanh(), o.sigmoid()
            c = forget * c + entry * candidate
            h = leave * c.tanh()
            gates.append((entry, forget, candidate, leave))
            cells.append(c)
            outputs.append(h)
        stacked = (torch.stack(part) for part in zip(*gates, strict=True))
        kept = (torch.stack(before), torch.stack(cells[:-1]), torch.stack(cells[1:]), *stacked)
        return torch.stack(outputs), h.clone(), c.clone(), *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the backward pass needs."""
        x, _, _, from_input, from_hidden, _ = inputs
        ctx.save_for_backward(x, from_input, from_hidden, *output[3:])
        ctx.mark_non_differentiable(*output[3:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Gradients of every argument of `forward`."""
        x, from_input, from_hidden, before, cell, after, entry, forget, candidate, leave = ctx.saved_tensors
        d_outputs, d_h, d_c = grads[:3]
        steps, _, size = before.shape
        tanh_c = after.tanh()
        # What a gradient of h and of c becomes at each gate's input; nothing here depends on the steps after.
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
        d_gates: list[Tensor] = []
        for step in reversed(range(steps)):
            d_h = d_outputs[step] + d_h
            d_c = d_c + d_h * to_c[step]
            d_gates.append(torch.cat([d_c, d_c, d_c, d_h], -1) * to_gates[step])
            d_h = d_gates[-1] @ from_hidden
            d_c = d_c * forget[step]
        flat = torch.stack(d_gates[::-1]).reshape(-1, 4 * size)
        d_inputs = (flat @ from_input).reshape(x.shape)
        d_from_input, d_from_hidden = flat.t() @ x.flatten(0, 1), flat.t() @ before.flatten(0, 1)
        return d_inputs, d_h, d_c, d_from_input, d_from_hidden, flat.sum(0)


def _projected_layer(  # noqa: PLR0913, PLR0917, those of `LstmLayer.forward` and the projection
    inputs: Tensor, h: Tensor, c: Tensor, from_input: Tensor, from_hidden: Tensor, bias: Tensor, projection: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A direction of a layer whose h (B, P) is a projection (P, H) of the cell's output, step by step."""
    projected = inputs @ from_input.t() + bias
    outputs = []
    for step in range(inputs.shape[0]):
        entry, forget, candidate, leave = (projected[step] + h @ from_hidden.t()).chunk(4, 1)
        c = forget.sigmoid() * c + entry.sigmoid() * candidate.tanh()
        h = (leave.sigmoid() * c.tanh()) @ projection.t()
        outputs.append(h)
    return torch.stack(outputs), h, c


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
            given = (x.flip(0) if way else x, states[0][index], states[1][index], from_input, from_hidden, bias)
            results = (
                _projected_layer(*given, more[-1]) if projected else LstmLayer.apply(*given)  # type: ignore[no-untyped-call]
            )
            ways.append(results[0].flip(0) if way else results[0])
            last_h.append(results[1])
            last_c.append(results[2])
        x = torch.cat(ways, -1) if bidirectional else ways[0]
        if dropout and train and layer < layers - 1:
            x = torch.nn.functional.dropout(x.transpose(0, 1), dropout, train).transpose(0, 1)
    return x.transpose(0, 1) if batch_first else x, torch.stack(last_h), torch.stack(last_c)
