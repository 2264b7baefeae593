"""Next-word prediction: an embedding of 96, one LSTM layer of 670, a projection to 96, a dense layer at every word.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021, Table 10
(Stack Overflow).
"""

from __future__ import annotations

from torch import Tensor, nn

from export.model import ModelSpec
from export.models.tasks import next_token

EMBEDDING, HIDDEN = 96, 670


class _WordLstm(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, HIDDEN, batch_first=True)
        self.projection = nn.Linear(HIDDEN, EMBEDDING)
        self.dense = nn.Linear(EMBEDDING, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.dense(self.projection(hidden))
        return logits


def word_lstm(shape: tuple[int, ...] = (20,), classes: int = 10_004) -> ModelSpec:
    """D = 4,053,428 by default. `x` and `y` are int64 (length,): words, and the ones that follow; 0 is padding."""
    return next_token("word_lstm", lambda: _WordLstm(classes), shape, classes)
