"""The models of an evaluation against the store, and the evaluation of a training against its plan: that both fit."""

from __future__ import annotations

import numpy as np

from coordinator.errors import InvalidTask
from coordinator.rules import evaluated
from coordinator.rules.aggregation import state_specs
from coordinator.rules.entities import Evaluates, RegularEvaluation, Regularly
from coordinator.rules.release import check_release, check_settings
from coordinator.rules.task_settings import TaskSettings
from coordinator.store.blobs import OpenedStore
from coordinator.store.starting import first_checkpoint
from fedcore import checkpoint
from fedcore.bundle import Bundle


def check_evaluated(store: OpenedStore, bundle: Bundle, settings: TaskSettings, evaluates: Evaluates) -> Evaluates:
    """What a task on the bundle keeps of the models that it evaluates.

    Raises InvalidTask, UnknownTask or UnknownRound unless the bundle starts from the models that `evaluates` names. A
    model of a file has no origin that could be checked.
    """
    plan, algorithm = bundle.plan, store.algorithm(bundle.manifest.algorithm)
    specs = state_specs(plan, algorithm)
    evaluated.check_evaluates(algorithm, specs, evaluates.against)
    state = checkpoint.decode(bundle.read(bundle.manifest.state), specs)
    for vector, source in evaluated.sources(evaluates).items():
        if source.task is None:
            continue
        task = store.task(source.task)
        evaluated.check_same_model(task, store.plan(task.plan_sha256), plan, settings)
        if not np.array_equal(store.checkpoint(task.id, source.round)["params"], state[vector]):
            raise InvalidTask(f"the bundle's state does not hold the model of {source.words}; start again")
    return Evaluates(evaluates.model, evaluates.against)


def check_evaluation(
    store: OpenedStore, bundle: Bundle, settings: TaskSettings, regular: Regularly
) -> RegularEvaluation:
    """What a task on the bundle keeps of its regular evaluation.

    Raises InvalidTask, or fedcore's errors, unless the models of such a task can be evaluated like that.
    """
    evaluation = regular.bundle
    plan, _ = evaluation.plan, evaluation.signer  # which raises if the signature is not good
    algorithm = store.algorithm(evaluation.manifest.algorithm)
    evaluated.check_regular(
        settings, store.algorithm(bundle.manifest.algorithm), algorithm, state_specs(plan, algorithm)
    )
    evaluated.check_same_tensors("this task", bundle.plan, plan)
    first_checkpoint(evaluation, store.algorithm_modules)
    its_settings = evaluated.settings_of_regular(settings, settings.rounds)
    check_settings(its_settings, algorithm, plan)
    check_release(plan, evaluation.certificate, its_settings)
    return regular.stored
