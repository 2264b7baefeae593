"""Next-character prediction: an embedding, two LSTM layers of 256, a dense layer at every character.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017; sizes as in Reddi et al., "Adaptive federated optimization", ICLR 2021, Table 9 (Shakespeare).
"""

from __future__ import annotations

from torch import Tensor, nn

from export.errors import InvalidModel
from export.model import ModelSpec, token_accuracy, token_cross_entropy
from fedcore.plan import Field

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
    if len(shape) != 1:
        raise InvalidModel(f"char_lstm reads sequences of one axis, not examples of shape {list(shape)}")
    return ModelSpec(
        name="char_lstm",
        make=lambda: _CharLstm(classes),
        loss=token_cross_entropy,
        inputs=(Field("x", "int64", shape, high=classes),),
        label=Field("y", "int64", shape, high=classes),
        metrics={"accuracy": token_accuracy},
    )
