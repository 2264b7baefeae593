"""A question with what the graph computes of every row: what the exporter makes a plan of."""

from __future__ import annotations

from typing import NamedTuple

from export.model import ModelSpec
from export.question import Rows, question_model
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import Algorithm
from fedcore.plan import Field
from fedcore.questions.question import Question


class Asked(NamedTuple):
    """A question, the fields that its rows read, of which there is one at least, and the numbers of a row."""

    question: Question
    fields: tuple[Field, ...]
    rows: Rows

    def spec(self) -> ModelSpec:
        """The model."""
        return question_model(self.question, self.fields, self.rows)

    def algorithm(self) -> Algorithm:
        """The algorithm; with noise to come, one whose reports are held to the norm that the question says."""
        clip = {"clip_norm": self.question.clip} if self.question.private else {}
        return create("question", {"question": self.question.encode(), **clip})
