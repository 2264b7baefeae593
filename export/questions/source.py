"""The text of a query: its tokens, and errors that name a place in it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from sqlglot import Token, TokenType, exp, tokenize
from sqlglot.errors import TokenError

from fedcore.errors import QueryError, QuestionError

DIALECT = "sqlite"
_BOUND = ("MAX", None, "ROWS", "PER", "DEVICE")
_QUOTED = {TokenType.STRING, TokenType.IDENTIFIER}
# All words and signs of the subset. The parser knows those of other databases, which mean something else to SQLite.
_KNOWN = frozenset(
    (
        *("SELECT", "FROM", "WHERE", "GROUP BY", "HAVING", "ORDER BY", "LIMIT", "AS", "ASC", "DESC", "NULLS", "FIRST"),
        *("LAST", "AND", "OR", "NOT", "IN", "BETWEEN", "IS", "ISNULL", "NOTNULL", "NULL", "TRUE", "FALSE", "CASE"),
        *("WHEN", "THEN", "ELSE", "END", "FILTER", "DISTINCT", "ALL", "INTEGER", "INT", "BIGINT", "MEDIUMINT"),
        *("SMALLINT", "TINYINT", "REAL", "FLOAT", "DOUBLE", "DOUBLE PRECISION"),
        *("(", ")", ",", ".", "+", "-", "*", "/", "%", "=", "==", "<>", "!=", "<", "<=", ">", ">="),
    )
)
_NO_COLUMN = {")", ",", "FROM", "WHERE", "GROUP BY", "HAVING", "ORDER BY", "LIMIT", ""}
_GAP = re.compile(r"(?>\s+|--[^\n]*|/\*.*?\*/)*", re.DOTALL)
# Nodes that begin with a word of their own, before everything in them.
_BEGUN_BY: dict[type[Any], tuple[str, ...]] = {
    exp.Case: ("CASE",),
    exp.Cast: ("CAST",),
    exp.Distinct: ("DISTINCT",),
    exp.Exists: ("EXISTS",),
    exp.Neg: ("-",),
    exp.Not: ("NOT",),
    exp.Select: ("SELECT",),
    exp.Subquery: ("(",),
}


class Source:
    """A query as text. Raises QuestionError when it has no tokens, or a quote that never ends."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            tokens = tokenize(text, read=DIALECT)
        except TokenError as error:
            raise self.refusal(len(text.rstrip()), "a quote, or a comment, never ends") from error
        self._tokens = tokens[:-1] if tokens and tokens[-1].text == ";" else tokens
        self._words = ["" if token.token_type in _QUOTED else token.text.upper() for token in self._tokens]
        if not self._tokens:
            raise QuestionError("an empty question; write SELECT … FROM examples")

    def refusal(self, where: exp.Expr | int, message: str) -> QueryError:
        """The error about a node, or an offset in the text: what is wrong, where, and the line with a caret."""
        offset = where if isinstance(where, int) else self.start(where)
        before = self.text[:offset]
        line, column = before.count("\n") + 1, offset - (before.rfind("\n") + 1)
        shown = (self.text.splitlines() or [""])[line - 1]
        start = max(column - 60, 0)
        excerpt = shown[start : start + 100]
        return QueryError(f"{message} (line {line}, column {column + 1})\n  {excerpt}\n  {' ' * (column - start)}^")

    def start(self, node: exp.Expr) -> int:
        """The offset where a node begins. The parser notes it for names, numbers and functions only."""
        offsets = [inner.meta["start"] for inner in node.walk() if "start" in inner.meta]
        first: int = min(offsets, default=0)
        words = _BEGUN_BY.get(type(node), ())
        earlier = [
            token.start
            for token, word in zip(self._tokens, self._words, strict=True)
            if token.start < first and word in words
        ]
        return max(earlier, default=first)

    def word(self, node: exp.Expr) -> str:
        """The name of a function as it is written, or what the parser calls another node, in capitals."""
        if "start" in node.meta and isinstance(node, exp.Func | exp.Mod):
            return self.text[node.meta["start"] : node.meta["end"] + 1].upper()
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(node).__name__).upper()

    def bounded(self) -> tuple[str, int | None]:
        """The query without its last clause, `MAX n ROWS PER DEVICE`, and n; None without one.

        Raises QuestionError where n is no whole number above 0, and where the clause is not the last one.
        """
        words = self._words
        at = len(words) - len(_BOUND)
        if at >= 0 and all(want in {None, word} for want, word in zip(_BOUND, words[at:], strict=True)):
            number = words[at + 1]
            if not number.isdigit() or int(number) < 1:
                raise self.refusal(self._tokens[at + 1].start, "MAX n ROWS PER DEVICE takes a whole number from 1 on")
            return self.text[: self._tokens[at].start], int(number)
        for token, *three in zip(self._tokens, words, words[1:], words[2:], strict=False):
            if three == list(_BOUND[2:]):
                raise self.refusal(token.start, "MAX n ROWS PER DEVICE comes at the end, after LIMIT")
        return self.text[: self._tokens[-1].end + 1], None

    def check(self, names: Iterable[str], functions: Collection[str]) -> None:
        """Raise QuestionError for a word or sign outside the subset, and for one that the parser skipped or split.

        names: of fields and columns without quotes, as often as they stand in the query.
        """
        left, end, length = Counter(names), 0, len(self.bounded()[0])
        tokens = [(token, _word(token)) for token in self._tokens if token.end < length]
        for (token, word), (after, following) in zip(tokens, [*tokens[1:], (None, "")], strict=True):
            if not _GAP.fullmatch(self.text[end : token.start]):
                raise self.refusal(end, "this is no comment in SQLite; write -- or /* */")
            end = token.end + 1
            number = token.token_type in {TokenType.NUMBER, TokenType.HEX_STRING}
            if number and after is not None and after.start == end and re.match(r"\w", self.text[end:]):
                written = self.text[token.start : after.end + 1]
                raise self.refusal(token.start, f"{written} is no number: write digits alone, as 1000")
            if word == "," and following in _NO_COLUMN:
                raise self.refusal(token.start, "nothing follows this comma")
            if number or token.token_type in _QUOTED or word in _KNOWN or (following == "(" and word in functions):
                continue
            left[token.text] -= 1
            if left[token.text] < 0:
                raise self.refusal(token.start, f"devices do not answer {word}")

    @property
    def plain(self) -> str:
        """The text in one line without comments, which owners of devices might take for the question."""
        parts, end = list[str](), 0
        for token in self._tokens:
            gap = self.text[end : token.start]
            parts += [" " if gap else "", self.text[token.start : token.end + 1]]
            end = token.end + 1
        return "".join(parts).strip()

    def written(self) -> Iterator[str]:
        """The columns after SELECT as they are written, with their aliases."""
        depth, begin, end = 0, self._tokens[0].end + 1, 0
        for token, word in zip(self._tokens[1:], self._words[1:], strict=True):
            depth += (word in {"(", "CASE"}) - (word in {")", "END"})
            if depth == 0 and word in {",", "FROM"}:
                yield self.text[begin:end].strip()
                begin = token.end + 1
            if depth == 0 and word == "FROM":
                return
            end = token.end + 1


def _word(token: Token) -> str:
    """A token in capitals, with one blank between words; of a text or a name in quotes, a quote."""
    return "'" if token.token_type in _QUOTED else " ".join(token.text.upper().split())
