"""A question with what the graph computes of every row, and the model that computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from export.model import ModelSpec
from fedcore.algorithms import create
from fedcore.algorithms.algorithm import Algorithm
from fedcore.algorithms.question import cells_of
from fedcore.plan import Field
from fedcore.questions.question import Question

Rows = Callable[[Mapping[str, Tensor]], Tensor]
"""(fields (B, …) by name) -> (B, R): the numbers of every row, in the order of the question's rows."""


class _Answer(nn.Module):
    """The answer, and the columns of a row as they are."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.high, self.low = (nn.Parameter(torch.zeros(size)) for _ in range(2))

    def forward(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """The columns."""
        return columns


def question_model(question: Question, fields: Sequence[Field], rows: Rows) -> ModelSpec:
    """The model of a question that reads these fields, of which there is one at least."""
    *inputs, label = fields

    def numbers(columns: Any, last: Tensor) -> Tensor:
        names = [field.name for field in fields]
        return rows(dict(zip(names, (*columns, last), strict=True)))

    return ModelSpec(
        name="question",
        make=lambda: _Answer(1 + sum(question.block_sizes.values())),
        inputs=tuple(inputs),
        label=label,
        loss=lambda columns, last: torch.zeros(last.shape[:1]),
        metrics={cells_of(question): numbers},
    )


class CompiledQuestion(NamedTuple):
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
