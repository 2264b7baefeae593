"""Pretrained models of tokens as modules: of a text's logits, and of its vector. Padding counts for nothing in them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from export.errors import InvalidModel, reason
from export.huggingface.token_loss import DeferredLogits


class Padding(NamedTuple):
    """The numbers that fill short texts, and the token that a model reads in their place, masked."""

    ids: tuple[int, ...]
    stands: int

    def real_of(self, tokens: Tensor) -> Tensor:
        """Where tokens (B, T) are those of a text: 1, and 0 where they fill it."""
        real = (tokens != self.ids[0]).long()
        for one in self.ids[1:]:
            real = real * (tokens != one).long()
        return real


class Text(nn.Module):
    """A pretrained model of tokens. Padding is masked out."""

    def __init__(self, model: Any, padding: Padding) -> None:
        super().__init__()
        self.model, self.padding, self.without_logits = model, padding, False

    def forward(self, tokens: Tensor) -> Tensor | DeferredLogits:
        """Logits: (B, classes), (B, T, classes), or (B, T, vocabulary). Training may do without these."""
        given = self.given(tokens)
        with _as_traced():
            if self.training and self.without_logits:
                last = self.model.get_output_embeddings().weight_in_bits
                return DeferredLogits(
                    self.model.base_model(**given).last_hidden_state, last.codes, last.scales, last.bits
                )
            logits: Tensor = self.model(**given).logits
            return logits

    def given(self, tokens: Tensor) -> dict[str, Tensor]:
        """What the model reads."""
        ids, real = tokens.long(), self.padding.real_of(tokens)
        return {"input_ids": torch.where(real > 0, ids, self.padding.stands), "attention_mask": real}


class LastToken(Text):
    """A pretrained decoder that tells the class of a text from the values of its last token.

    That of `transformers` takes the last token that is not the one of padding, which may be one of the text.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, classes)."""
        given = self.given(tokens)
        with _as_traced():
            logits: Tensor = self.model.score(self.model.base_model(**given).last_hidden_state)
        real = given["attention_mask"]
        last = real * (real.cumsum(1) == real.sum(1, keepdim=True))
        return (logits * last.unsqueeze(-1)).sum(1)


class Sentences(Text):
    """A pretrained model whose values for a text become one vector of length 1."""

    def __init__(self, model: Any, padding: Padding, pooling: str) -> None:
        super().__init__(model, padding)
        self.pooling = pooling

    def forward(self, anchor: Tensor, positive: Tensor | None = None) -> Any:
        """Vectors (B, H) of texts; of pairs of texts, one after the other."""
        if positive is None:
            return self._vectors(anchor)
        both = self._vectors(torch.cat((anchor, positive)))
        return tuple(both.reshape(2, anchor.shape[0], both.shape[1]))

    def _vectors(self, tokens: Tensor) -> Tensor:
        given = self.given(tokens)
        with _as_traced():
            values: Tensor = self.model(**given).last_hidden_state
        real = given["attention_mask"].unsqueeze(-1).to(values.dtype)
        pooled = values[:, 0] if self.pooling == CLS else (values * real).sum(1) / real.sum(1).clamp(min=1)
        return pooled * (pooled.square().sum(1, keepdim=True) + 1e-12).rsqrt()  # whose gradient at 0 is finite


MEAN, CLS = "mean", "cls"
"""How the values of a text become one vector: their mean over what is no padding, or those of the first token."""
MODULES = "modules.json"
CHANGES = {"sentence_bert_config.json": "do_lower_case", "config_sentence_transformers.json": "default_prompt_name"}
"""Settings by which sentence-transformers changes a text before anything reads it, by their file."""


def pooling_of(folder: Path) -> str:
    """The pooling that sentence-transformers notes in a folder, else the mean.

    Raises InvalidModel for another, and for a folder by which sentence-transformers changes texts first.
    """
    if not (folder / MODULES).is_file():
        return MEAN
    try:
        changes = list(_changes(folder))
        modules = {_name(one["type"]): one["path"] for one in json.loads((folder / MODULES).read_bytes())}
        path = modules.pop("Pooling", None)
        noted = {} if path is None else json.loads((folder / path / "config.json").read_bytes())
        modes = [name for name, value in noted.items() if name.startswith("pooling_mode_") and value]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidModel(f"{folder / MODULES} is not as sentence-transformers writes it: {reason(error)}") from error
    if changes:
        raise InvalidModel(
            f"{folder} has {changes[0]}: sentence-transformers changes every text by it, and devices do not; have your "
            "app change texts so, and take the setting out"
        )
    modes = modes or [f"pooling_mode_{noted.get('pooling_mode', MEAN)}_tokens"]
    known = {"pooling_mode_mean_tokens": MEAN, "pooling_mode_cls_token": CLS, "pooling_mode_cls_tokens": CLS}
    if (unknown := sorted(modules.keys() - {"Transformer", "Normalize"})) or len(modes) > 1 or modes[0] not in known:
        what = f"the module {unknown[0]}" if unknown else " and ".join(modes)
        raise InvalidModel(
            f"{folder / MODULES} has {what}; known are the poolings mean_tokens and cls_token, followed by Normalize"
        )
    return known[modes[0]]


def _name(type_: str) -> str:
    """Of a module of sentence-transformers alone; one of a folder's own code may do anything under the same name."""
    return type_.rpartition(".")[2] if type_.startswith("sentence_transformers.") else type_


def _changes(folder: Path) -> Iterator[str]:
    for file, setting in CHANGES.items():
        if (folder / file).is_file() and json.loads((folder / file).read_bytes()).get(setting):
            yield f"{setting} in {file}"


@contextlib.contextmanager
def _as_traced() -> Iterator[None]:
    """A block in which `transformers` makes its masks without looking at values, as when it is traced.

    The values of several clients at once, under vmap, cannot be looked at; masks are the same, only never left out.
    """
    from transformers import masking_utils

    masks: Any = masking_utils
    was, masks.is_tracing = masks.is_tracing, lambda tensor=None: True
    try:
        yield
    finally:
        masks.is_tracing = was
