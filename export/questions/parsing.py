"""A query as its clauses: parsed by sqlglot, which reads far more of SQL than devices answer. The rest is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError

from export.questions.source import DIALECT, Source
from fedcore.errors import QuestionError

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
    tree = trees[0]
    if len(trees) != 1 or not isinstance(tree, exp.Select):
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
    if not isinstance(number, exp.Literal) or not number.this.isdigit():
        raise source.refusal(clause, "LIMIT takes a whole number")
    return int(number.this)
