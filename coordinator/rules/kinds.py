"""Kinds of tasks: those that train, those that evaluate a model, and those that ask a question. Pure."""

from __future__ import annotations

from typing import Literal, TypeAlias

from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.evaluation import EVALUATION
from fedcore.algorithms.question import QUESTION, Asking, asking_in
from fedcore.bundle import AlgorithmRef

Kind: TypeAlias = Literal["training", "evaluation", "question"]
_BY_FAMILY: dict[str, Kind] = {EVALUATION: "evaluation", QUESTION: "question"}
QUESTIONS = frozenset(name for name, algorithm in ALGORITHMS.items() if algorithm.family == QUESTION)
"""The names of the algorithms that ask."""
QUIET = frozenset(_BY_FAMILY)
"""Families whose metrics do not follow each other from round to round, as the losses of a training do."""


def kind_of(algorithm: str) -> Kind:
    """The kind of a task by the name of its algorithm. One of a user's own, whose code is not at hand, trains."""
    return _BY_FAMILY.get(ALGORITHMS[algorithm].family, "training") if algorithm in ALGORITHMS else "training"


def question_of(algorithm: AlgorithmRef) -> str:
    """The question that a task with this algorithm asks, in words; empty where it asks none."""
    asking = _asking(algorithm)
    return "" if asking is None else asking.text


def least_shown(algorithm: AlgorithmRef) -> int | None:
    """The least devices of anything that the answer of a task with this algorithm shows; None where it asks nothing."""
    asking = _asking(algorithm)
    return None if asking is None else asking.minimum_devices


def _asking(algorithm: AlgorithmRef) -> Asking | None:
    asks = kind_of(algorithm.name) == "question"
    return asking_in(create(algorithm.name, algorithm.settings)) if asks else None
