"""Terms as expressions of a row: fields are looked up, and every error gets its place in the query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from export.questions.conditions import truth
from export.questions.expressions import Expression, field_of, literal
from export.questions.measured import smallest
from export.questions.operators import OPERATORS
from export.questions.source import Source
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
