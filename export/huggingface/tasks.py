"""The tasks of pretrained models: a class of `transformers`, the fields of an example, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor, nn

from export.huggingface.modules import Padding
from export.huggingface.token_loss import DeferredLogits
from export.model import PerExample, accuracy, cross_entropy
from export.several_labels import (
    cross_entropy_of_labels,
    f1_of_labels,
    labels_right,
    mean_where,
    of_tokens,
)
from fedcore.plan import IGNORED, Field

TOKENS, LABEL, ANCHOR, POSITIVE = "tokens", "label", "anchor", "positive"
"""Fields of an example: tokens that the app makes; classes; and two texts that belong together."""
SCALE = 20.0
"""Of cosines, so that their softmax is sharp enough, as sentence-transformers has it."""
NEARLY, FAR = 1e-5, 1e4
"""How much further away a cosine must be, to be another; and what no score comes near."""


class Terms(NamedTuple):
    """The parts of a ModelSpec that depend on the task."""

    inputs: tuple[Field, ...]
    label: Field
    loss: PerExample
    metrics: Mapping[str, PerExample]
    compares: bool = False
    predicts: int | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """A task: its class in `transformers` and its name in `peft`; whether a head is trained as a whole.

    terms: of a text's field, the number of classes and what fills the text.
    """

    kind: str
    peft: str
    has_head: bool
    terms: Callable[[Field, int, Padding], Terms]


def _classes(text: Field, classes: int, padding: Padding) -> Terms:
    return Terms((text,), Field(LABEL, "int64", (), classes), cross_entropy, {"accuracy": accuracy})


def _several_labels(text: Field, classes: int, padding: Padding) -> Terms:
    label = Field(LABEL, "int64", (classes,), 2, ignored=IGNORED)
    figures = {"accuracy": labels_right, "f1": f1_of_labels}
    return Terms((text,), label, cross_entropy_of_labels, figures)


def _classes_of_tokens(text: Field, classes: int, padding: Padding) -> Terms:
    """Labels belong to tokens, so the app makes these."""
    label = Field(LABEL, "int64", text.shape, classes, ignored=IGNORED)
    loss, right = of_tokens(IGNORED)
    return Terms((replace(text, name=TOKENS, tokenizer=UNSET),), label, loss, {"accuracy": right})


def _next_tokens(text: Field, classes: int, padding: Padding) -> Terms:
    """The label is the text, of which every token but the first is to be told from those before it."""

    def against(logits: Tensor | DeferredLogits, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of every place (B, T): whether a token follows, its cross-entropy, and whether it is the likeliest."""
        follows = torch.cat((padding.real_of(tokens)[:, 1:], torch.zeros_like(tokens[:, :1])), 1)
        following = torch.cat((tokens[:, 1:], tokens[:, :1]), 1) * follows
        if isinstance(logits, DeferredLogits):
            return follows, *logits.against(following)
        each = nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none")
        return follows, each.reshape(tokens.shape), logits.argmax(-1) == following

    def loss(logits: Tensor | DeferredLogits, tokens: Tensor) -> Tensor:
        follows, entropy, _ = against(logits, tokens)
        return mean_where(follows, entropy)

    def right(logits: Tensor | DeferredLogits, tokens: Tensor) -> Tensor:
        follows, _, likeliest = against(logits, tokens)
        return mean_where(follows, likeliest)

    return Terms((text,), text, loss, {"accuracy": right})


def _pairs(text: Field, classes: int, padding: Padding) -> Terms:
    """Each text's partner among those of the batch (Henderson et al. 2017, arXiv:1705.00652, equation 5)."""
    first, second = (replace(text, name=name) for name in (ANCHOR, POSITIVE))

    def scores(vectors: tuple[Tensor, Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines (B,) of partners, and (B, B) of all texts with all partners, very low for those of padding."""
        anchor, positive = vectors
        return (anchor * positive).sum(1), anchor @ positive.T + (mask - 1) * FAR

    def loss(vectors: tuple[Tensor, Tensor], _: Tensor, mask: Tensor) -> Tensor:
        own, every = scores(vectors, mask)
        return (SCALE * every).logsumexp(1) - SCALE * own

    def found(vectors: tuple[Tensor, Tensor], _: Tensor, mask: Tensor) -> Tensor:
        own, every = scores(vectors, mask)
        return (every.amax(1) <= own + NEARLY).to(own.dtype)

    return Terms((first, second), second, loss, {"accuracy": found}, compares=True, predicts=1)


TASKS: dict[str, Task] = {
    "classification": Task("AutoModelForSequenceClassification", "SEQ_CLS", True, _classes),
    "multi-label": Task("AutoModelForSequenceClassification", "SEQ_CLS", True, _several_labels),
    "token-classification": Task("AutoModelForTokenClassification", "TOKEN_CLS", True, _classes_of_tokens),
    "causal-lm": Task("AutoModelForCausalLM", "CAUSAL_LM", False, _next_tokens),
    "embedding": Task("AutoModel", "FEATURE_EXTRACTION", False, _pairs),
}
