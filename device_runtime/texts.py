"""Texts of examples as tokens: the file of a tokenizer, which means the same everywhere, and its use on columns.

Spec: docs/spec/plan.md §1.3. `tokenizers` is the library of Hugging Face's models. Devices in TypeScript have a
tokenizer of their own, which gives the same tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import UNSET, Meta, Struct
from numpy.typing import NDArray

from device_runtime.errors import STOPS, DeadlinePassed, ExamplesError, PlanRefused
from fedcore.plan import Field
from fedcore.validation import UNDECODABLE, decoder

if TYPE_CHECKING:
    import tokenizers


# The file of a tokenizer, with its expressions: what means the same to devices in every language.
#
# device_runtime/js/src/core/texts/tokenizer-file.ts is the same table. Spec: docs/spec/plan.md §1.3.


# Expressions of tokenizers: what devices know of them.
#
# Devices match in a time that is linear in the text, which needs groups that do not repeat. The same as
# device_runtime/js/src/core/texts/expression.ts. Spec: docs/spec/plan.md §1.3.

TOKEN = re.compile(
    r"\\[pP]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]|\((?:\?(?:i?:|[=!]|.?))?|(?:[*+?]|\{\d+(?:,\d*)?\})[*+?]?|.", re.DOTALL
)
"""A part of an expression."""
ESCAPE = r"\\(?:[pP]\{(?:L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|C[cfnos]?)\}|[sd])"
LETTER = r"(?:\\[nrtfv]|\\[^A-Za-z0-9]|&(?!&)|[^\[\]\\&-])"
CLASS = rf"\[(?!\^?\])\^?-?(?:{ESCAPE}|{LETTER}(?:-{LETTER})?)*-?\]"
KNOWN = re.compile(rf"[^$^{{[\\]|\\[SDnrtfv]|\\[^A-Za-z0-9]|{ESCAPE}|{CLASS}", re.DOTALL)
"""One letter: itself, an escape or a class."""
OF_LETTERS = re.compile(r"""(?!.*(?:[sS][sStT]|[fF][fFiIlL]))[ !"#%&',/0-9:;<=>@A-Z_`a-z~|-]*""")
"""What may be in a group that ignores the case, where no two letters are one in another case, such as ß."""
REPEATS = re.compile(r"(?:[*+?]|\{(\d+),?(\d*)\})([*+?]?)")
GROUPS = {"(", "(?:", "(?i:"}
LOOKS = {"(?=", "(?!"}
COUNTED = re.compile(r"\{(\d+),?(\d*)\}")
LONGEST, MOST_COUNTED, DEEPEST = 2000, 200, 100


def unknown_in(expression: str) -> str:
    """What devices do not know in an expression that the library takes; else ""."""
    counts = [int(most or least) for least, most in COUNTED.findall(expression)]
    if len(expression) > LONGEST or sum(counts) > MOST_COUNTED:
        return "an expression that is too long"
    parts = TOKEN.findall(expression)
    if max(itertools.accumulate((part.startswith("(") - (part == ")") for part in parts), initial=0)) > DEEPEST:
        return f"groups within more than {DEEPEST} others"
    found = (_unknown(part, parts[:place], parts[place + 1 :]) for place, part in enumerate(parts))
    return next(filter(None, found), "")


def _unknown(part: str, before: list[str], after: list[str]) -> str:
    if repeats := REPEATS.fullmatch(part):
        return _unknown_repetition(repeats, before)
    if part in LOOKS:
        is_one = len(after) > 1 and KNOWN.fullmatch(after[0]) and after[0] not in "()|" and after[1] == ")"
        is_alone = not {*before[-1:]} - {"|", *GROUPS} and not {*after[2:3]} - {"|", ")"}
        return ("a look alone" if is_alone else "") if is_one else "a look at more than the next letter"
    if part in GROUPS:
        inside = "".join(after).partition(")")[0]
        is_known = part != "(?i:" or OF_LETTERS.fullmatch(inside)
        return "" if is_known else "a group that ignores the case of more than letters"
    if part.startswith("("):
        return f"a group that begins with {part}"
    return "" if KNOWN.fullmatch(part) else f"the part {part}"


def _unknown_repetition(repeats: re.Match[str], before: list[str]) -> str:
    least, most, more = repeats.groups(default="")
    if more:
        return "a repetition that is lazy or possessive"
    if not before or before[-1] in ("|", *GROUPS, *LOOKS) or REPEATS.fullmatch(before[-1]):
        return "a repetition of nothing"
    if before[-1] == ")" and (repeats[0] != "?" or LOOKS.intersection(before[-3:-2])):
        return "a group that repeats"
    return "a repetition that ends before it begins" if most and int(most) < int(least) else ""


Id = Annotated[int, Meta(ge=0, lt=1 << 24)]
Pair = tuple[str, Id]
Nothing = Literal[""] | None
SPACE = "[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
AT_AN_END = re.compile(rf"{SPACE}.*|.*{SPACE}", re.DOTALL)
SHOWN, MOST_PARTS = 60, Meta(max_length=16)


class _Part(Struct, frozen=True, forbid_unknown_fields=True): ...


class _Kind(_Part, frozen=True, tag_field="type", tag=lambda name: name.removeprefix("_")): ...


class _Added(_Part, frozen=True):
    id: Id
    content: Annotated[str, Meta(min_length=1, max_length=256)]
    single_word: Literal[False]
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class _BertNormalizer(_Kind, frozen=True):
    clean_text: bool
    handle_chinese_chars: bool
    strip_accents: bool | None
    lowercase: bool


class _Lowercase(_Kind, frozen=True): ...


class _NFC(_Kind, frozen=True): ...


class _NFD(_Kind, frozen=True): ...


class _NFKC(_Kind, frozen=True): ...


class _NFKD(_Kind, frozen=True): ...


_Normalizer = _BertNormalizer | _Lowercase | _NFC | _NFD | _NFKC | _NFKD


class _Normalizers(_Kind, frozen=True, tag="Sequence"):
    normalizers: Annotated[list[_Normalizer], MOST_PARTS]


class _BertPreTokenizer(_Kind, frozen=True): ...


class _ByteLevel(_Kind, frozen=True):
    add_prefix_space: bool
    trim_offsets: bool
    use_regex: bool


class _Digits(_Kind, frozen=True):
    individual_digits: bool


class _Pattern(_Part, frozen=True):
    Regex: str


class _Split(_Kind, frozen=True):
    pattern: _Pattern
    behavior: Literal["Isolated"]
    invert: Literal[False]


_PreTokenizer = _BertPreTokenizer | _ByteLevel | _Digits | _Split


class _PreTokenizers(_Kind, frozen=True, tag="Sequence"):
    pretokenizers: Annotated[list[_PreTokenizer], MOST_PARTS]


class _BertProcessing(_Kind, frozen=True):
    cls: Pair
    sep: Pair


class _RobertaProcessing(_Kind, frozen=True):
    cls: Pair
    sep: Pair
    trim_offsets: bool
    add_prefix_space: bool


class _Name(_Part, frozen=True):
    id: str
    type_id: Id


class _Text(_Part, frozen=True):
    id: Literal["A"]
    type_id: Id


class _Piece(_Part, frozen=True):
    SpecialToken: _Name | None = None
    Sequence: _Text | None = None


class _Special(_Part, frozen=True):
    id: str
    ids: list[Id]
    tokens: list[str]


class _TemplateProcessing(_Kind, frozen=True):
    single: list[_Piece]
    pair: list[Any]
    special_tokens: dict[str, _Special]


_PostProcessor = _BertProcessing | _RobertaProcessing | _ByteLevel | _TemplateProcessing


class _PostProcessors(_Kind, frozen=True, tag="Sequence"):
    processors: Annotated[list[_PostProcessor], MOST_PARTS]


class _BPE(_Kind, frozen=True):
    vocab: dict[str, Id]
    merges: list[tuple[str, str]]
    unk_token: str | None
    fuse_unk: bool
    ignore_merges: bool
    byte_fallback: Literal[False]
    dropout: Annotated[float, Meta(ge=0, le=0)] | None
    continuing_subword_prefix: Nothing
    end_of_word_suffix: Nothing


class _WordPiece(_Kind, frozen=True):
    vocab: dict[str, Id]
    unk_token: str
    continuing_subword_prefix: str
    max_input_chars_per_word: Annotated[int, Meta(ge=0, le=1000)]


class _File(_Part, frozen=True):
    version: Literal["1.0"]
    truncation: None
    padding: None
    decoder: None
    added_tokens: list[_Added]
    normalizer: _Normalizer | _Normalizers | None
    pre_tokenizer: _PreTokenizer | _PreTokenizers | None
    post_processor: _PostProcessor | _PostProcessors | None
    model: _BPE | _WordPiece


_FILE = decoder(_File)


def check(data: bytes) -> None:
    """Raise PlanRefused, naming what devices do not know of a tokenizer's file."""
    try:
        file = _FILE.decode(data)
    except UNDECODABLE as error:
        raise PlanRefused(f"its tokenizer has what devices do not know: {error}") from error
    for what in (*_of_parts(file), *_of_added(file), *_of_model(file.model)):
        raise PlanRefused(f"its tokenizer has {what}, which devices do not know")


def check_added(library: tokenizers.Tokenizer) -> None:
    """Raise PlanRefused where a loaded tokenizer cannot tell its added tokens apart in a normalised text."""
    added = [token.content for token in library.get_added_tokens_decoder().values() if token.normalized]
    if library.normalizer is not None:
        added = [library.normalizer.normalize_str(content) for content in added]
    if "" in added or len(set(added)) < len(added):
        what = "an added token that normalises to nothing or to another one"
        raise PlanRefused(f"its tokenizer has {what}, which devices do not know")


def _of_parts(file: _File) -> Iterator[str]:
    pre, post = file.pre_tokenizer, file.post_processor
    splits = pre.pretokenizers if isinstance(pre, _PreTokenizers) else [pre]
    processors = post.processors if isinstance(post, _PostProcessors) else [post] if post else []
    if sum(isinstance(one, _ByteLevel) for one in splits) > 1:
        yield "two pre-tokenizers ByteLevel"
    for split in splits:
        if isinstance(split, _Split) and (what := unknown_in(split.pattern.Regex)):
            yield f"{what} in the expression {split.pattern.Regex[:SHOWN]!r}"
    if sum(not isinstance(one, _ByteLevel) for one in processors) > 1:
        yield "two post-processors"
    for processor in processors:
        if isinstance(processor, _TemplateProcessing):
            yield from _of_template(processor)


def _of_template(template: _TemplateProcessing) -> Iterator[str]:
    pieces = template.single
    if any((piece.SpecialToken is None) == (piece.Sequence is None) for piece in pieces):
        yield "a template with neither a token nor a text"
    if sum(piece.Sequence is not None for piece in pieces) != 1:
        yield "a template without one $A"
    for piece in pieces:
        if piece.SpecialToken is not None and piece.SpecialToken.id not in template.special_tokens:
            yield f"a template with an unknown {piece.SpecialToken.id!r}"


def _of_added(file: _File) -> Iterator[str]:
    """The library goes by the vocabulary and by the order of tokens beyond it, and not by their ids."""
    vocab, added = file.model.vocab, file.added_tokens
    beyond = len(vocab)
    for content, count in Counter(token.content for token in added).items():
        if count > 1:
            yield f"the added token {content!r} twice"
    for token in added:
        expected = vocab.get(token.content, beyond)
        beyond += token.content not in vocab
        if token.id != expected:
            yield f"the added token {token.content!r} as {token.id} in place of {expected}"
    if any(token.lstrip or token.rstrip for token in added):
        for token in added:
            if AT_AN_END.fullmatch(token.content):
                yield f"the added token {token.content!r} beside one that takes the spaces around it"


def _of_model(model: _BPE | _WordPiece) -> Iterator[str]:
    if len(set(model.vocab.values())) < len(model.vocab):
        yield "a vocabulary with one id for two words"
    if isinstance(model, _WordPiece) and model.unk_token not in model.vocab:
        yield "a vocabulary without its unknown token"


# Texts of examples as tokens: what an app keeps as UTF-8 becomes the integers that a plan trains on.


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
