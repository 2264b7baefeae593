"""The models that a task evaluates, where they came from, and what such a task may be. Pure."""

from __future__ import annotations

import msgspec

from coordinator.errors import InvalidTask
from coordinator.rules.entities import Evaluates, ModelSource, Task
from coordinator.rules.task_settings import TaskSettings
from fedcore.algorithms.algorithm import Algorithm
from fedcore.algorithms.evaluation import EVALUATION
from fedcore.params import VectorSpec
from fedcore.plan import Plan

VECTORS = {"model": "params", "against": "other"}
"""The vector of the server state that holds each of the models."""


def sources(evaluates: Evaluates) -> dict[str, ModelSource]:
    """Where the evaluated models came from, by the vector of the server state that holds each."""
    named = msgspec.structs.asdict(evaluates)
    return {VECTORS[name]: source for name, source in named.items() if source is not None}


def check_evaluates(evaluates: Evaluates, algorithm: Algorithm, state: tuple[VectorSpec, ...]) -> None:
    """Raise InvalidTask unless the algorithm, with such a state, evaluates as many models."""
    if algorithm.family != EVALUATION:
        raise InvalidTask(
            f"{algorithm.name} trains a model and does not evaluate one: export the model with --algorithm evaluate, "
            "compare or personalisation"
        )
    compares = VECTORS["against"] in [spec.name for spec in state]
    if compares and evaluates.against is None:
        raise InvalidTask(f"{algorithm.name} needs a second model, to compare with: name it with --against")
    if not compares and evaluates.against is not None:
        raise InvalidTask(f"{algorithm.name} evaluates one model: leave --against out, or export with compare")


def check_same_model(source: Task, its_plan: Plan, plan: Plan, settings: TaskSettings) -> None:
    """Raise InvalidTask unless a task with these settings and this plan may evaluate a model of the task `source`."""
    if its_plan.schema != plan.schema:
        raise InvalidTask(f"task {source.id} trains another model: its tensors are not those of the bundle's plan")
    if its_plan.frozen != plan.frozen:
        raise InvalidTask(
            f"task {source.id} has other frozen tensors than the bundle's plan: export it from that model"
        )
    if source.settings.privacy is not None and settings.privacy is None:
        raise InvalidTask(
            f"evaluation of a private task without noise is refused: task {source.id} promises privacy; give this one "
            "a budget too, --privacy"
        )
