"""Next-character prediction: an embedding, two LSTM layers of 256, a dense layer at every character.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017; sizes as in Reddi et al., "Adaptive federated optimization", ICLR 2021, Table 9 (Shakespeare).
"""

from __future__ import annotations

from torch import Tensor, nn

from export.model import ModelSpec
from export.models.tasks import next_token

EMBEDDING, HIDDEN, LAYERS = 8, 256, 2


class CharLstm(nn.Module):
    """The network, with other sizes of its LSTM layers on demand."""

    def __init__(self, vocabulary: int, hidden: int = HIDDEN, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, hidden, layers, batch_first=True)
        self.dense = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the token after each."""
        hidden, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.dense(hidden)
        return logits


def char_lstm(shape: tuple[int, ...] = (80,), classes: int = 90) -> ModelSpec:
    """D = 822,570 by default. `x` and `y` are int64 (length,): characters, and the ones that follow; 0 is padding."""
    return next_token("char_lstm", lambda: CharLstm(classes), shape, classes)
