"""Gated layers of language models that keep less for the gradient: down(silu(gate(x)) · up(x)).

Autograd keeps gate(x), its sigmoid, silu(gate(x)) and up(x). Two of these are made of the others at little cost, so
they are made again, once the gradient is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CLOSE = 1e-5
LARGE = 1e4
"""A factor at which a layer shows whether it holds values within bounds, as DeepSeek V4's does."""


class _GatedProduct(torch.autograd.Function):
    """silu(gate) · up."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        """Of the shape of both."""
        return gate * gate.sigmoid() * up

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep both."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients with respect to both."""
        gate, up = ctx.saved_tensors
        # But for a zero that it cannot foresee, a runtime would keep the sigmoid of the forward pass for this one.
        gate = gate + (gradient > torch.inf).to(torch.float32)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        return gradient * up * (sigmoid + silu * (1 - sigmoid)), gradient * silu


class Gated(nn.Module):
    """A gated layer of `transformers`, with the same parts under the same names."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = layer.gate_proj, layer.up_proj, layer.down_proj

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of x."""
        out: Tensor = self.down_proj(_GatedProduct.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-untyped-call]
        return out


def with_gated_layers(model: nn.Module) -> None:
    """Put such layers in place of those that a model has, where they compute the same."""
    for path, layer in list(model.named_modules()):
        if not all(hasattr(layer, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            continue
        gated, small = Gated(layer), torch.linspace(-3, 3, layer.gate_proj.in_features)[None]
        with torch.no_grad():
            is_same = all(
                _close(layer.act_fn(x), nn.functional.silu(x)) and _close(layer(x), gated(x))
                for x in (small, LARGE * small)
            )
        if is_same:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, gated)


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two differ by rounding alone: as a share of the largest value, since sums near zero have any error."""
    return bool((a - b).abs().amax() <= CLOSE * a.abs().amax())
