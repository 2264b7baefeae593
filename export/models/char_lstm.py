"""Next-character prediction: an embedding, two LSTM layers of 256, a dense layer at every character.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017; sizes as in Reddi et al., "Adaptive federated optimization", ICLR 2021, Table 9 (Shakespeare).
"""

from __future__ import annotations

from torch import Tensor, nn

from export.model import ModelSpec
from export.models.tasks import next_token

EMBEDDING, HIDDEN, LAYERS = 8, 256, 2


class _CharLstm(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, HIDDEN, LAYERS, batch_first=True)
        self.dense = nn.Linear(HIDDEN, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.dense(hidden)
        return logits


def char_lstm(shape: tuple[int, ...] = (80,), classes: int = 90) -> ModelSpec:
    """D = 822,570 by default. `x` and `y` are int64 (length,): characters, and the ones that follow; 0 is padding."""
    return next_token("char_lstm", lambda: _CharLstm(classes), shape, classes)
