"""The models of an evaluation against the store: that they are what the new task says they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from coordinator.errors import InvalidTask
from coordinator.rules.aggregation import state_specs
from coordinator.rules.entities import Evaluates
from coordinator.rules.evaluated import check_evaluates, check_same_model, sources
from coordinator.rules.task_settings import TaskSettings
from fedcore import checkpoint
from fedcore.bundle import Bundle

if TYPE_CHECKING:
    from coordinator.store.tasks import CoordinatorStore


def check_evaluated(store: CoordinatorStore, bundle: Bundle, settings: TaskSettings, evaluates: Evaluates) -> None:
    """Raise InvalidTask, UnknownTask or UnknownRound unless the bundle starts from the models that `evaluates` names.

    A model of a file has no origin that could be checked.
    """
    plan, algorithm = bundle.plan, store.algorithm(bundle.manifest.algorithm)
    specs = state_specs(plan, algorithm)
    check_evaluates(evaluates, algorithm, specs)
    state = checkpoint.decode(bundle.read(bundle.manifest.state), specs)
    for vector, source in sources(evaluates).items():
        if source.task is None:
            continue
        task = store.task(source.task)
        check_same_model(task, store.plan(task.plan_sha256), plan, settings)
        if not np.array_equal(store.checkpoint(task.id, source.round)["params"], state[vector]):
            raise InvalidTask(f"the bundle's state does not hold the model of {source.words}; start again")
