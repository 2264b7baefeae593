"""The answer to a task's question, from the server state that its rounds made."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from coordinator.errors import WrongKind
from coordinator.rules.aggregation import state_specs
from coordinator.rules.entities import Task
from coordinator.rules.kinds import TaskAnswer, kind_of, minimum_devices, question_of, task_answer
from coordinator.rules.private_sums import deviation_of
from coordinator.store.blobs import OpenedStore
from coordinator.store.records.records import Records
from fedcore import checkpoint
from fedcore.bundle import AlgorithmRef
from fedcore.errors import QuestionError
from fedcore.params import ParamSchema
from fedcore.questions.answer import Answer, answer_of


def read_answer(store: OpenedStore, records: Records, task: Task) -> TaskAnswer:
    """The answer as far as there is one. Raises WrongKind, UnknownBlob and QuestionError."""
    kind = kind_of(task.algorithm.name)
    if kind != "question":
        does = "evaluates a model" if kind == "evaluation" else "trains a model"
        raise WrongKind(f"task {task.id} {does} and asks no question, so it has no answer")
    algorithm, plan, snapshot = store.algorithm(task.algorithm), store.plan(task.plan_sha256), records.snapshot(task)
    state = checkpoint.decode(store.blobs.get(snapshot.state_sha256), state_specs(plan, algorithm))
    entries = records.ledger.entries(task.id)
    deviation = deviation_of(entries, task.settings, plan.report)
    clip = float(task.algorithm.settings.get("clip_norm", 1.0))
    settings = tuple(task.algorithm.settings.items())
    noise = deviation / clip, len(entries)
    found = _read(task.algorithm.name, settings, plan.schema, state["params"].tobytes(), noise)
    if isinstance(found, QuestionError):
        raise found
    return task_answer(
        found,
        task=task.id,
        question=question_of(task.algorithm),
        minimum_devices=minimum_devices(algorithm),
        round=snapshot.number,
        over=task.state.ended,
    )


def check_has_model(task: Task) -> None:
    """Raise WrongKind for a task that asks a question."""
    if kind_of(task.algorithm.name) == "question":
        raise WrongKind(
            f"task {task.id} asks a question and has no model: `muster ask --task {task.id}` has its answer"
        )


@lru_cache(maxsize=64)
def _read(
    name: str, settings: tuple[tuple[str, Any], ...], schema: ParamSchema, params: bytes, noise: tuple[float, int]
) -> Answer | QuestionError:
    """Pages ask again and again, and errors cost hundreds of draws of the noise. noise: of how many rounds.

    Kept is also why there is no answer.
    """
    tensors = schema.unflatten(np.frombuffer(params, np.float32))
    multiplier, rounds = noise
    try:
        return answer_of(AlgorithmRef(name, dict(settings)), tensors, multiplier, max(rounds, 1))
    except QuestionError as error:
        return error
