"""Texts of examples as tokens: what an app keeps as UTF-8 becomes the integers that a plan trains on.

Spec: docs/spec/plan.md §1.3. `tokenizers` is the library of Hugging Face's models. Devices in TypeScript have a
tokenizer of their own, which gives the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from device_runtime.errors import PlanRefused
from device_runtime.examples.source import invalid
from fedcore.plan import BlobRef, Field, Tokenizer

INSTALL = "pip install 'muster-fl[text]'"
Ids = list[int]


class Texts:
    """Makes tokens of texts with a plan's tokenizers. blob: gets their files. `cut`: texts that were too long."""

    def __init__(self, blob: Callable[[BlobRef], bytes]) -> None:
        self._blob, self.cut = blob, 0

    def tokenize(self, field: Field, tokenizer: Tokenizer, texts: NDArray[np.uint8]) -> NDArray[np.int32]:
        """Texts (n, bytes), UTF-8 and zeros, as the field's tokens (n, T).

        Raises PlanRefused when the tokenizer does not load, or does not fit the field; ExamplesError for what is no
        UTF-8; and what `blob` raises.
        """
        encode, length = _loaded(field, self._blob(tokenizer.blob)), field.shape[0]
        ids = np.full((len(texts), length), tokenizer.padding, np.int32)
        for place, row in enumerate(texts):
            try:
                text = row.tobytes().rstrip(b"\0").decode()
            except UnicodeDecodeError as error:
                raise invalid(f"field {field.name!r} of example {place} is not text in UTF-8") from error
            whole = encode(text, True)
            if len(whole) > length:
                whole, self.cut = _cut(field, whole, encode(text, False)), self.cut + 1
            if max(whole, default=0) >= (field.high or 0):
                raise PlanRefused(
                    f"the tokenizer of field {field.name!r} gives token {max(whole)}; the model knows those below "
                    f"{field.high}: export it with the tokenizer that it was trained with"
                )
            ids[place, : len(whole)] = whole
        return ids


def _cut(field: Field, whole: Ids, plain: Ids) -> Ids:
    """The tokens of a text with its last own ones left out, so that those around it, such as [SEP], stay."""
    around, length = len(whole) - len(plain), field.shape[0]
    if around >= length:
        raise PlanRefused(
            f"field {field.name!r} has room for {length} tokens, and its tokenizer adds {around} to every text: "
            "export it with more tokens"
        )
    before = next((k for k in range(around + 1) if whole[k : k + len(plain)] == plain), 0)
    return whole[: before + length - around] + whole[before + len(plain) :]


def _loaded(field: Field, data: bytes) -> Callable[[str, bool], Ids]:
    try:
        from tokenizers import Tokenizer as Library
    except ImportError as error:
        raise PlanRefused(f"field {field.name!r} is text, which needs a tokenizer here: {INSTALL}") from error
    try:
        library = Library.from_str(data.decode())
    except Exception as error:  # the library raises Exception itself
        raise PlanRefused(f"the tokenizer of field {field.name!r} does not load: {error}") from error
    library.no_padding()
    library.no_truncation()
    return lambda text, around: list(library.encode(text, add_special_tokens=around).ids)
