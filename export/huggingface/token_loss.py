"""The loss of next tokens from the values before the last layer, whose weight is in few bits: panel by panel.

Logits of 128 tokens over 49,152 words are 25 MB, and a plain loss holds four such arrays: logits, their logarithms, the
one-hot truth, and the gradient. Here a step holds one panel of them: sums of exponentials, and of rows that these
weigh, go from panel to panel, scaled to the largest logit so far. So the gradient is there when the loss is, and each
panel is made once (as attention in Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", NeurIPS 2022).

Shapes: N tokens, H values of each, V words, P words of a panel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from export.few_bits import made, panels, part_of, product, rows_at


class DeferredLogits:
    """What logits are made of, in their place. states: (B, T, H)."""

    def __init__(self, states: Tensor, codes: Tensor, scales: Tensor, bits: int) -> None:
        self._states, self._weight = states, (codes, scales, bits)
        self._found: tuple[Tensor, Tensor] | None = None

    def against(self, following: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy and whether the largest logit is right, (B, T) each, of tokens (B, T). They are made once."""
        if self._found is None:
            flat = self._states.flatten(0, 1)
            entropy, right, *_ = _TokenLoss.apply(flat, following.flatten(), *self._weight)  # type: ignore[no-untyped-call]
            self._found = entropy.reshape(following.shape), right.reshape(following.shape)
        return self._found


class _TokenLoss(torch.autograd.Function):
    """Cross-entropy (N,) of states (N, H) and a weight in few bits against tokens (N,)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(states_NH: Tensor, tokens_N: Tensor, codes: Tensor, scales: Tensor, bits: int) -> tuple[Tensor, ...]:
        """Cross-entropy (N,), whether the largest logit is right (N,), and the gradient of the first (N, H)."""
        largest = states_NH[:, 0] * 0 - torch.inf
        total, truth, pull_NH = states_NH[:, 0] * 0, states_NH[:, 0] * 0, states_NH * 0
        after = states_NH
        for panel in panels(codes.shape[0], states_NH.shape[-1]):
            rows = made(codes, scales, bits, panel, after)
            part_NP = product(states_NH, rows)
            next_largest = torch.maximum(largest, part_NP.amax(1))
            shrink, weights_NP = (largest - next_largest).exp(), (part_NP - next_largest[:, None]).exp()
            total = total * shrink + weights_NP.sum(1)
            pull_NH = pull_NH * shrink[:, None] + part_of(weights_NP, rows)
            largest = next_largest
            place = (tokens_N - panel.first).clamp(0, part_NP.shape[1] - 1)
            found = part_NP.gather(1, place[:, None]).squeeze(1)
            truth = torch.where(tokens_N - panel.first == place, found, truth)
            after = pull_NH[:, 0] + total + truth  # all that needs this panel
        gradient_NH = pull_NH / total[:, None] - rows_at(codes, scales, bits, tokens_N)
        return largest + total.log() - truth, (truth >= largest).to(torch.float32), gradient_NH

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep the gradient."""
        ctx.save_for_backward(output[2])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient with respect to states, (N, H)."""
        (gradient_NH,) = ctx.saved_tensors
        return gradients[0][:, None] * gradient_NH, None, None, None, None
