"""Terms as expressions of a row: functions, fields, and the rows that add something to an aggregate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from export.questions.arithmetic import COMPARISONS, OPERATORS, truth
from export.questions.draft import smallest
from export.questions.expressions import Expression, field_of, literal
from export.questions.parsing import Source
from export.questions.terms import CONSTANT, FIELD, Term
from fedcore.errors import QueryError, QuestionError
from fedcore.plan import Field
from fedcore.validation import offered

Made = TypeVar("Made")


class Scalars:
    """The expressions of one query, each made once. read: the fields that they read, in the order of `fields`."""

    def __init__(self, source: Source, fields: Sequence[Field]) -> None:
        self._source, self._fields = source, fields
        self._known: dict[Term, Expression] = {}
        self._conditions: dict[Term, Expression] = {}
        self._read: set[str] = set()

    @property
    def read(self) -> tuple[Field, ...]:
        """The fields that are read; if none is, the smallest one, as devices count rows of something."""
        found = tuple(item for item in self._fields if item.name in self._read)
        return found or (smallest(self._fields),)

    def matching(self, name: str) -> list[Field]:
        """The fields that a name may mean: the one that is called so, else those that are in other letters' case."""
        exact = [item for item in self._fields if item.name == name]
        return exact or [item for item in self._fields if item.name.casefold() == name.casefold()]

    def of(self, term: Term, where: str) -> Expression:
        """The expression of a term. where: a clause or function that no aggregate is in. Raises QuestionError."""
        if term.aggregate:
            raise self._source.refusal(term.node, f"an aggregate in {where}; it is computed of one row after the other")
        if term not in self._known:
            arguments = [self.of(argument, where) for argument in term.arguments]
            self._known[term] = self.placed(term, self._made, term, arguments)
        return self._known[term]

    def condition(self, term: Term, where: str) -> Expression:
        """The truth of a term."""
        if term not in self._conditions:
            self._conditions[term] = self.placed(term, truth, self.of(term, where))
        return self._conditions[term]

    def placed(self, term: Term, make: Callable[..., Made], *arguments: object) -> Made:
        """What `make` gives; its QuestionError names the place of a term."""
        try:
            return make(*arguments)
        except QueryError:
            raise
        except QuestionError as error:
            raise self._source.refusal(term.node, str(error)) from error

    def _made(self, term: Term, arguments: Sequence[Expression]) -> Expression:
        if term.function == CONSTANT:
            return literal(term.value)
        if term.function != FIELD:
            return OPERATORS[term.function](*arguments)
        item = next((item for item in self._fields if item.name == term.value), None)
        if item is None:
            raise QuestionError(self._unknown(str(term.value)))
        self._read.add(item.name)
        return field_of(item)

    def _unknown(self, name: str) -> str:
        if name.casefold() == "device":
            return "DEVICE is no field; it can be counted: COUNT(DISTINCT DEVICE)"
        return f"no field is called {name!r}; {offered(name, [item.name for item in self._fields])}"


# Contributors to an aggregate: the rows that add something to it, piece by piece, whose devices are counted.
#
# A group of few devices is hidden, and so is what only few devices add to a sum, whichever way the query picks them. A
# number is taken apart into pieces. A row contributes to a piece where it is neither NULL nor 0:
#
#     CASE WHEN c THEN a ELSE b END     a where c is true, and b where it is not; COALESCE likewise
#     MAX(a, b), CLIP(a, 1, 9)          a where it is what is given, and b likewise, unless it is constant
#     a + b                             the number itself, and the pieces of a and of b
#     a * b, ABS(a)                     the number itself, and the pieces within a where b is not 0, and within b
#     a = b, a AND b, a IS NULL         where it is true
#
# Two answers, or two columns, can be subtracted all the same, and weights can make one row outweigh all others: against
# that there is only noise.

Piece: TypeAlias = Expression | None
"""The rows that contribute to a piece, as a condition; None is all."""
_WHOLES = frozenset({*COMPARISONS, "and", "or", "not", "is_null", CONSTANT, FIELD})
"""Terms that are one piece."""
_CHOICES = frozenset({"bucket", "case", "clip", "coalesce", "max", "min"})
"""Functions that give one of their arguments, or, outside of two bounds, a constant."""
_FACTORS = frozenset({"*", "/", "%", "abs", "integer", "negative", "real", "round"})
"""Functions that are 0 or NULL where an argument is: who contributes to one contributes to its arguments."""


class Contributors:
    """The contributors to the numbers of one query. Numbers that were found before have the same pieces again."""

    def __init__(self, scalars: Scalars) -> None:
        self._scalars = scalars
        self._found: dict[tuple[Term, Piece], tuple[Piece, ...]] = {}

    def to(self, term: Term, condition: Piece) -> tuple[Piece, ...]:
        """The pieces of a number, of the rows for which a condition is true."""
        if (term, condition) not in self._found:
            self._found[term, condition] = tuple(self._pieces(term, condition))
        return self._found[term, condition]

    def _pieces(self, term: Term, condition: Piece) -> Iterator[Piece]:
        number = self._of(term)
        if condition is not None and condition.constant and not condition.value:
            return
        if number.constant:
            yield from (condition,) if number.value else ()
        elif term.function in _CHOICES:
            for taken, value in self._choices(term):
                yield from self.to(value, _and(condition, *taken))
        else:
            may_add_nothing = number.nullable or number.low <= 0 <= number.high
            yield _and(condition, truth(number)) if may_add_nothing else condition
            yield from self._within(term, condition)

    def _within(self, term: Term, condition: Piece) -> Iterator[Piece]:
        """The pieces of what a function is of."""
        varying = [] if term.function in _WHOLES else [one for one in term.arguments if not self._of(one).constant]
        for argument in varying:
            others = [truth(self._of(one)) for one in varying if one is not argument]
            inner = _and(condition, *others) if term.function in _FACTORS else condition
            counted = term.function in _FACTORS and argument.function not in _CHOICES
            yield from self._within(argument, inner) if counted else self.to(argument, inner)

    def _choices(self, term: Term) -> Iterator[tuple[list[Expression], Term]]:
        """What a choice may give, each with the conditions under which it does."""
        if term.function in {"bucket", "clip"}:
            value, low, high = term.arguments[:3]
            yield [self._compared(">=", value, low), self._compared("<=", value, high)], value
            return
        if term.function in {"max", "min"}:
            reaches = ">=" if term.function == "max" else "<="
            for value in (one for one in term.arguments if not self._of(one).constant):
                yield [self._compared(reaches, value, other) for other in term.arguments if other != value], value
            return
        before: list[Expression] = []
        if term.function == "coalesce":
            for value in term.arguments:
                yield before, value
                before = [*before, OPERATORS["is_null"](self._of(value))]
            return
        *pairs, otherwise = term.arguments
        for condition, value in zip(pairs[::2], pairs[1::2], strict=True):
            met = truth(self._of(condition))
            yield [*before, met], value
            before = [*before, OPERATORS["case"](met, literal(0), literal(1))]
        yield before, otherwise

    def _compared(self, comparison: str, left: Term, right: Term) -> Expression:
        return OPERATORS[comparison](self._of(left), self._of(right))

    def _of(self, term: Term) -> Expression:
        return self._scalars.of(term, "another aggregate")


def _and(*conditions: Piece) -> Piece:
    """Where all conditions are true."""
    given = [one for one in conditions if one is not None]
    return OPERATORS["and"](*given) if given else None
