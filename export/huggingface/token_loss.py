"""The loss of next tokens from the values before the last layer, whose weight is in few bits: panel by panel.

Logits of 128 tokens over 49,152 words are 25 MB, and a plain loss holds four such arrays: logits, their logarithms, the
one-hot truth, and the gradient. Here a step holds the logits alone; the gradient of a panel is multiplied at once.

Shapes: N tokens, H values of each, V words, P words of a panel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from export.few_bits import panels, part_of, product


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
        """Cross-entropy, whether the largest is right, the logarithms of sums (N,) each, and the logits by panels."""
        logits: list[Tensor] = []
        largest = states_NH[:, 0] * 0 - torch.inf
        total = truth = states_NH[:, 0] * 0
        for panel in panels(codes.shape[0], states_NH.shape[-1]):
            part_NP = product(states_NH, codes, scales, bits, panel, logits[-1] if logits else states_NH)
            logits.append(part_NP)
            next_largest = torch.maximum(largest, part_NP.amax(1))
            total = total * (largest - next_largest).exp() + (part_NP - next_largest[:, None]).exp().sum(1)
            largest = next_largest
            place = (tokens_N - panel.first).clamp(0, part_NP.shape[1] - 1)
            found = part_NP.gather(1, place[:, None]).squeeze(1)
            truth = torch.where(tokens_N - panel.first == place, found, truth)
        sums = largest + total.log()
        return sums - truth, (truth >= largest).to(torch.float32), sums, *logits

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the gradient needs."""
        _, tokens, codes, scales, ctx.bits = inputs
        ctx.inputs = inputs[0].shape[-1]
        ctx.save_for_backward(tokens, codes, scales, *output[2:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient with respect to states, (N, H)."""
        tokens_N, codes, scales, sums_N, *logits = ctx.saved_tensors
        after, total = gradients[0], torch.zeros(())
        for panel, part_NP in zip(panels(codes.shape[0], ctx.inputs), logits, strict=True):
            words = torch.arange(panel.first, panel.behind)
            truth_NP = (tokens_N[:, None] == words).to(torch.float32)
            gradient_NP = ((part_NP - sums_N[:, None]).exp() - truth_NP) * gradients[0][:, None]
            part = part_of(gradient_NP, codes, scales, ctx.bits, panel, after)
            after = total = total + part if panel.first else part
        return total, None, None, None, None
