"""A small causal transformer over bytes: three pre-norm blocks of width 128 with four heads.

Vaswani et al., "Attention is all you need", NeurIPS 2017; normalisation before each part as in Radford et al.,
"Language models are unsupervised multitask learners", 2019.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from export.model import ModelSpec
from export.models.tasks import next_token

WIDTH, HEADS, LAYERS = 128, 4, 3


class _Block(nn.Module):
    """Causal self-attention and a two-layer network, each on a normalised copy that is added back."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.dense_norm = nn.LayerNorm(WIDTH)
        self.dense = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(self.attention_norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).flatten(2))
        after: Tensor = x + self.dense(self.dense_norm(x))
        return after


class _Transformer(nn.Module):
    def __init__(self, length: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Parameter(torch.randn(length, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(_Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.dense = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.dense(self.norm(self.blocks(self.embedding(tokens) + self.position)))
        return logits


def transformer(shape: tuple[int, ...] = (32,), classes: int = 256) -> ModelSpec:
    """D = 664,960 by default. `x` and `y` are int64 (length,): bytes, and the ones that follow; 0 is padding."""
    return next_token("transformer", lambda: _Transformer(shape[0], classes), shape, classes)
