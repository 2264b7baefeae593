"""Columns as what is read from the sums over devices: aggregates are sums, keys are groups, the rest is computed later.

    SUM(x)      Σx, NULL where no x is: the number of them is summed too
    AVG(x)      Σx / n
    VARIANCE    (Σk² − (Σk)² / n) / (n − 1), exactly, of a whole number k: x less the middle of its range, and of a real
                x the nearest of 2⁵³ steps of its range, lest both sums be large and near
    MIN(x)      the least value that minimum_devices have, as a group needs them to be shown
    quantiles   from bins, where as many devices have a value in the quantile's bin or below, and in it or above

Under noise a mean is of x less the middle of its range too, as the norm is smaller; and a sum of no rows is noise, not
NULL, as nobody can tell. Without noise an aggregate is NULL where fewer than minimum_devices contribute to a piece of
it (`export.questions.scalars`), as a group of so few is hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from export.questions.arithmetic import OPERATORS, edges_of
from export.questions.draft import MOST_EXACT, among
from export.questions.expressions import Expression, Kind, as_real, derived, literal
from export.questions.parsing import Source
from export.questions.scalars import Contributors, Scalars
from export.questions.sums import FARTHEST, NARROWEST, Bins, Sums, parted
from export.questions.terms import CLIP_PER_DEVICE, CONSTANT, DEVICES, FIELD, FILTER, Term
from fedcore.errors import QueryError, QuestionError
from fedcore.questions.question import MOST_CELLS, Call, Cell, Group, Number, Value

BINS = 100
"""The bins of a quantile, unless there are fewer values."""
HALF_BITS = 26
MOST_STEPS = 2 ** (2 * HALF_BITS) - 1
"""Steps on each side of the middle of a range, by which real numbers are counted where sums must not cancel."""
WIDEST = 1e150
_ROOTS = {"STDDEV": "VARIANCE", "STDDEV_POP": "VAR_POP"}
_SPREADS = {"VARIANCE": "variance", "VAR_POP": "variance_of_all"}


class Shown(NamedTuple):
    """What a column, or a part of it, shows, and the kind of number that it is."""

    value: Value
    kind: Kind


class Aggregate(NamedTuple):
    """An aggregate with what its rows must fulfil. held: what a device's sum is held to."""

    term: Term
    condition: Expression | None = None
    held: tuple[float, float] | None = None


class Columns:
    """Reads the columns of one query; the sums that they need are added to `sums`. Raises QuestionError."""

    def __init__(
        self, source: Source, scalars: Scalars, sums: Sums, keys: Mapping[Term, int], minimum_devices: int
    ) -> None:
        self._source, self._scalars, self._sums, self._keys = source, scalars, sums, keys
        self._minimum_devices, self._contributors = minimum_devices, Contributors(scalars)

    def of(self, term: Term) -> Shown:
        """What a term shows."""
        if term in self._keys:
            key = self._keys[term]
            return Shown(Group(key), self._sums.groups.keys[key].expression.kind)
        if term.aggregate:
            return self._aggregate(term)
        if term.function == CONSTANT:
            constant = literal(term.value)
            return Shown(Number(term.value), constant.kind)
        if term.function == FIELD:
            self._scalars.of(term, "a column")  # an unknown name, an array
            raise self._source.refusal(
                term.node,
                f"{term.value} is of one row, and only sums leave a device: write SUM({term.value}), "
                f"AVG({term.value}), …, or GROUP BY {term.value}",
            )
        return self._call(term)

    def _call(self, term: Term) -> Shown:
        shown = [self.of(argument) for argument in term.arguments]
        values, kinds = tuple(one.value for one in shown), [one.kind for one in shown]
        if term.function == "bucket":
            raise self._source.refusal(term.node, "WIDTH_BUCKET is of rows, not of aggregates: use CASE")
        if term.function == "case" and "text" in kinds[:-1:2]:
            raise self._source.refusal(term.node, "a text is no condition; columns compute with numbers")
        if term.function not in {"case", "coalesce", "is_null"} and "text" in kinds:
            raise self._source.refusal(term.node, f"{term.function.upper()} of text; columns compute with numbers")
        if term.function == "/" and "either" in kinds and "real" not in kinds:
            raise self._source.refusal(
                term.node, "this number may be whole or not, and whole ones divide by another rule: CAST it AS REAL"
            )
        if term.function == "clip":
            ends = [self._scalars.of(end, "the bounds of CLIP") for end in term.arguments[1:]]
            self._scalars.placed(term, OPERATORS["clip"], literal(0), *ends)  # what is no bound of a row is none here
            kind: Kind = "whole" if {*kinds} <= {"whole", "truth"} else "real"
            value, low, high = values if kind == "whole" else (Call("real", (one,)) for one in values)
            return Shown(Call("max", (low, Call("min", (high, value)))), kind)
        return Shown(Call(term.function, values), _kind(term.function, kinds))

    def _aggregate(self, term: Term) -> Shown:
        aggregate = Aggregate(term)
        if term.function == CLIP_PER_DEVICE:
            aggregate = self._held(aggregate)
        if aggregate.term.function == FILTER:
            inner, condition = aggregate.term.arguments
            if not inner.aggregate or inner.function in {FILTER, CLIP_PER_DEVICE}:
                raise self._source.refusal(term.node, "FILTER follows an aggregate: SUM(x) FILTER (WHERE …)")
            aggregate = aggregate._replace(term=inner, condition=self._scalars.condition(condition, FILTER))
        try:
            return self._guarded(aggregate, _AGGREGATES[aggregate.term.function](self, aggregate))
        except QueryError:
            raise
        except QuestionError as error:
            raise self._source.refusal(term.node, str(error)) from error

    def _guarded(self, aggregate: Aggregate, shown: Shown) -> Shown:
        """What an aggregate shows, where as many devices as a group needs contribute to each piece of it."""
        if self._minimum_devices == 1 or self._sums.bounds.private:
            return shown
        counts: dict[Value, None] = dict.fromkeys(map(Cell, self._counts(aggregate)))
        counts |= dict.fromkeys(self._counts_within(aggregate))
        counts.pop(Cell(self._sums.voters()), None)
        if not counts:
            return shown
        return Shown(Call("if_each", (shown.value, Number(self._minimum_devices), *counts)), shown.kind)

    def _counts(self, aggregate: Aggregate) -> list[str]:
        """The blocks that count who contributes to each piece of an aggregate."""
        (name, arguments), condition = (aggregate.term.function, aggregate.term.arguments), aggregate.condition
        if name in {"MIN", "MAX"}:  # values that enough devices have
            return []
        if name in {"COUNT", DEVICES}:
            numbers = [self._scalars.of(one, name) for one in arguments]
            known = all(number.kind != "null" for number in numbers)
            return [self._sums.voters(condition, *numbers)] if known else []
        number = self._scalars.of(arguments[0], name)
        counts = [self._sums.voters(rows) for rows in self._contributors.to(arguments[0], condition)]
        return counts or [self._sums.voters(condition, number)]  # of zeros, a sum is 0 where there are some, or NULL

    def _counts_within(self, aggregate: Aggregate) -> list[Value]:
        """Of sums that are held to bounds: who has one above 0 and within the bound, and below 0, where that may be."""
        if aggregate.held is None:
            return []
        number, condition, counts = self._summed(aggregate), aggregate.condition, list[Value]()
        for end in aggregate.held:
            most = number.high if end > 0 else -number.low
            if not end or most <= 0:
                continue
            several = not number.whole or abs(end) > 1  # else a sum is 0 or held
            passes = several and most * (self._sums.bounds.most_rows or math.inf) > abs(end)
            if passes or number.low < 0 < number.high:  # else a sum has the sign of each row
                towards = Cell(self._sums.towards(end, condition, number))
                beyond = Cell(self._sums.towards(end, condition, number, beyond=True)) if passes else None
                counts.append(towards if beyond is None else Call("-", (towards, beyond)))
        return counts

    def _held(self, aggregate: Aggregate) -> Aggregate:
        """The aggregate in CLIP_PER_DEVICE, with its bounds."""
        inner, *ends = aggregate.term.arguments
        low, high = (self._scalars.of(end, CLIP_PER_DEVICE) for end in ends)
        of = inner.arguments[0] if inner.function == FILTER else inner
        if of.function not in {"SUM", "TOTAL", "COUNT"} or not (low.constant and high.constant):
            raise self._source.refusal(inner.node, "CLIP_PER_DEVICE takes SUM, TOTAL or COUNT, and two constants")
        held = [end.value for end in (low, high)]
        if any(isinstance(end, str | None) for end in held) or not -FARTHEST <= held[0] <= 0 <= held[1] <= FARTHEST:
            raise self._source.refusal(
                inner.node, "CLIP_PER_DEVICE needs 0 between its bounds: a device without rows adds nothing"
            )
        if held[1] - held[0] <= NARROWEST:
            raise self._source.refusal(inner.node, "CLIP_PER_DEVICE needs two bounds that are apart")
        return aggregate._replace(term=inner, held=(held[0], held[1]))

    def _summed(self, aggregate: Aggregate) -> Expression:
        """The number that is added up. Of COUNT it is 1 where a number is not NULL, which it is elsewhere."""
        name, arguments = aggregate.term.function, aggregate.term.arguments
        if name != "COUNT":
            return self._number(aggregate)
        null = OPERATORS["is_null"](self._scalars.of(arguments[0], name)) if arguments else literal(0)
        return self._sums.once(("one", *arguments), lambda: OPERATORS["case"](null, literal(None), literal(1)))

    def _number(self, aggregate: Aggregate) -> Expression:
        """The number that is aggregated. Raises QuestionError for a text."""
        term = aggregate.term
        number = self._scalars.of(term.arguments[0], f"another aggregate, {term.function}")
        if number.kind == "text":
            raise QuestionError(f"{term.function} of a text; texts are keys of groups")
        if number.kind == "null":
            raise QuestionError(f"{term.function} of NULL; there is nothing to add up")
        return number

    def _count(self, aggregate: Aggregate) -> Shown:
        arguments = aggregate.term.arguments
        number = self._scalars.of(arguments[0], "another aggregate, COUNT") if arguments else None
        if number is not None and number.kind == "null":
            return Shown(Number(0), "whole")
        if aggregate.held is None:
            return Shown(Cell(self._sums.count(aggregate.condition, number)), "whole")
        count = self._sums.total(aggregate.condition, self._summed(aggregate), aggregate.held)
        return Shown(count, "real" if _is_real(aggregate.held) else "whole")

    def _sum(self, aggregate: Aggregate) -> Shown:
        number = self._number(aggregate)
        total = self._sums.total(aggregate.condition, number, aggregate.held)
        if isinstance(total, Call):
            total = Call("+", (total, Number(0)))  # beyond 64 bits a real one, as of other arithmetic
        if (number.nullable or aggregate.condition is not None) and not self._sums.bounds.private:
            total = Call("null_if_none", (total, Cell(self._sums.count(aggregate.condition, number))))
        kind: Kind = "whole" if number.whole else number.kind
        return Shown(total, "real" if kind == "whole" and _is_real(aggregate.held) else kind)

    def _total(self, aggregate: Aggregate) -> Shown:
        total = self._sums.total(aggregate.condition, self._number(aggregate), aggregate.held)
        return Shown(Call("real", (total,)), "real")

    def _average(self, aggregate: Aggregate) -> Shown:
        number = self._number(aggregate)
        count = Cell(self._sums.count(aggregate.condition, number))
        if not (self._sums.bounds.private and number.bounded):
            return Shown(Call("mean", (self._sums.total(aggregate.condition, number), count)), "real")
        middle = _middle(number)
        rest = self._sums.total(aggregate.condition, self._centred(number))
        return Shown(Call("+", (Number(middle), Call("mean", (rest, count)))), "real")

    def _spread(self, aggregate: Aggregate) -> Shown:
        name = aggregate.term.function
        number = self._number(aggregate)
        count = Cell(self._sums.count(aggregate.condition, number))
        if self._sums.bounds.private:
            centred, step = self._centred(number), 1.0
            if FARTHEST < centred.largest**2 < math.inf:
                raise QuestionError(f"this needs a narrower CLIP(x, low, high): squares are held to {FARTHEST:g} here")
            squared = self._sums.once(("squared", centred), lambda: _square(as_real(centred)))
            squares = self._sums.total(aggregate.condition, squared)
        else:
            centred, step = self._in_steps(number)
            parts = self._sums.once(("squares", centred), lambda: _squares(centred))
            squares = self._sums.exact(aggregate.condition, centred, parts)
        total = self._sums.total(aggregate.condition, centred)
        variance: Value = Call(_SPREADS[_ROOTS.get(name, name)], (total, squares, count))
        shown = Call("root", (variance,)) if name in _ROOTS else variance
        unit = step if name in _ROOTS else step**2
        return Shown(shown if step == 1 else Call("*", (shown, Number(unit))), "real")

    def _in_steps(self, number: Expression) -> tuple[Expression, float]:
        """A number less the middle of its range as a whole number of steps, and the step: 1 of a whole number."""
        if not number.bounded:
            raise QuestionError("this needs CLIP(x, low, high) with constants: without bounds two large sums cancel")
        if number.whole:
            return self._centred(number), 1.0
        half = (number.high / 2 - number.low / 2) or 1.0
        if half > WIDEST:
            raise QuestionError(f"this needs a narrower CLIP(x, low, high): squares of numbers reach {WIDEST**2:g}")
        return self._sums.once(("steps", number), lambda: _steps(number, half)), half / MOST_STEPS

    def _centred(self, number: Expression) -> Expression:
        """A number less the middle of its range; as it is where it has none."""
        if not number.bounded:
            return number
        return self._sums.once(("centred", number), lambda: OPERATORS["-"](number, literal(_middle(number))))

    def _extreme(self, aggregate: Aggregate) -> Shown:
        name = aggregate.term.function
        number = self._number(aggregate)
        if not number.whole:
            raise QuestionError(
                f"{name} of a number that is not whole is one device's own: ask APPROX_QUANTILE(x, "
                f"{0.01 if name == 'MIN' else 0.99}), or {name}(CAST(CLIP(x, low, high) AS INTEGER))"
            )
        if self._sums.bounds.private:
            raise QuestionError(
                f"noise makes devices up for values that none has, of which one would be the {name}: ask "
                f"APPROX_QUANTILE(x, {0.01 if name == 'MIN' else 0.99})"
            )
        low, high = int(number.low), int(number.high)
        self._check_bins(high - low + 1, name)
        if low == high:
            having = Cell(self._sums.voters(aggregate.condition, number))
            return Shown(Call("if_each", (Number(low), Number(self._minimum_devices), having)), "whole")
        bins = Bins(number, tuple(float(value) for value in range(low + 1, high + 1)))
        counts = Cell(self._sums.bins(aggregate.condition, bins, devices=True))
        function = "least" if name == "MIN" else "greatest"
        values = Number(tuple(range(low, high + 1)))
        return Shown(Call(function, (counts, Number(self._minimum_devices), values)), "whole")

    def _quantile(self, aggregate: Aggregate) -> Shown:
        number = self._number(aggregate)
        share = self._scalars.of(aggregate.term.arguments[1], "APPROX_QUANTILE")
        if not share.constant or share.kind not in {"whole", "real"} or not 0 <= share.value <= 1:
            raise QuestionError("APPROX_QUANTILE takes a share from 0 to 1, as in APPROX_QUANTILE(x, 0.5)")
        if not number.bounded or number.low == number.high:
            raise QuestionError(
                "APPROX_QUANTILE counts values in bins: CLIP(x, low, high) says between which constants"
            )
        few = number.whole and number.high - number.low < BINS
        self._check_bins(int(number.high - number.low) + 1 if few else BINS, "APPROX_QUANTILE")
        if few:
            values = tuple(range(int(number.low), int(number.high) + 1))
            edges = tuple(map(float, values[1:]))
            function, given = "least_with_share", Number(values)
        else:
            all_edges = tuple(edges_of(number.low, number.high + number.whole, BINS))
            function, edges, given = "quantile", all_edges[1:-1], Number(all_edges)
        bins, condition = Bins(number, edges), aggregate.condition
        counts, wanted = Cell(self._sums.bins(condition, bins, devices=False)), Number(share.value)
        found = Call(function, (counts, wanted, given))
        if self._minimum_devices > 1 and not self._sums.bounds.private:
            sides = [Cell(self._sums.bins(condition, bins, devices=True, within=one)) for one in (torch.ge, torch.le)]
            found = among(self._minimum_devices, found, counts, wanted, sides)
        return Shown(found, "whole" if few else "real")

    def _check_bins(self, bins: int, what: str) -> None:
        groups = self._sums.groups.number
        if bins * groups > MOST_CELLS:
            of = f" in each of {groups:,} groups" if groups > 1 else ""
            raise QuestionError(
                f"{what} counts {bins:,} values{of} here; an answer has {MOST_CELLS:,} numbers: CLIP or divide it"
            )


def _square(number: Expression) -> Expression:
    square = OPERATORS["*"](number, number)
    return replace(square, low=type(square.low)(0))


def _steps(number: Expression, half: float) -> Expression:
    """A real number less the middle of its range, as the nearest of MOST_STEPS steps on each side."""
    real, middle, scale = as_real(number), number.low / 2 + number.high / 2, MOST_STEPS / half

    def function(values: Tensor) -> Tensor:
        steps = (values - middle) * scale
        nearest: Tensor = (steps + (0.5 - (steps < 0).to(torch.float64))).to(torch.int64)
        held: Tensor = nearest.clamp(-MOST_STEPS, MOST_STEPS)
        return held

    return derived("whole", (-MOST_STEPS, MOST_STEPS), function, real)


def _squares(number: Expression) -> list[tuple[int, Expression]]:
    """Whole numbers and by how many bits they are shifted, which add up to the square of one."""
    if number.largest**2 <= MOST_EXACT:
        return [(0, _square(number))]
    low, high = parted(number, HALF_BITS)
    crossed = OPERATORS["*"](literal(2), OPERATORS["*"](low, high))
    return [(0, _square(low)), (HALF_BITS, crossed), (2 * HALF_BITS, _square(high))]


def _middle(number: Expression) -> float:
    """The middle of a range, whole for whole numbers."""
    return (int(number.low) + int(number.high)) // 2 if number.whole else (number.low + number.high) / 2


def _is_real(held: tuple[float, float] | None) -> bool:
    return held is not None and any(isinstance(end, float) for end in held)


def _kind(function: str, kinds: list[Kind]) -> Kind:
    """The kind of what a function of numbers gives."""
    if function in {"=", "<>", "<", "<=", ">", ">=", "and", "or", "not", "is_null", "integer"}:
        return "whole"
    if function in {"real", "round"}:
        return "real"
    results = kinds
    if function == "case":
        results = [*kinds[1:-1:2], kinds[-1]] if len(kinds) > 1 else kinds
    known = {"whole" if kind == "truth" else kind for kind in results} - {"null"}
    if "text" in known:
        return "text"
    if len(known) <= 1:
        return next(iter(known), "null")
    chosen = function in {"case", "coalesce", "min", "max"}
    return "either" if chosen or "real" not in known else "real"


_AGGREGATES: Mapping[str, Callable[[Columns, Aggregate], Shown]] = {
    "AVG": Columns._average,
    "COUNT": Columns._count,
    "SUM": Columns._sum,
    "TOTAL": Columns._total,
    **dict.fromkeys(("MAX", "MIN"), Columns._extreme),
    **dict.fromkeys((*_ROOTS, *_SPREADS), Columns._spread),
    "APPROX_QUANTILE": Columns._quantile,
    DEVICES: lambda columns, aggregate: Shown(Cell(columns._sums.voters(aggregate.condition)), "whole"),
}
