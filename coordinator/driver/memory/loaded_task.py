"""Loading of a task: its plan and algorithm, ready to run."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from msgspec import structs

from coordinator.driver.replica_membership import Membership
from coordinator.errors import KeysDiffer, Unavailable, UnknownBlob
from coordinator.rules.entities import Task
from coordinator.rules.release import OTHER_LINEAGE, obstacle
from coordinator.rules.selection import UNRELIABLE_ROUNDS, DeviceHoldOut, Needs
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import TaskSettings
from coordinator.store.records.records import Records
from coordinator.store.starting import start_of
from coordinator.store.tasks import CoordinatorStore
from fedcore.errors import AlgorithmError, FedcoreError, PrivacyError
from fedcore.plan import Plan
from fedcore.privacy.accounting import spent
from fedcore.wire.messages import Offer

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedTask:
    """A task as the store has it, with its plan and its needs of a device. waits: the time to start has not come."""

    record: Task
    plan: Plan
    needs: Needs
    waits: bool = False

    @classmethod
    def of(cls, record: Task, plan: Plan, at: float) -> LoadedTask:
        """The task with its plan. at: now, in seconds since 1970."""
        settings = record.settings
        needs = Needs(
            frozenset(plan.graphs),
            plan.examples.collection,
            settings.min_examples,
            settings.requires,
            _hold_out(settings),
            bool(plan.kept),
        )
        return cls(record, plan, needs, at < start_of(settings))

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
        return self.record.state is TaskState.ACTIVE and not self.waits

    @property
    def offer(self) -> Offer:
        """The offer of the task to a device that checks in."""
        rules = structs.asdict(self.settings.on_device)
        if self.settings.on_device.max_example_age_s is not None:
            rules["min_recent_examples"] = rules.pop("min_examples")
        rules["min_examples"] = max(rules.get("min_examples", 0), self.needs.min_examples)
        return Offer(task=self.id, collection=self.needs.collection, **rules)

    def paused(self) -> LoadedTask:
        """The same task, opening no other round."""
        return replace(self, record=replace(self.record, state=TaskState.PAUSED))


def with_good_release(membership: Membership, record: Task, lineage: str, at: float) -> Task:
    """The task, paused by now if devices would refuse its release.

    lineage: the public key with which this coordinator signs checkpoints. at: now, in seconds since 1970.
    """
    if record.state is TaskState.ACTIVE and record.release is not None:
        words = obstacle(record.release, lineage, at)
        if words:
            return _pause(membership, record, "release-unusable", words)
    return record


def with_lineage_back(membership: Membership, record: Task, lineage: str, at: float) -> Task:
    """The task, made active if it was paused for another lineage key than this coordinator has now. As above."""
    if record.state is not TaskState.PAUSED or not record.reason.startswith(OTHER_LINEAGE):
        return record
    if (record.release and obstacle(record.release, lineage, at)) or _other_noise(membership.store, record, lineage):
        return record
    _LOG.warning("task %s goes on: its lineage key is back", record.named)
    with membership.writing() as records:
        records.move_task(record, TaskState.ACTIVE, "lineage-key-back")
    return replace(record, state=TaskState.ACTIVE, reason="")


def load_task(
    membership: Membership, record: Task, lineage: str, before: LoadedTask | None, at: float
) -> LoadedTask | None:
    """The task with its plan; None when its algorithm cannot be made, or a blob that it needs cannot be read.

    Or when its privacy cannot be accounted for. Then it is paused, and the others go on.

    lineage: the public key with which this coordinator signs checkpoints, and makes noise again.
    before: the task as it was loaded last. When it is new here, or was resumed, all that its next round needs is looked
    for. at: now, in seconds since 1970.
    """
    store = membership.store
    try:
        plan = store.plan(record.plan_sha256)
        if record.state is TaskState.ACTIVE and (before is None or before.record.state is not TaskState.ACTIVE):
            _look_for(store, record, lineage, plan)
        return LoadedTask.of(record, plan, at)
    except Unavailable:  # an object store that does not answer now
        return None
    except (AlgorithmError, PrivacyError, KeysDiffer) as error:
        if record.state is TaskState.ACTIVE:
            cause = "algorithm-unusable" if isinstance(error, AlgorithmError) else "privacy-unusable"
            _pause(membership, record, cause, str(error))
        return None
    except (UnknownBlob, FedcoreError) as error:
        if record.state is TaskState.ACTIVE:
            with membership.writing() as records:
                pause_unreadable(records, record, str(error))
        return None


def unreliable_devices(records: Records, task: Task) -> dict[str, int]:
    """The unreliable devices of a task, as the rows have them: `OpenRounds.unreliable`."""
    committed = records.snapshot(task).number
    since, buffered = committed - UNRELIABLE_ROUNDS + 1, task.settings.buffered is not None
    unreliable = records.cohorts.unreliable_devices(task.id, since, buffered=buffered)
    return {device: UNRELIABLE_ROUNDS + number - committed for device, number in unreliable.items()}


def pause_unreadable(records: Records, task: Task, words: str) -> None:
    """Pause an active task that needs a blob which cannot be read; an operator resumes it once the blob is back."""
    _LOG.error("task %s is paused: a blob that it needs cannot be read: %s", task.named, words)
    remedy = "put the blobs back, or mount their place, then resume it"
    records.move_task(task, TaskState.PAUSED, "blob-unreadable", f"a blob cannot be read: {words}; {remedy}")


def _hold_out(settings: TaskSettings) -> DeviceHoldOut | None:
    if not settings.hold_out_devices:
        return None
    return DeviceHoldOut(settings.population, settings.hold_out_devices, settings.on_held_out)


def _look_for(store: CoordinatorStore, record: Task, lineage: str, plan: Plan) -> None:
    """Raise AlgorithmError unless the algorithm can be made, UnknownBlob unless plan, its blobs and state are there.

    The same for what evaluates its models, if anything does.

    For a private task, raise PrivacyError when the accountant is not installed, which takes a second to load, here and
    not while a round is committed; KeysDiffer when noise of earlier rounds was made with another key.
    """
    store.algorithm(record.algorithm)
    if record.settings.privacy is not None:
        promise = record.settings.promise
        spent([promise], promise.delta)
    if other := _other_noise(store, record, lineage):
        raise KeysDiffer(
            f"{OTHER_LINEAGE}: noise of earlier rounds was made with {other}, and the key here is {lineage}: put the "
            "file with the right key back, and the task goes on"
        )
    with store.database.reading() as records:
        base = records.snapshot(record)
    named = {ref.sha256 for ref in plan.blob_refs}
    if record.evaluation is not None:
        store.algorithm(record.evaluation.bundle.algorithm)
        named |= {record.evaluation.bundle.plan.sha256, record.evaluation.bundle.state.sha256}
    for sha256 in sorted(named | {record.plan_sha256, base.state_sha256, base.checkpoint_sha256}):
        if not store.blobs.has(sha256):
            raise UnknownBlob(f"there is no blob {sha256[:12]}…")


def _other_noise(store: CoordinatorStore, record: Task, lineage: str) -> str:
    """A key other than this one that made noise of earlier rounds of a task; empty where there is none."""
    with store.database.reading() as records:
        return min({source.signer for source in records.ledger.sources(record.id)} - {lineage}, default="")


def _pause(membership: Membership, record: Task, cause: str, words: str) -> Task:
    _LOG.error("task %s is paused: %s", record.named, words)
    with membership.writing() as records:
        records.move_task(record, TaskState.PAUSED, cause, words)
    return replace(record, state=TaskState.PAUSED, reason=words)
