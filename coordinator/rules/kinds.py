"""Kinds of tasks: those that train, evaluate a model, or ask a question, with the answer to it. Pure."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from coordinator.errors import InvalidTask, demand
from coordinator.rules.task_settings import TaskSettings
from fedcore.algorithms import ALGORITHMS, create
from fedcore.algorithms.algorithm import Algorithm
from fedcore.algorithms.evaluation import EVALUATION
from fedcore.algorithms.heavy_hitters import HeavyHitters
from fedcore.algorithms.question import QUESTION, Ask, Asking, asking_in
from fedcore.bundle import AlgorithmRef
from fedcore.errors import QuestionError
from fedcore.questions.answer import Answer, check_columns
from fedcore.questions.question import Question

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


Scalar: TypeAlias = bool | int | float | str | None


class TaskAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the question of a task, as far as its committed rounds have one.

    question: as it was asked. round: the last one that is in it; 0 before the first. over: whether no further one
    follows. devices: that answered, once for each round. minimum_devices: groups of fewer, or none, are hidden, of
    which there are `hidden_groups`. errors: how far noise moves each number with 95 %, null for what it does not move;
    null without noise.
    """

    task: str
    question: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Scalar | tuple[Scalar, ...], ...], ...]
    devices: int
    hidden_groups: int
    minimum_devices: int
    round: int
    over: bool
    errors: tuple[tuple[float | None, ...], ...] | None = None


def task_answer(found: Answer, **facts: Any) -> TaskAnswer:
    """An answer with what is said of its task."""
    return TaskAnswer(
        columns=found.columns,
        rows=found.rows,
        devices=found.devices,
        hidden_groups=found.hidden,
        errors=found.errors,
        **facts,
    )


def check_question(settings: TaskSettings, algorithm: Algorithm) -> None:
    """Raise InvalidTask, saying what to change, unless a task with these settings can add up answers."""
    if algorithm.family != QUESTION:
        return
    if settings.buffered is not None:
        raise InvalidTask(
            f"algorithm {algorithm.name} adds up answers, and in mode buffered a device that comes back counts twice: "
            "create the task without buffered"
        )
    asking = asking_in(algorithm)
    if isinstance(asking, Ask):
        try:
            check_columns(asking.asked)
        except QuestionError as error:
            raise InvalidTask(f"the question has no answer: {error}") from error
    if isinstance(asking, HeavyHitters) and settings.rounds != asking.tree.rounds:
        raise InvalidTask(
            f"heavy hitters of {asking.of} take {asking.tree.rounds} rounds, not {settings.rounds}: after fewer no "
            "long value is whole, and further ones find nothing"
        )
    wording = "mean with a question: its answer is a sum over devices"
    demand(settings.clear.estimator == "mean", "estimator", wording, settings.clear.estimator)
    if settings.privacy is not None:
        wording = "gaussian, or distributed with secagg, in a question: other noise is taken back by later rounds"
        mechanism = settings.privacy.mechanism
        demand(mechanism in ("gaussian", "distributed"), "mechanism", wording, mechanism)


def minimum_devices(algorithm: Algorithm) -> int:
    """The least devices of a group that is shown; 1 where the algorithm hides none."""
    asking = asking_in(algorithm)
    return 1 if asking is None else asking.minimum_devices


def question_in(algorithm: Algorithm) -> Question | None:
    """The question of an algorithm that takes any; None of another one."""
    asking = asking_in(algorithm)
    return asking.asked if isinstance(asking, Ask) else None


def answers_twice(settings: TaskSettings, algorithm: Algorithm) -> bool:
    """Whether a device may answer in several rounds of a task, and then counts once for each.

    Not of heavy hitters, of which every round asks something else.
    """
    return settings.rounds > settings.min_separation_rounds and question_in(algorithm) is not None
