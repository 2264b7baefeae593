"""Expressions of SQL as terms: a function of terms, a constant or a field. What is only another way to write, is gone.

Terms of one text are equal wherever they stand, so that a column can be found among the keys, and numbers that several
aggregates need are computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlglot import exp

from export.questions.draft import MOST_EXACT
from export.questions.parsing import TABLE, Source
from fedcore.plan import Field
from fedcore.questions.question import Literals
from fedcore.validation import offered

DEVICES, FILTER, CLIP_PER_DEVICE = "COUNT(DISTINCT DEVICE)", "FILTER", "CLIP_PER_DEVICE"
CONSTANT, FIELD = "constant", "field"
_COUNT, _DEVICE = "COUNT", f"{TABLE}.device"


@dataclass(frozen=True, slots=True)
class Term:
    """A function by its name in `fedcore.questions.functions`, or an aggregate by its name in SQL, in capitals, of
    terms. value: of a constant, or the name of a field. node: where it stands.
    """

    function: str
    arguments: tuple[Term, ...]
    node: exp.Expr = field(compare=False, repr=False)
    value: Literals = field(default=None, compare=False)
    written: str = ""

    @property
    def aggregate(self) -> bool:
        """Whether it is of several rows itself."""
        return self.function in AGGREGATES

    @property
    def aggregates(self) -> bool:
        """Whether an aggregate is in it."""
        return self.aggregate or any(argument.aggregates for argument in self.arguments)


def constant(value: Literals, node: exp.Expr) -> Term:
    """A constant. 1 and 1.0 are two: SQLite divides them by another rule."""
    return Term(CONSTANT, (), node, value, repr(value))


_BINARY: dict[type[Any], str] = {
    **{exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%", exp.And: "and", exp.Or: "or"},
    **{exp.EQ: "=", exp.NEQ: "<>", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">="},
}
_AGGREGATES: dict[type[Any], str] = {
    **{exp.Avg: "AVG", exp.Max: "MAX", exp.Min: "MIN", exp.Sum: "SUM", exp.Variance: "VARIANCE"},
    **{exp.Stddev: "STDDEV", exp.StddevPop: "STDDEV_POP", exp.StddevSamp: "STDDEV", exp.VariancePop: "VAR_POP"},
}
_CALLS: dict[type[Any], tuple[str, ...]] = {
    exp.Abs: ("abs", "this"),
    exp.ApproxQuantile: ("APPROX_QUANTILE", "this", "quantile"),
    exp.Not: ("not", "this"),
    exp.WidthBucket: ("bucket", "this", "min_value", "max_value", "num_buckets"),
}
"""Functions, and the parser's names of their arguments."""
AGGREGATES = frozenset({*_AGGREGATES.values(), _COUNT, "TOTAL", "APPROX_QUANTILE", DEVICES, FILTER, CLIP_PER_DEVICE})
OFFERED = (
    *("ABS", "APPROX_QUANTILE", "AVG", "CAST", "CLIP", "CLIP_PER_DEVICE", "COALESCE", "COUNT", "IFNULL", "IIF", "MAX"),
    *("MIN", "NULLIF", "ROUND", "STDDEV", "STDDEV_POP", "SUM", "TOTAL", "VARIANCE", "VAR_POP", "WIDTH_BUCKET"),
)
_WORDS: dict[type[Any], str] = {
    exp.Window: "OVER; a device's rows have no order",
    exp.Subquery: "a query inside a query",
    exp.Select: "a query inside a query",
    exp.Exists: "a query inside a query",
    exp.DPipe: "||, as they have no functions of text",
    exp.Like: "LIKE, as they have no functions of text",
    exp.Glob: "GLOB, as they have no functions of text",
    exp.Star: "*; only sums leave a device: write COUNT(*)",
    exp.Distinct: "DISTINCT, other than COUNT(DISTINCT DEVICE)",
    exp.Mod: "MOD, which SQLite computes of real numbers; write a % b, of whole ones",
    exp.NullSafeEQ: "IS, other than IS NULL and IS NOT NULL",
    exp.NullSafeNEQ: "IS NOT, other than IS NOT NULL",
    exp.Order: "an order inside a function",
}


class Reader:
    """Reads the expressions of one query. Raises QuestionError for what is outside the subset, with its place."""

    def __init__(self, source: Source, matching: Callable[[str], Sequence[Field]]) -> None:
        """matching: the fields that a name may mean."""
        self._source, self._matching = source, matching

    def term(self, node: exp.Expr) -> Term:
        """The term of an expression."""
        kind = type(node)
        if kind is exp.Paren:
            return self.term(node.this)
        if "start" in node.meta and isinstance(node, exp.Func | exp.Mod) and self._source.word(node) not in OFFERED:
            raise self._unknown(node)  # the parser takes many names of other databases for one function
        if kind in _BINARY:
            return self._call(_BINARY[kind], node, node.this, node.expression)
        if kind in _AGGREGATES:
            return self._call(_AGGREGATES[kind], node, node.this)
        if kind in _CALLS:
            function, *names = _CALLS[kind]
            if any(node.args.get(name) is None for name in names):
                raise self._source.refusal(node, f"{self._source.word(node)} takes {len(names)} arguments")
            return self._call(function, node, *(node.args[name] for name in names))
        if kind in _READ:
            return _READ[kind](self, node)
        raise self._unknown(node)

    def _unknown(self, node: exp.Expr) -> Exception:
        words = _WORDS.get(type(node))
        if words is None:
            name = self._source.word(node)
            words = f"{name}; {offered(name, OFFERED)}" if isinstance(node, exp.Func) else name
        return self._source.refusal(node, f"devices do not answer {words}")

    def _call(self, function: str, node: exp.Expr, *arguments: exp.Expr) -> Term:
        return Term(function, tuple(map(self.term, arguments)), node)

    def _constant(self, node: exp.Expr) -> Term:
        match node:
            case exp.Boolean():
                return constant(int(node.this), node)
            case exp.Null():
                return constant(None, node)
        if node.is_string:
            if not node.this:
                raise self._source.refusal(node, "an empty text, which a table shows as NULL; write another")
            return constant(node.this, node)
        value = int(node.this) if node.this.isdigit() else float(node.this)
        if (isinstance(value, int) and value > MOST_EXACT) or math.isinf(value):
            raise self._source.refusal(node, f"{node.this} is too large: whole numbers are exact to 2^53")
        return constant(value, node)

    def _field(self, node: exp.Column) -> Term:
        if isinstance(node.this, exp.Star):
            raise self._unknown(node.this)
        if node.table and node.table.casefold() != TABLE:
            raise self._source.refusal(node, f"a device has one table, {TABLE}")
        found = self._matching(node.name)
        if len(found) > 1:
            names = ", ".join(item.name for item in found)
            raise self._source.refusal(node, f"{node.name} may be any of {names}: write the field as it is called")
        name = found[0].name if found else node.name
        return Term(FIELD, (), node, name, name)

    def _negative(self, node: exp.Neg) -> Term:
        inner = self.term(node.this)
        if inner.function == CONSTANT and isinstance(inner.value, int | float):
            return constant(-inner.value, node)
        return Term("negative", (inner,), node)

    def _is(self, node: exp.Is) -> Term:
        if not isinstance(node.expression, exp.Null):
            raise self._source.refusal(node, f"devices do not answer {_WORDS[exp.NullSafeEQ]}")
        return self._call("is_null", node, node.this)

    def _between(self, node: exp.Between) -> Term:
        value, low, high = map(self.term, (node.this, node.args["low"], node.args["high"]))
        return Term("and", (Term(">=", (value, low), node), Term("<=", (value, high), node)), node)

    def _in(self, node: exp.In) -> Term:
        if not node.expressions:
            raise self._source.refusal(node, "IN takes a list of values")
        value = self.term(node.this)
        equal = tuple(Term("=", (value, self.term(other)), other) for other in node.expressions)
        return Term("or", equal, node)

    def _case(self, node: exp.Case | exp.If) -> Term:
        branches, compared = node.args.get("ifs", [node]), None if isinstance(node, exp.If) else node.this
        default, arguments = node.args.get("default") or node.args.get("false"), list[Term]()
        for branch in branches:
            condition = self.term(branch.this)
            if compared is not None:
                condition = Term("=", (self.term(compared), condition), branch)
            arguments += [condition, self.term(branch.args["true"])]
        return Term("case", (*arguments, constant(None, node) if default is None else self.term(default)), node)

    def _nullif(self, node: exp.Nullif) -> Term:
        value, other = self.term(node.this), self.term(node.expression)
        return Term("case", (Term("=", (value, other), node), constant(None, node), value), node)

    def _several(self, node: exp.Coalesce | exp.Greatest | exp.Least) -> Term:
        function = {exp.Greatest: "max", exp.Least: "min"}.get(type(node), "coalesce")
        if isinstance(node, exp.Greatest | exp.Least) and self._source.word(node) != function.upper():
            raise self._unknown(node)
        count = 1 + len(node.expressions)
        if function == "coalesce" and (count < 2 or (count > 2 and self._source.word(node) == "IFNULL")):
            raise self._source.refusal(node, "IFNULL takes two arguments, COALESCE two or more")
        return self._call(function, node, node.this, *node.expressions)

    def _round(self, node: exp.Round) -> Term:
        if node.args.get("decimals") is not None:
            raise self._source.refusal(node, "ROUND takes one number here: digits cannot be cut exactly")
        return self._call("round", node, node.this)

    def _cast(self, node: exp.Cast) -> Term:
        kind = node.to.this
        if kind in exp.DataType.INTEGER_TYPES:
            return self._call("integer", node, node.this)
        if kind in exp.DataType.FLOAT_TYPES:
            return self._call("real", node, node.this)
        raise self._source.refusal(node, "CAST here is to INTEGER or REAL")

    def _count(self, node: exp.Count) -> Term:
        inner = node.this
        if node.expressions:
            raise self._source.refusal(node, "COUNT takes one expression")
        if inner is None or isinstance(inner, exp.Star):
            return Term(_COUNT, (), node)
        if isinstance(inner, exp.Distinct):
            match inner.expressions:
                case [exp.Column(name=name, table=table)] if f"{table or TABLE}.{name}".casefold() == _DEVICE:
                    if any(item.name == name for item in self._matching(name)):
                        other = name.swapcase()
                        raise self._source.refusal(
                            node, f"{name} is a field here: COUNT(DISTINCT {other}) is of devices"
                        )
                    return Term(DEVICES, (), node)
            raise self._unknown(inner)
        return self._call(_COUNT, node, inner)

    def _named(self, node: exp.Anonymous) -> Term:
        """Functions that the parser does not know."""
        name, arguments = node.name.upper(), node.expressions
        takes = {"TOTAL": 1, "CLIP": 3, CLIP_PER_DEVICE: 3}.get(name)
        if takes is None:
            raise self._unknown(node)
        if len(arguments) != takes:
            raise self._source.refusal(node, f"{name} takes {takes} argument{'s' * (takes > 1)}, not {len(arguments)}")
        return self._call("clip" if name == "CLIP" else name, node, *arguments)


_READ: dict[type[Any], Callable[[Reader, Any], Term]] = {
    exp.Anonymous: Reader._named,
    exp.Between: Reader._between,
    exp.Boolean: Reader._constant,
    exp.Case: Reader._case,
    exp.Cast: Reader._cast,
    exp.Coalesce: Reader._several,
    exp.Column: Reader._field,
    exp.Count: Reader._count,
    exp.Filter: lambda reader, node: reader._call(FILTER, node, node.this, node.expression.this),
    exp.Greatest: Reader._several,
    exp.If: Reader._case,
    exp.In: Reader._in,
    exp.Is: Reader._is,
    exp.Least: Reader._several,
    exp.Literal: Reader._constant,
    exp.Neg: Reader._negative,
    exp.Null: Reader._constant,
    exp.Nullif: Reader._nullif,
    exp.Round: Reader._round,
}
