"""The text of a query, with errors that name a place in it, and its clauses, parsed by sqlglot."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import sqlglot
from sqlglot import Token, TokenType, exp, tokenize
from sqlglot.errors import ParseError, TokenError

from fedcore.errors import QueryError, QuestionError
from fedcore.questions.question import LONGEST_QUESTION

DIALECT = "sqlite"
_BOUND = ("MAX", None, "ROWS", "PER", "DEVICE")
_QUOTED = {TokenType.STRING, TokenType.IDENTIFIER}
_NUMBERS = {TokenType.NUMBER, TokenType.HEX_STRING}
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
_NO_SQL = re.compile("syntax error|unrecognized token|null character")
_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|0x0*[\da-f]{1,16}|x'.*'", re.ASCII | re.IGNORECASE)
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
    """A query as text. Raises QuestionError when it has no tokens, or too many, a quote that never ends, or a number
    that is none.
    """

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
        if len(self.plain) > LONGEST_QUESTION:
            raise QuestionError(f"a query of {len(self.plain):,} characters; there may be {LONGEST_QUESTION:,}")
        for before, token in zip(self._tokens, self._tokens[1:], strict=False):
            written = text[(before if before.text == "." else token).start : token.end + 1]
            if token.token_type in _NUMBERS and not _NUMBER.fullmatch(written):
                raise self.refusal(token.start, f"{written:.40} is no number: write digits, as 1000, 0.5 or 1e-3")

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
        first: int = min(offsets, default=len(self.text))
        words = _BEGUN_BY.get(type(node), ())
        earlier = [
            token.start
            for token, word in zip(self._tokens, self._words, strict=True)
            if token.start < first and word in words
        ]
        return max(earlier, default=first if offsets else 0)

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
            if not (number.isascii() and number.isdigit()) or int(number) < 1:
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
            number = token.token_type in _NUMBERS
            if number and after is not None and after.start == end and re.match(r"\w", self.text[end:]):
                written = self.text[token.start : after.end + 1]
                raise self.refusal(token.start, f"{written} is no number: write digits alone, as 1000")
            if number or token.token_type in _QUOTED or word in _KNOWN or (following == "(" and word in functions):
                continue
            left[token.text] -= 1
            if left[token.text] < 0:
                raise self.refusal(token.start, f"devices do not answer {word}")
        if not _is_sql(f"{self.text[:length]}\n;"):  # the parser takes texts in which words are missing, or too many
            wrong = next((token for token, _ in tokens if not _is_sql(self.text[: token.end + 1])), None)
            word, place = (_word(wrong), wrong.start) if wrong else ("the end", length)
            raise self.refusal(place, f"this is no SQL here, at {word:.40}; a field of that name stands in quotes")

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


def _is_sql(text: str) -> bool:
    """Whether SQLite reads a text, whatever its names mean, or the beginning of one."""
    with closing(sqlite3.connect(":memory:")) as database:
        try:
            database.execute(f"EXPLAIN {text}")
        except sqlite3.Error as error:
            return not _NO_SQL.search(str(error))
    return True


TABLE = "examples"
_CLAUSES = {"expressions", "from_", "where", "group", "having", "order", "limit"}
_NAMES = {
    "distinct": "SELECT DISTINCT; GROUP BY the columns instead",
    "joins": "JOIN; a device has one table, examples",
    "laterals": "LATERAL; a device has one table, examples",
    "offset": "OFFSET",
    "qualify": "QUALIFY",
    "windows": "WINDOW",
    "with_": "WITH",
}
_ONLY = "SELECT … FROM examples [WHERE …] [GROUP BY …] [HAVING …] [ORDER BY …] [LIMIT n] [MAX n ROWS PER DEVICE]"
# SQLite gives IN, BETWEEN and IS NULL the precedence of `=`, which is lower than that of `<` and of arithmetic, and NOT
# a lower one still; the parser gives them higher ones.
_LOOSE = (exp.In, exp.Between, exp.Not)
_COMPARISONS = (exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE)
_ARITHMETIC = (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Mod, exp.Neg)


class Ordered(NamedTuple):
    """A term of ORDER BY."""

    node: exp.Expr
    descending: bool


class Clauses(NamedTuple):
    """The clauses of a query. names: of its columns. identifiers: all without quotes, as often as they stand there.
    most_rows: of MAX n ROWS PER DEVICE.
    """

    source: Source
    identifiers: tuple[str, ...]
    columns: tuple[exp.Expr, ...]
    names: tuple[str, ...]
    where: exp.Expr | None
    keys: tuple[exp.Expr, ...]
    having: exp.Expr | None
    order: tuple[Ordered, ...]
    limit: int | None
    most_rows: int | None

    def column_of(self, node: exp.Expr) -> int | None:
        """The column that an entry of GROUP BY or ORDER BY names by its number or its alias. Raises QuestionError."""
        node = node.unnest()
        if isinstance(node, exp.Neg) and isinstance(node.this.unnest(), exp.Literal):
            raise self.source.refusal(node, "there is no column below 1")
        if isinstance(node, exp.Literal) and not node.is_string:
            if not node.this.isdigit() or not 1 <= int(node.this) <= len(self.columns):
                count = len(self.columns)
                raise self.source.refusal(node, f"there is no column {node.this}; there are 1 to {count}")
            return int(node.this) - 1
        if isinstance(node, exp.Column) and not node.table:
            aliases = [column.alias.casefold() for column in self.columns]
            if node.name.casefold() in aliases:
                return aliases.index(node.name.casefold())
        return None

    def value(self, index: int) -> exp.Expr:
        """A column without its alias."""
        column: exp.Expr = self.columns[index].unalias()
        return column


def parse(text: str) -> Clauses:
    """The clauses of a query. Raises QuestionError, with the place in the text."""
    source = Source(text)
    query, most_rows = source.bounded()
    try:
        trees = sqlglot.parse(query, read=DIALECT)
    except ParseError as error:
        raise _unread(source, query, error) from error
    except ValueError as error:  # of the parser, which takes a name for granted
        raise source.refusal(0, f"this is no SQL; a question is {_ONLY}") from error
    if len(trees) != 1 or not isinstance(tree := trees[0], exp.Select):
        raise source.refusal(0, f"a question is one {_ONLY}")
    _check_clauses(source, tree)
    _check_table(source, tree)
    _check_precedence(source, tree)
    columns = tuple(tree.expressions)
    written = list(source.written())
    if len(written) != len(columns):
        raise source.refusal(tree, "a column is missing beside a comma")
    names = tuple(column.alias or text for column, text in zip(columns, written, strict=True))
    return Clauses(
        source=source,
        identifiers=tuple(node.name for node in tree.find_all(exp.Identifier) if not node.args.get("quoted")),
        columns=columns,
        names=names,
        where=_inside(tree, "where"),
        keys=_grouped(source, tree),
        having=_inside(tree, "having"),
        order=_ordered(source, tree),
        limit=_limit(source, tree),
        most_rows=most_rows,
    )


def _unread(source: Source, query: str, error: ParseError) -> QuestionError:
    first = error.errors[0]
    before = "".join(line + "\n" for line in query.splitlines()[: first["line"] - 1])
    # The parser names the end of the token.
    end = len(before) + first["col"]
    offset = max(end - len(first["highlight"] or "."), 0)
    if str(first["description"]).startswith("Required keyword"):
        return source.refusal(offset, "an argument is missing")
    return source.refusal(offset, f"this is no SQL here; a question is {_ONLY}")


def _check_clauses(source: Source, tree: exp.Select) -> None:
    for name, clause in tree.args.items():
        if not clause or name in _CLAUSES:
            continue
        node = clause[0] if isinstance(clause, list) else clause
        words = _NAMES.get(name, name.strip("_").upper())
        where = source.start(node) if isinstance(node, exp.Expr) else 0
        raise source.refusal(where, f"devices do not answer {words}")


def _check_table(source: Source, tree: exp.Select) -> None:
    table: Any = tree.args.get("from_") and tree.args["from_"].this
    if table is None:
        raise source.refusal(len(source.text.rstrip()), f"FROM {TABLE} is missing")
    if isinstance(table, exp.Subquery):
        raise source.refusal(table, "devices do not answer a query inside a query")
    more = [name for name, value in table.args.items() if value and name != "this"]
    if not isinstance(table, exp.Table) or table.name.casefold() != TABLE or more:
        raise source.refusal(table, f"a device has one table, {TABLE}, of which a question takes all rows or WHERE")


def _check_precedence(source: Source, tree: exp.Select) -> None:
    """Refuse what SQLite and the parser read as different trees."""
    for node in tree.find_all(*_COMPARISONS, *_ARITHMETIC):
        loose = _LOOSE if isinstance(node, _COMPARISONS) else (*_LOOSE, exp.Is)
        if any(isinstance(side, loose) for side in (node.this, node.args.get("expression"))):
            raise source.refusal(node, "write parentheses: here it is open what is compared with what")


def _inside(tree: exp.Select, clause: str) -> exp.Expr | None:
    node = tree.args.get(clause)
    return None if node is None else node.this


def _grouped(source: Source, tree: exp.Select) -> tuple[exp.Expr, ...]:
    group = tree.args.get("group")
    if group is None:
        return ()
    if not group.expressions:
        raise source.refusal(len(source.text.rstrip()), "GROUP BY names no key")
    for name, clause in group.args.items():
        if clause and name != "expressions":
            raise source.refusal(group, f"devices do not answer GROUP BY {name.replace('_', ' ').upper()}")
    return tuple(group.expressions)


def _ordered(source: Source, tree: exp.Select) -> tuple[Ordered, ...]:
    terms = tree.args["order"].expressions if tree.args.get("order") else ()
    for term in terms:
        # SQLite's own order, which the parser notes where nothing is said.
        if bool(term.args.get("nulls_first")) == bool(term.args.get("desc")):
            raise source.refusal(term, "devices do not answer NULLS FIRST and NULLS LAST: NULL is the least")
    return tuple(Ordered(term.this, bool(term.args.get("desc"))) for term in terms)


def _limit(source: Source, tree: exp.Select) -> int | None:
    clause = tree.args.get("limit")
    if clause is None:
        return None
    number = clause.expression
    if not isinstance(number, exp.Literal) or not number.this.isdigit() or not int(number.this):
        raise source.refusal(clause, "LIMIT takes a whole number from 1 on")
    return int(number.this)
