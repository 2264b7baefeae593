"""Characters as tokens: the alphabet of the published Shakespeare studies, and windows of text to train on.

The alphabet is that of Reddi et al., "Adaptive federated optimization", ICLR 2021, Appendix C.3: 86 characters, and
tokens for padding, an unknown character, and the start and the end of an utterance. So a model has the same size for
any part of Shakespeare.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

CHARACTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
# Padding is 0, which token models exclude from loss and accuracy.
UNKNOWN, START, END = (len(CHARACTERS) + place for place in (1, 2, 3))
WINDOW = 80
_TOKENS = {character: token for token, character in enumerate(CHARACTERS, start=1)}


def characters(text: str) -> list[int]:
    """The token of each character."""
    return [_TOKENS.get(character, UNKNOWN) for character in text]


def tokens(utterances: Iterable[str]) -> NDArray[np.int64]:
    """The tokens of utterances, one after the other, each between START and END: (length,)."""
    spoken = [[START, *characters(text), END] for text in utterances]
    return np.array([token for utterance in spoken for token in utterance], np.int64)


def windows(stream: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Windows `x` (windows, WINDOW) of a stream of tokens, and `y`, the token that follows each; the last is padded.

    Every token but the first is predicted once. A stream of fewer than two tokens has no window.
    """
    count = -(-max(len(stream) - 1, 0) // WINDOW)
    padded = np.zeros(count * WINDOW + 1, np.int64)
    padded[: len(stream)] = stream[: len(padded)]
    return {"x": padded[:-1].reshape(count, WINDOW), "y": padded[1:].reshape(count, WINDOW)}
