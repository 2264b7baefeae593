"""SQL to a question: `SELECT y, AVG(CLIP(x, 0, 600)) FROM examples GROUP BY y MAX 20 ROWS PER DEVICE`.

A row is an example of a device, and the table is all devices' examples. What is asked is computed on the device by a
graph, added up over its rows, and only such sums leave it. SQLite's rules hold: NULL, whole numbers that divide to
whole ones, and the order of NULL. NaN and infinity are NULL.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlglot import exp

from export.questions.asked import CompiledQuestion
from export.questions.columns import Columns
from export.questions.draft import Terms
from export.questions.expressions import Expression, GroupKey, Groups, group_key
from export.questions.parsing import DIALECT, Clauses, Source, parse
from export.questions.scalars import Scalars
from export.questions.sums import Sums
from export.questions.terms import CONSTANT, DEVICES, OFFERED, Reader, Term
from fedcore.errors import QuestionError
from fedcore.plan import Field
from fedcore.questions.question import MOST_CELLS, WORD, Column, Order, Question

MOST_KEYS = 2
_TURNED = {"<=": ">=", "<": ">"}
_HAVING = "HAVING here is a number of devices: HAVING COUNT(DISTINCT DEVICE) >= 50"


def compile_sql(
    text: str, fields: Sequence[Field], *, minimum_devices: int = 20, private: bool = False, secure: bool = False
) -> CompiledQuestion:
    """The question that a query asks of examples with these fields.

    minimum_devices: a group of fewer devices is not shown; HAVING may raise it. private: under noise, so that each
    device's numbers need a norm. secure: masked, so that they need a range. Either needs `MAX n ROWS PER DEVICE` and
    bounds of what is summed. Raises QueryError, which names the place in the text, and QuestionError.
    """
    if not fields:
        raise QuestionError("the examples have no fields, so there is nothing to ask")
    try:
        return _Query(parse(text), fields).asked(minimum_devices, private, secure)
    except RecursionError as error:
        raise Source(text).refusal(0, f"this query nests too deeply: {error}") from error


class _Query:
    """The clauses of a query with the fields that they may name."""

    def __init__(self, clauses: Clauses, fields: Sequence[Field]) -> None:
        self._clauses, self._source = clauses, clauses.source
        self._scalars = Scalars(clauses.source, fields)
        self._reader = Reader(clauses.source, self._scalars.matching)
        self._terms = [self._reader.term(clauses.value(index)) for index in range(len(clauses.columns))]

    def asked(self, minimum_devices: int, private: bool, secure: bool) -> CompiledQuestion:
        """The question."""
        clauses = self._clauses
        minimum_devices = max(minimum_devices, self._threshold())
        self._check_draw()
        where = self._where()
        terms = [self._key(node) for node in clauses.keys]
        pairs = zip(clauses.keys, terms, strict=True)
        keys = [self._scalars.placed(term, self._group_key, node, term) for node, term in pairs]
        sums = Sums(Groups(tuple(keys)), where, Terms(minimum_devices, clauses.most_rows, private, secure))
        voters = sums.voters()
        places = {term: index for index, term in reversed(list(enumerate(terms)))}
        columns = Columns(self._source, self._scalars, sums, places, minimum_devices)
        shown = [columns.of(term).value for term in self._terms]
        self._check_size(sums)
        order = self._order()
        if not (keys or any(term.aggregates for term in self._terms)):
            raise self._source.refusal(clauses.columns[0], "only sums leave a device: write COUNT(*), SUM(x), …")
        self._source.check(clauses.identifiers, OFFERED)
        question = Question(
            text=self._source.plain,
            rows=tuple(sums.rows.values()),
            blocks=tuple(sums.blocks.values()),
            columns=tuple(map(Column, clauses.names, shown)),
            voters=voters,
            keys=sums.groups.data,
            minimum_devices=minimum_devices,
            most_rows=clauses.most_rows,
            private=private,
            order=order,
            limit=clauses.limit,
        )
        return CompiledQuestion(question, self._scalars.read, sums.numbers)

    def _check_draw(self) -> None:
        most_rows = self._clauses.most_rows
        if most_rows is not None and most_rows > WORD:
            end = self._source.text.upper().rindex("MAX")
            raise self._source.refusal(end, f"MAX {most_rows:,} ROWS PER DEVICE; there may be {WORD:,}")

    def _where(self) -> Expression | None:
        node = self._clauses.where
        if node is None:
            return None
        return self._scalars.condition(self._reader.term(node), "WHERE")

    def _key(self, node: exp.Expr) -> Term:
        """A key of GROUP BY; a field's name is that field, before it is an alias, as in SQLite."""
        is_field = isinstance(node, exp.Column) and bool(self._scalars.matching(node.name))
        index = None if is_field else self._clauses.column_of(node)
        return self._reader.term(node) if index is None else self._terms[index]

    def _group_key(self, node: exp.Expr, term: Term) -> GroupKey:
        if len(self._clauses.keys) > MOST_KEYS:
            raise QuestionError(f"GROUP BY takes {MOST_KEYS} keys, not {len(self._clauses.keys)}")
        return group_key(node.sql(DIALECT), self._scalars.of(term, "GROUP BY"))

    def _threshold(self) -> int:
        """k of HAVING COUNT(DISTINCT DEVICE) >= k, 1 at least."""
        node = self._clauses.having
        if node is None:
            return 1
        term = self._reader.term(node)
        left, right = term.arguments if len(term.arguments) == 2 else (term, term)
        function = term.function
        if right.function == DEVICES:
            left, right, function = right, left, _TURNED.get(function, "")
        whole = right.function == CONSTANT and isinstance(right.value, int)
        if left.function != DEVICES or not whole or function not in {">=", ">"}:
            raise self._source.refusal(node, _HAVING)
        return max(int(right.value) + (function == ">"), 1)  # type: ignore[arg-type]

    def _order(self) -> tuple[Order, ...]:
        orders = []
        for node, descending in self._clauses.order:
            column = self._clauses.column_of(node)
            if column is None:
                term = self._reader.term(node)
                if term not in self._terms:
                    raise self._source.refusal(node, "ORDER BY takes what is shown: a column, its number or its alias")
                column = self._terms.index(term)
            orders.append(Order(column, descending))
        return tuple(orders)

    def _check_size(self, sums: Sums) -> None:
        numbers = sum(rows.size * (1 + rows.words) for rows in sums.rows.values())
        if numbers > MOST_CELLS:
            where = self._clauses.keys[0] if self._clauses.keys else self._clauses.columns[0]
            raise self._source.refusal(
                where,
                f"{sums.groups.number:,} groups take {numbers:,} numbers with what is asked of each; there may be "
                f"{MOST_CELLS:,}: ask for less, or in fewer groups",
            )
