"""Checks of what a pretrained model does: padding changes nothing, the next token is told unseen, and weights stay."""

from __future__ import annotations

import torch
from torch import Tensor

from export.errors import InvalidModel
from export.huggingface.modules import Text

CLOSE = 1e-4


def check_masks(folder: str, text: Text, tokens: int, is_next: bool) -> None:
    """Raise InvalidModel where padding changes what a model makes of a text, tokens change what precedes them, or the
    model its own weights.

    tokens: of a text. is_next: whether the model tells each token from those before it, which it must not see.
    """
    kind, padding = type(text.model).__name__, text.padding
    versions = {name: weight._version for name, weight in text.model.named_parameters()}
    with torch.device("cpu"), torch.no_grad():
        ids = (7 * torch.arange(tokens)[None] + 3) % (padding.ids[0] - 1)
        ids += (ids >= padding.stands).long()  # no text but the first of these has the token that stands for padding
        half = tokens // 2
        ending, other = ids.clone(), ids.clone()
        ending[:, half - 1], other[:, half:] = padding.stands, padding.stands
        for each, length in ((ending, half), (ids, half), (ids, 2)):
            padded = each.clone()
            padded[:, length:] = padding.ids[0]
            if not _alike(text(padded), text(each[:, :length])):
                raise InvalidModel(
                    f"{folder}: padding changes what {kind} makes of a text, so short ones cannot be filled"
                )
        if is_next and not _alike(text(ids), text(other), half):
            raise InvalidModel(
                f"{folder}: {kind} looks at tokens that follow, so it has seen what it is to tell; causal-lm needs a "
                "decoder"
            )
    for name, weight in text.model.named_parameters():
        if weight._version != versions[name]:
            raise InvalidModel(f"{folder}: {kind} changes its weight {name} when it runs, so it is not the folder's")


def _alike(a: Tensor, b: Tensor, places: int | None = None) -> bool:
    """Whether outputs are the same but for rounding, of tokens at those places that both have, or at the first ones."""
    if a.ndim == 3:
        a, b = (one[:, : places or min(a.shape[1], b.shape[1])] for one in (a, b))
    return not (a - b).abs().amax() > CLOSE * a.abs().amax()  # weights that are no numbers are found elsewhere
