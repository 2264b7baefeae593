"""Creation of tasks from bundles whose blobs are stored, for the admin API and for the form of the dashboard."""

from __future__ import annotations

from coordinator.api.service import Service
from coordinator.errors import InvalidTask
from coordinator.operations import NewTask
from coordinator.rules.entities import NOT_BOTH, Task
from coordinator.rules.kinds import kind_of


def create_task(service: Service, new: NewTask, by: str) -> Task:
    """Register a task that `by` asked for. Raises UnknownBlob, and what `register_task` of the store does.

    It reads and writes blobs, so it runs in a thread.
    """
    if new.settings.secagg is not None and service.settings.authority is None:
        raise InvalidTask(
            "secure rounds need an enrolment authority, and this coordinator has none: run `muster authority "
            "serve`, and start the coordinator with --authority and --authority-url"
        )
    asks = kind_of(new.manifest.algorithm.name) == "question"
    if asks and new.settings.privacy is None and service.settings.questions_need_noise:
        raise InvalidTask(
            "this coordinator refuses questions without noise (questions_need_noise): give the question privacy, as "
            "`muster ask` does with --epsilon and --users"
        )
    if new.evaluates is not None and new.evaluation is not None:
        raise InvalidTask(NOT_BOTH)
    evaluation = new.evaluates or new.evaluation
    return service.store.register_task(
        new.manifest, new.settings, new.release, by, name=new.name, evaluation=evaluation
    )
