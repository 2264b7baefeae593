"""Tasks made ready to run."""

from __future__ import annotations

import logging

from coordinator.driver.membership import Membership
from coordinator.driver.running import Job
from coordinator.errors import UnknownBlob
from coordinator.rules.rounds import TaskState
from coordinator.rules.state import Task
from fedcore.errors import FedcoreError

_LOG = logging.getLogger(__name__)


def load_job(membership: Membership, task: Task) -> Job | None:
    """A task ready to run; None, and the task failed, when its plan is gone: one task must not stop the others."""
    try:
        return Job.of(task, membership.store.plan(task.plan_sha256))
    except (UnknownBlob, FedcoreError) as error:
        _LOG.error("task %s failed: its plan cannot be read: %s", task.id, error)
        with membership.writing() as records:
            records.move_task(task, TaskState.FAILED, "plan-unreadable", str(error))
        return None
