"""Loading of a task: its plan and algorithm, ready to run."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from msgspec import structs

from coordinator.driver.replica_membership import Membership
from coordinator.errors import UnknownBlob
from coordinator.rules.entities import Task
from coordinator.rules.release import obstacle
from coordinator.rules.rounds import TaskState
from coordinator.rules.selection import Needs
from coordinator.rules.task_settings import TaskSettings
from fedcore.errors import FedcoreError
from fedcore.plan import Plan
from fedcore.wire.messages import Offer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedTask:
    """A task as the store has it, with its plan and its needs of a device."""

    record: Task
    plan: Plan
    needs: Needs

    @classmethod
    def of(cls, record: Task, plan: Plan) -> LoadedTask:
        """The task with its plan."""
        settings = record.settings
        needs = Needs(frozenset(plan.graphs), plan.examples.collection, settings.min_examples, settings.requires)
        return cls(record, plan, needs)

    @property
    def id(self) -> str:
        """The task's id."""
        return self.record.id

    @property
    def settings(self) -> TaskSettings:
        """The task's settings."""
        return self.record.settings

    @property
    def population(self) -> str:
        """The population whose devices take part."""
        return self.settings.population

    @property
    def active(self) -> bool:
        """Whether new rounds may begin."""
        return self.record.state is TaskState.ACTIVE

    @property
    def offer(self) -> Offer:
        """The offer of the task to a device that checks in."""
        return Offer(task=self.id, collection=self.needs.collection, **structs.asdict(self.settings.on_device))

    def paused(self) -> LoadedTask:
        """The same task, opening no other round."""
        return replace(self, record=replace(self.record, state=TaskState.PAUSED))


def load_task(membership: Membership, record: Task, lineage: str, at: float) -> LoadedTask | None:
    """The task with its plan. If its plan cannot be read it fails, and None is returned: the other tasks go on.

    A task whose devices would refuse its release is paused. lineage: the public key with which this coordinator signs
    checkpoints. at: now, in seconds since 1970.
    """
    if record.state is TaskState.ACTIVE and record.release is not None:
        words = obstacle(record.release, lineage, at)
        if words:
            record = _pause(membership, record, words)
    try:
        return LoadedTask.of(record, membership.store.plan(record.plan_sha256))
    except (UnknownBlob, FedcoreError) as error:
        _LOG.error("task %s failed: its plan cannot be read: %s", record.id, error)
        with membership.writing() as records:
            records.move_task(record, TaskState.FAILED, "plan-unreadable", str(error))
        return None


def _pause(membership: Membership, record: Task, words: str) -> Task:
    _LOG.error("task %s is paused: %s", record.id, words)
    with membership.writing() as records:
        records.move_task(record, TaskState.PAUSED, "release-unusable", words)
    return replace(record, state=TaskState.PAUSED, reason=words)
