"""Targets: expressions on labels that say which devices are wanted, as `app_version >= 3.2 and region in (eu, uk)`.

Spec: docs/spec/rounds.md §6. Only coordinators evaluate them. Devices get the text, and compare it with another text.

A value of digits with points between is a version; any other is a word. A comparison with a label that is not told, or
of a word with `<` and its like, is neither true nor false, and neither is its `not`: only what is true matches. So
`not` is taken to the comparisons when an expression is parsed, as in `not region = eu`, which is `region != eu`, and
nothing is left to know but what is true.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from fedcore.errors import BadTarget
from fedcore.labels import LONGEST_TARGET, check_label_name, check_labels

DEEPEST = 16
"""The most parentheses and `not` around a comparison."""
Test: TypeAlias = Callable[[Mapping[str, str]], bool]
_ORDERS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_OPPOSITES = {"=": "!=", "<": ">=", ">": "<=", "in": "not in"}
_OPPOSITES |= {opposite: sign for sign, opposite in _OPPOSITES.items()}
_IN_WORDS = {
    "=": "is",
    "!=": "is not",
    "<": "is below",
    "<=": "is at most",
    ">": "is above",
    ">=": "is at least",
    "in": "is one of",
    "not in": "is none of",
}
_KEYWORDS = {"and", "or", "not", "in"}
_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)*")
_BARE = re.compile(r"""[^\s()"',=<>!~\\]+""")
_TOKEN = re.compile(rf"""(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<sign>[=<>!~]+|[(),])|{_BARE.pattern}""")


class Comparison(NamedTuple):
    """A label compared with one value, or with several by `in` and `not in`."""

    name: str
    sign: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        listed = ", ".join(map(_written, self.values))
        return f"{self.name} {self.sign} {f'({listed})' if self.sign.endswith('in') else listed}"

    @property
    def words(self) -> str:
        """The same for people."""
        return f"{self.name} {_IN_WORDS[self.sign]} {', '.join(map(_written, self.values))}"

    @property
    def test(self) -> Test:
        """Whether it is true of labels."""
        name, sign, keys = self.name, self.sign, frozenset(map(_key, self.values))
        if sign in _ORDERS:
            compare, bound = _ORDERS[sign], _key(self.values[0])
            return lambda labels: (
                name in labels and not isinstance(own := _key(labels[name]), str) and compare(own, bound)
            )
        if sign in ("=", "in"):
            return lambda labels: name in labels and _key(labels[name]) in keys
        return lambda labels: name in labels and _key(labels[name]) not in keys


class Joined(NamedTuple):
    """Several parts, all of which must be true with `and`, and one at least with `or`. No part has the same word."""

    word: str
    parts: tuple[Node, ...]

    def __str__(self) -> str:
        inner = (f"({one})" if isinstance(one, Joined) and self.word == "and" else str(one) for one in self.parts)
        return f" {self.word} ".join(inner)

    @property
    def words(self) -> str:
        """The same for people."""
        inner = (f"({one.words})" if isinstance(one, Joined) else one.words for one in self.parts)
        return f" {self.word} ".join(inner)

    @property
    def test(self) -> Test:
        """Whether it is true of labels."""
        tests, decided = tuple(one.test for one in self.parts), self.word == "or"

        def test(labels: Mapping[str, str]) -> bool:
            for one in tests:
                if one(labels) is decided:
                    return decided
            return not decided

        return test


Node: TypeAlias = Comparison | Joined


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed target. Its text is canonical: it parses to the same, and equal targets mostly have equal texts."""

    root: Node
    matches: Test = field(init=False, compare=False, repr=False)
    """Whether a device with these labels, by name, is wanted."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "matches", self.root.test)

    def __str__(self) -> str:
        return str(self.root)

    @property
    def words(self) -> str:
        """The same for people; it continues `devices whose`."""
        return self.root.words

    @property
    def names(self) -> tuple[str, ...]:
        """The labels that it compares, in order."""
        return tuple(dict.fromkeys(_names(self.root)))


@lru_cache(maxsize=256)  # at every check-in the same few
def parse(text: str) -> Expression:
    """The target of a text. Raises BadTarget, which says at which column, from 1, what is wrong."""
    if len(text) > LONGEST_TARGET:
        raise BadTarget(
            f"column {LONGEST_TARGET + 1}: a target has {LONGEST_TARGET} characters at most, not {len(text)}"
        )
    parser = _Parser(text)
    found = Expression(parser.either(0))
    if parser.token.text:
        raise parser.wrong("`and`, `or` or the end")
    if len(str(found)) > LONGEST_TARGET:
        raise BadTarget(f"written out, the target has {len(str(found))} characters, and {LONGEST_TARGET} are the most")
    return found


class _Token(NamedTuple):
    """A piece of the text, "" at its end, and its column. value: of one that may stand for a label's value."""

    text: str
    column: int
    value: str | None = None


class _Parser:
    """A recursive descent, one method for each level of precedence. token: the next one. depth: of what is open."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.token = self._next()

    def either(self, depth: int) -> Node:
        """Parts with `or` between."""
        return _joined("or", self._between("or", self._both, depth))

    def wrong(self, wanted: str) -> BadTarget:
        """The error of a token that stands where something else is wanted."""
        found = f"not `{self.token.text}`" if self.token.text else "and the expression ends"
        return BadTarget(f"column {self.token.column}: here must be {wanted}, {found}")

    def _both(self, depth: int) -> Node:
        return _joined("and", self._between("and", self._negation, depth))

    def _between(self, word: str, part: Callable[[int], Node], depth: int) -> Iterator[Node]:
        yield part(depth)
        while self.token.text == word:
            self._take()
            yield part(depth)

    def _negation(self, depth: int) -> Node:
        if self.token.text not in ("not", "("):
            return self._comparison()
        opened = self._take()
        if depth == DEEPEST:
            raise BadTarget(f"column {opened.column}: more than {DEEPEST} parentheses and `not` within each other")
        if opened.text == "not":
            return _negated(self._negation(depth + 1))
        inner = self.either(depth + 1)
        self._expect(")")
        return inner

    def _comparison(self) -> Node:
        name = self._name()
        sign = self._take().text if self.token.text in _IN_WORDS or self.token.text == "not" else ""
        if sign == "not":
            self._expect("in")
            sign = "not in"
        if not sign:
            raise self.wrong(f"one of {', '.join(_IN_WORDS)}")
        if not sign.endswith("in"):
            return Comparison(name, sign, (self._value(sign),))
        self._expect("(")
        values = [self._value(sign)]
        while self.token.text == ",":
            self._take()
            values.append(self._value(sign))
        self._expect(")")
        several = tuple(dict.fromkeys(values))
        return Comparison(name, sign if several[1:] else {"in": "="}.get(sign, "!="), several)

    def _name(self) -> str:
        token = self.token
        if token.value is None or token.text[0] in "\"'":
            raise self.wrong("a label's name, `not` or `(`")
        try:
            check_label_name(token.text)
        except ValueError as error:
            raise BadTarget(f"column {token.column}: {error}") from error
        return self._take().text

    def _value(self, sign: str) -> str:
        token = self.token
        if token.text in _KEYWORDS:
            raise self.wrong(f'a value; "{token.text}" in quotes is one')
        if token.value is None:
            raise self.wrong("a value")
        try:
            check_labels({"value": token.value})
        except ValueError as error:
            raise BadTarget(f"column {token.column}: {str(error).partition(': ')[2]}") from error
        if sign in _ORDERS and isinstance(_key(token.value), str):
            raise self.wrong(f"a version, such as 3.2, as {sign} compares versions")
        self._take()
        return token.value

    def _expect(self, text: str) -> None:
        if self.token.text != text:
            raise self.wrong(f"`{text}`")
        self._take()

    def _take(self) -> _Token:
        taken, self.token = self.token, self._next()
        return taken

    def _next(self) -> _Token:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        column, match = self._at + 1, _TOKEN.match(self._text, self._at)
        if match is None:
            rest = self._text[self._at : self._at + 1]
            if rest:
                raise BadTarget(
                    f"column {column}: " + ("a quote that does not end" if rest in "\"'" else f"a {rest!r}")
                )
            return _Token("", column)
        self._at, text = match.end(), match[0]
        if match["sign"] and text not in (*_IN_WORDS, "(", ")", ","):
            raise BadTarget(f"column {column}: there is no operator `{text}`; there are {', '.join(_IN_WORDS)}")
        if match["quoted"]:
            return _Token(text, column, re.sub(r"\\(.)", r"\1", text[1:-1]))
        return _Token(text, column, None if match["sign"] or text in _KEYWORDS else text)


def _joined(word: str, parts: Iterator[Node]) -> Node:
    flat: list[Node] = []
    for one in parts:
        flat += one.parts if isinstance(one, Joined) and one.word == word else (one,)
    return flat[0] if len(flat) == 1 else Joined(word, tuple(flat))


def _negated(node: Node) -> Node:
    """What is true where the node is false: by De Morgan, which holds with three values too."""
    if isinstance(node, Comparison):
        return node._replace(sign=_OPPOSITES[node.sign])
    return Joined("or" if node.word == "and" else "and", tuple(map(_negated, node.parts)))


def _names(node: Node) -> Iterator[str]:
    if isinstance(node, Comparison):
        yield node.name
        return
    for one in node.parts:
        yield from _names(one)


def _written(value: str) -> str:
    """A value as an expression has it: in quotes where it must be."""
    if _BARE.fullmatch(value) and value not in _KEYWORDS:
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


@lru_cache(maxsize=4096)  # of many devices the same few values
def _key(value: str) -> tuple[int, ...] | str:
    """What a value is compared by: the numbers of a version, without zeros at the end, or the word itself."""
    if not _VERSION.fullmatch(value):
        return value
    numbers = [int(part) for part in value.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
