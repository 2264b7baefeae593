"""Texts of examples as tokens: what an app keeps as UTF-8 becomes the integers that a plan trains on.

Spec: docs/spec/plan.md §1.3. `tokenizers` is the library of Hugging Face's models. Devices in TypeScript have a
tokenizer of their own, which gives the same tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from device_runtime.errors import STOPS, DeadlinePassed, ExamplesError, PlanRefused
from device_runtime.tokenizer_file import check, check_added
from fedcore.plan import Field

if TYPE_CHECKING:
    import tokenizers

INSTALL = "pip install 'muster-fl[text]'"
Ids = list[int]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens (n, T) of texts, and how many of the texts were too long."""

    ids: NDArray[np.int32]
    cut: int


@dataclass(frozen=True, slots=True)
class TextColumn:
    """The texts (n,) of a field, bytes in UTF-8; its tokenizer's file; the token `padding` fills short ones.

    The file comes from elsewhere: a trainer makes the tokens within its limits.
    """

    field: Field
    file: bytes
    padding: int
    texts: NDArray[np.object_]

    def tokens(self, keep_going: Callable[[], bool]) -> Tokens:
        """The tokens. keep_going: called before every text.

        Raises as LoadedTokenizer does; ExamplesError for what is no UTF-8; DeadlinePassed when `keep_going` returns
        false.
        """
        return LoadedTokenizer(self.field, self.file, self.padding).tokens(self._texts(keep_going), len(self.texts))

    def _texts(self, keep_going: Callable[[], bool]) -> Iterator[str]:
        for place, text in enumerate(self.texts):
            if not keep_going():
                raise DeadlinePassed("stopped while texts became tokens: the report would come too late")
            try:
                yield text.decode()
            except UnicodeDecodeError as error:
                words = f"field {self.field.name!r} of example {place} is not text in UTF-8"
                raise ExamplesError("invalid-examples", words) from error


class LoadedTokenizer:
    """A field's tokenizer, from its file. padding: the token that fills short texts.

    Raises PlanRefused when devices do not know it, when it does not load, fails, does not fit the field, or gives other
    tokens for the plan's trial of it.
    """

    def __init__(self, field: Field, file: bytes, padding: int) -> None:
        self._field, self._padding, library = field, padding, library_of(field)
        with _refusing(field, "does not load"):
            check(file)
            self._library = library.from_str(file.decode())
            check_added(self._library)
            for text, expected in field.tokenizer.trial if field.tokenizer is not UNSET else ():
                if self._library.encode(text).ids != list(expected):
                    raise PlanRefused(f"{text!r} has other tokens here than where the plan was exported")

    def tokens(self, texts: Iterable[str], count: int) -> Tokens:
        """The tokens of so many texts."""
        length, cut = self._field.shape[0], 0
        ids = np.full((count, length), self._padding, np.int32)
        for place, text in enumerate(texts):
            with _refusing(self._field, f"fails at the text of example {place}"):
                encoding = self._library.encode(text)
            whole = encoding.ids
            if len(whole) > length:
                whole, cut = _cut(self._field, whole, encoding.special_tokens_mask), cut + 1
            _check_fits(self._field, whole, self._padding)
            ids[place, : len(whole)] = whole
        return Tokens(ids, cut)


def has_library() -> bool:
    """Whether the library of tokenizers is installed."""
    return find_spec("tokenizers") is not None


def library_of(field: Field) -> type[tokenizers.Tokenizer]:
    """The library, for the tokens of a field. Raises PlanRefused where there is none."""
    try:
        from tokenizers import Tokenizer as Library
    except ImportError as error:
        raise PlanRefused(f"field {field.name!r} is text, which needs a tokenizer here: {INSTALL}") from error
    return Library


@contextlib.contextmanager
def _refusing(field: Field, what: str) -> Iterator[None]:
    try:
        yield
    except STOPS:
        raise
    except BaseException as error:  # the library raises Exception itself, and panics with what is not even that
        raise PlanRefused(f"the tokenizer of field {field.name!r} {what}: {error}") from error


def _check_fits(field: Field, ids: Ids, padding: int) -> None:
    if padding in ids:
        raise PlanRefused(
            f"the tokenizer of field {field.name!r} gives token {padding}, which is the field's padding: export it "
            "with one that no text has"
        )
    if max(ids, default=0) >= (field.high or 0):
        raise PlanRefused(
            f"the tokenizer of field {field.name!r} gives token {max(ids)}; the model knows those below {field.high}: "
            "export it with the tokenizer that it was trained with"
        )


def _cut(field: Field, whole: Ids, is_around: Ids) -> Ids:
    """The tokens of a text with its last own ones left out, so that those around it, such as [SEP], stay."""
    around, length = sum(is_around), field.shape[0]
    if around >= length:
        raise PlanRefused(
            f"field {field.name!r} has room for {length} tokens, and its tokenizer adds {around} to every text: "
            "export it with more tokens"
        )
    first = is_around.index(0)
    return whole[: first + length - around] + whole[first + len(whole) - around :]
