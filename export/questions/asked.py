"""A question with what the graph computes of every row: what the exporter makes a plan of."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from export.model import ModelSpec
from export.question import Rows, question_model
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import Algorithm
from fedcore.plan import Field
from fedcore.questions.question import Question


class Asks(Protocol):
    """What is asked: a question of SQL or by name, or heavy hitters."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields that it reads, one at least."""

    @property
    def text(self) -> str:
        """What owners of devices read."""

    @property
    def minimum_devices(self) -> int:
        """The least devices of anything that the answer shows."""

    @property
    def clip(self) -> float:
        """The L2 norm that no device's report exceeds with noise to come."""

    @property
    def rounds(self) -> int:
        """The rounds that an answer takes. If there are several, a device takes part in each."""

    def spec(self) -> ModelSpec:
        """The model, whose parameters are the answer."""

    def algorithm(self) -> Algorithm:
        """The algorithm that asks; with noise to come, one whose reports are held to `clip`."""


class Asked(NamedTuple):
    """A question, the fields that its rows read, of which there is one at least, and the numbers of a row."""

    question: Question
    fields: tuple[Field, ...]
    rows: Rows

    @property
    def text(self) -> str:
        """What owners of devices read."""
        return self.question.text

    @property
    def minimum_devices(self) -> int:
        """The least devices of a group that is shown."""
        return self.question.minimum_devices

    @property
    def clip(self) -> float:
        """The L2 norm that no device's report exceeds with noise to come."""
        return self.question.clip

    @property
    def rounds(self) -> int:
        """One; answers of more rounds add up."""
        return 1

    def spec(self) -> ModelSpec:
        """The model."""
        return question_model(self.question, self.fields, self.rows)

    def algorithm(self) -> Algorithm:
        """The algorithm; with noise to come, one whose reports are held to the norm that the question says."""
        clip = {"clip_norm": self.clip} if self.question.private else {}
        return create("question", {"question": self.question.encode(), **clip})
