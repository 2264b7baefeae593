"""Built-in models of characters, words and bytes.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017; sizes as in Reddi et al., "Adaptive federated optimization", ICLR 2021, Table 9 (Shakespeare).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from export.model import ModelSpec
from export.tasks import next_token

CHARACTER_EMBEDDING, CHARACTER_HIDDEN, CHARACTER_LAYERS = 8, 256, 2


class CharLstm(nn.Module):
    """The network, with other sizes of its LSTM layers on demand."""

    def __init__(self, vocabulary: int, hidden: int = CHARACTER_HIDDEN, layers: int = CHARACTER_LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, CHARACTER_EMBEDDING)
        self.lstm = nn.LSTM(CHARACTER_EMBEDDING, hidden, layers, batch_first=True)
        self.dense = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the token after each."""
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.dense(hidden)
        return logits


def char_lstm(shape: tuple[int, ...] = (80,), classes: int = 90) -> ModelSpec:
    """D = 822,570 by default. `x` and `y` are int64 (length,): characters, and the ones that follow; 0 is padding."""
    return next_token("char_lstm", lambda: CharLstm(classes), shape, classes)


WORD_EMBEDDING, WORD_HIDDEN = 96, 670


# Next-word prediction: an embedding of 96, one LSTM layer of 670, a projection to 96, a dense layer at every word.
#
# Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021, Table 10
# (Stack Overflow).


class _WordLstm(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WORD_EMBEDDING)
        self.lstm = nn.LSTM(WORD_EMBEDDING, WORD_HIDDEN, batch_first=True)
        self.projection = nn.Linear(WORD_HIDDEN, WORD_EMBEDDING)
        self.dense = nn.Linear(WORD_EMBEDDING, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.dense(self.projection(hidden))
        return logits


def word_lstm(shape: tuple[int, ...] = (20,), classes: int = 10_004) -> ModelSpec:
    """D = 4,053,428 by default. `x` and `y` are int64 (length,): words, and the ones that follow; 0 is padding."""
    return next_token("word_lstm", lambda: _WordLstm(classes), shape, classes)


# A small causal transformer over bytes: three pre-norm blocks of width 128 with four heads.
#
# Vaswani et al., "Attention is all you need", NeurIPS 2017; normalisation before each part as in Radford et al.,
# "Language models are unsupervised multitask learners", 2019.

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
