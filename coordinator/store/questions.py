"""The answer to a task's question, from the server state that its rounds made."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from coordinator.errors import WrongKind
from coordinator.rules.aggregation import state_specs
from coordinator.rules.entities import Task
from coordinator.rules.kinds import kind_of
from coordinator.rules.private_sums import deviation_of
from coordinator.rules.questions import TaskAnswer, task_answer
from coordinator.store.records.records import Records
from fedcore import checkpoint
from fedcore.algorithms.algorithm import Algorithm
from fedcore.algorithms.question import QUESTION
from fedcore.questions.answer import Answer
from fedcore.questions.reading import asked_by, read

if TYPE_CHECKING:
    from coordinator.store.tasks import CoordinatorStore


def answer_of(store: CoordinatorStore, records: Records, task: Task) -> TaskAnswer:
    """The answer as far as there is one. Raises WrongKind, UnknownBlob and QuestionError."""
    algorithm = store.algorithm(task.algorithm)
    if algorithm.family != QUESTION:
        does = "evaluates a model" if kind_of(task.algorithm.name) == "evaluation" else "trains a model"
        raise WrongKind(f"task {task.id} {does} and asks no question, so it has no answer")
    asked, plan, snapshot = asked_by(algorithm), store.plan(task.plan_sha256), records.snapshot(task)
    state = checkpoint.decode(store.blobs.get(snapshot.state_sha256), state_specs(plan, algorithm))
    deviation = deviation_of(records.ledger.entries(task.id), task.settings, plan.report)
    return task_answer(
        _read(algorithm, state["params"].tobytes(), deviation),
        task=task.id,
        question=asked.text,
        minimum_devices=asked.asked.minimum_devices,
        round=snapshot.number,
        over=task.state.ended,
    )


def check_has_model(task: Task) -> None:
    """Raise WrongKind for a task that asks a question."""
    if kind_of(task.algorithm.name) == "question":
        raise WrongKind(f"task {task.id} asks a question and has no model: `muster ask --task {task.id}` has its answer")


@lru_cache(maxsize=64)
def _read(algorithm: Algorithm, params: bytes, deviation: float) -> Answer:
    """Pages ask again and again, and errors cost hundreds of draws of the noise."""
    return read(algorithm, np.frombuffer(params, np.float32), deviation)
