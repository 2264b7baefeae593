"""The tokenizer in a model's folder, for plans whose examples are texts: its file, checked for what devices know.

Spec: docs/spec/plan.md §1.3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from export.errors import InvalidModel, reason

FILE = "tokenizer.json"
KNOWN = {
    "normalizer": {"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD"},
    "pre_tokenizer": {"BertPreTokenizer", "ByteLevel", "Digits", "Split"},
    "post_processor": {"BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"},
    "model": {"BPE", "WordPiece"},
}
"""The parts that device_runtime/js/src/core/tokenizer.ts has, by their place."""

SENTENCE_PIECE = {"Unigram", "Metaspace", "Precompiled"}

TOKEN = re.compile(
    r"\\[pP]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]|\((?:\?(?:i?:|[=!]|.?))?|(?:[*+?]|\{\d+(?:,\d*)?\})[*+?]?|.", re.DOTALL
)
"""A part of an expression, as device_runtime/js/src/core/expression.ts has it."""
REFUSED = {
    "a repetition that is lazy or possessive": re.compile(r"(?:[*+?]|\{.*\})[*+?]"),
    "a group that begins with {}": re.compile(r"\(\?(?!i?:|[=!]).*", re.DOTALL),
    "the part {}": re.compile(
        r"[$^{]|\\(?![pP]\{[LMNPSZC][a-z]?\}|[sSdDnrtfv]|[^A-Za-z0-9]).*"
        r"|\[(?:\\.|[^\\])*?(?:\[|&&|\\(?![pP]\{[LMNPSZC][a-z]?\}|[sdnrtfv]|[^A-Za-z0-9])).*",
        re.DOTALL,
    ),
}
"""Parts that devices in TypeScript do not know."""
LONGEST, MOST_COUNTED, SHOWN = 2000, 200, 60
REPEATS, OF_GROUPS = re.compile(r"[*+]|\{\d"), re.compile(r"[()|*+?]|\{\d")
OF_MORE_THAN_LETTERS = re.compile(r"[(\[\\.]")
COUNTED = re.compile(r"\{(\d+),?(\d*)\}")


def read(folder: Path, vocabulary: int, tokens: int) -> bytes | None:
    """The bytes of a folder's tokenizer, or None where there is none.

    Raises InvalidModel for one that devices do not know, that gives tokens from `vocabulary` on, or that leaves no room
    for a text in `tokens`.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    from tokenizers import Tokenizer  # comes with transformers, which read the folder

    data = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_str(data.decode())
        unknown = sorted(_unknown(json.loads(data)))
    except Exception as error:  # the library raises Exception itself
        raise InvalidModel(f"{path} is no tokenizer: {reason(error)}") from error
    if unknown:
        raise InvalidModel(
            f"{path} has {', '.join(unknown)}, which devices do not know; move the file away, and the app makes the "
            "tokens"
        )
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if highest >= vocabulary:
        raise InvalidModel(f"{path} gives token {highest}, and the model knows {vocabulary}; it is another model's")
    added = tokenizer.num_special_tokens_to_add(False)
    if added >= tokens:
        raise InvalidModel(f"{path} adds {added} tokens to every text; {tokens} leave no room, so ask for more tokens")
    return data


def is_special(data: bytes, token: int | None) -> bool:
    """Whether a token is one that no text has, such as [PAD], unless it is written out."""
    return any(one["id"] == token and one["special"] for one in json.loads(data)["added_tokens"])


def _unknown(file: dict[str, Any]) -> Iterator[str]:
    for place, known in KNOWN.items():
        for kind in _kinds(file[place]):
            if kind not in known:
                yield f"the {place.replace('_', '-')} {kind}" + (" of SentencePiece" if kind in SENTENCE_PIECE else "")
    model = file["model"]
    if model["type"] == "BPE" and "ByteLevel" not in set(_kinds(file["pre_tokenizer"])):
        yield "a BPE of no bytes"
    for name in ("byte_fallback", "dropout", "end_of_word_suffix"):
        if model.get(name):
            yield f"{name} in its {model['type']}"
    for expression in _expressions(file["pre_tokenizer"]):
        if what := unknown_in(expression):
            yield f"{what} in the expression {expression[:SHOWN]!r}"
    if any(token["single_word"] for token in file["added_tokens"]):
        yield "an added token that is a single word"


def unknown_in(expression: str) -> str:
    """What devices do not know in an expression that the library takes; else "".

    Devices match in a time that is linear in the text, which needs groups that do not repeat.
    """
    counts = [int(most or least) for least, most in COUNTED.findall(expression)]
    if len(expression) > LONGEST or sum(counts) > MOST_COUNTED:
        return "an expression that is too long"
    parts = TOKEN.findall(expression)
    for place, part in enumerate(parts):
        for what, pattern in REFUSED.items():
            if pattern.fullmatch(part):
                return what.format(part)
        following, after = [*parts, "", ""][place + 1 : place + 3]
        if part == ")" and REPEATS.match(following):
            return "a group that repeats"
        if part == "(?i:" and OF_MORE_THAN_LETTERS.search("".join(parts[place + 1 :]).partition(")")[0]):
            return "a group that ignores the case of more than letters"
        if part in ("(?=", "(?!") and (OF_GROUPS.match(following) or after != ")"):
            return "a look at more than the next letter"
    return ""


def _kinds(part: dict[str, Any] | None) -> Iterator[str]:
    return (one["type"] for one in _parts(part))


def _expressions(part: dict[str, Any] | None) -> Iterator[str]:
    return (one["pattern"].get("Regex", "") for one in _parts(part) if one["type"] == "Split")


def _parts(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A part, or those of a sequence."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for members in part.values():
        if isinstance(members, list):
            for member in members:
                yield from _parts(member)
