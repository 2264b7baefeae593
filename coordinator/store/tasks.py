"""Tasks on the store itself: the operations that the command line, the demo and the admin API call."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import safetensors.numpy

from coordinator.errors import StoreConflict, TaskEnded, UnexpectedEvent, UnknownDeviceId, UnknownRound
from coordinator.failpoints import reach
from coordinator.lineage import check_signer, entry
from coordinator.rules.aggregation import Vectors
from coordinator.rules.audit import Action, AuditEntry
from coordinator.rules.eligibility import OnDevice, Requires
from coordinator.rules.entities import (
    AssignmentRecord,
    Device,
    RoundRecord,
    SessionShape,
    Snapshot,
    Spent,
    Task,
    Transition,
)
from coordinator.rules.private_sums import with_least_noise
from coordinator.rules.progress import Progress
from coordinator.rules.release import check_release, check_signed
from coordinator.rules.rollback import check_participations, check_rollback
from coordinator.rules.settings_fit import check_settings
from coordinator.rules.states import RoundState, TaskState
from coordinator.rules.task_names import check_name
from coordinator.rules.task_settings import FootprintBudget, PrivacyBudget, Secagg, TaskSettings
from coordinator.store.blobs import Blobs
from coordinator.store.bundles import first_checkpoint
from coordinator.store.database import Database
from coordinator.store.identity import check_same_store
from coordinator.store.records.records import Records
from coordinator.store.sealed_blobs import SealedBlobs
from fedcore import algorithms, checkpoint
from fedcore.algorithms.algorithm import Algorithm
from fedcore.bundle import AlgorithmRef, Bundle
from fedcore.plan import BlobRef, Plan
from fedcore.release import Signed
from fedcore.signing import SigningKey

__all__ = [
    "CoordinatorStore",
    "FootprintBudget",
    "OnDevice",
    "PrivacyBudget",
    "Requires",
    "Secagg",
    "TaskSettings",
    "open_coordinator_store",
]


_MOVES = {
    TaskState.PAUSED: Action.TASK_PAUSED,
    TaskState.ACTIVE: Action.TASK_RESUMED,
    TaskState.CANCELLED: Action.TASK_CANCELLED,
}
STORE = "an operator on the store"
"""The name in the history for changes without the admin API, by somebody who may write the coordinator's files."""


class CoordinatorStore(AbstractContextManager["CoordinatorStore"]):
    """The coordinator's durable state: rows and files. Several processes may have it open; one of them serves.

    Methods that take a task id raise UnknownTask.
    """

    def __init__(self, database: Database, blobs: Blobs, algorithm_modules: Sequence[str] = ()) -> None:
        self.database = database
        self.blobs = blobs
        self.sealed = SealedBlobs(database, blobs)
        self.algorithm_modules = algorithm_modules
        self._plans: dict[str, Plan] = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def register_task(
        self,
        bundle: Bundle,
        settings: TaskSettings,
        release: Signed | None = None,
        by: str = STORE,
        *,
        name: str | None = None,
    ) -> Task:
        """Copy a bundle into the store and start a task on it; the history says `by` whom.

        release: signed for this bundle and these settings; a task with secure aggregation needs one. name: for people;
        by default that of the bundle.

        Raises InvalidTask when the name may not be, plan, algorithm, initial state and settings do not fit each other,
        or the plan does not pass the release check; fedcore's errors when a blob was altered, a signature is not good,
        or the algorithm or one of its settings is unknown; StoreConflict when collections take its blobs again and
        again.
        """
        settings = with_least_noise(settings)
        plan, _, manifest = bundle.plan, bundle.signer, bundle.manifest
        name = check_name(manifest.name if name is None else name)
        first = first_checkpoint(bundle, self.algorithm_modules)
        check_settings(settings, self.algorithm(manifest.algorithm), plan)
        check_release(plan, bundle.certificate, settings)
        with self.database.reading() as records:
            at = records.at
        task = Task(
            id=secrets.token_hex(8),
            name=name,
            bundle=manifest.name,
            state=TaskState.ACTIVE,
            reason="",
            settings=settings,
            algorithm=manifest.algorithm,
            plan_sha256=manifest.plan.sha256,
            plan_signature=manifest.signature,
            certificate_sha256=manifest.certificate.sha256,
            release=release,
            initial=Snapshot(0, manifest.state.sha256, BlobRef.of(first).sha256),
            created_at=at,
        )
        check_signed(task, plan, at)
        try:
            self._start(task, bundle, first, by)
        except StoreConflict:  # a collection took older blobs; those written now are new
            self._start(task, bundle, first, by)
        return task

    def _start(self, task: Task, bundle: Bundle, first: bytes, by: str) -> None:
        private = {bundle.manifest.state, bundle.manifest.certificate}
        refs = {self.blobs.put(data): ref not in private for ref, data in bundle.blobs()}
        refs[self.blobs.put(first)] = True
        with self.database.writing() as records:
            self.add_blobs(records, refs)
            records.add_task(task, f"created by {by}")
            if task.release is not None:
                records.releases.append(task.release)
            records.audit.append(by, Action.TASK_CREATED, task.id, f"plan {task.plan_sha256}")
            reach("task.before-commit")
        reach("task.after-commit")

    def add_blobs(self, records: Records, refs: Mapping[BlobRef, bool]) -> None:
        """Make stored blobs known; the values say whether devices may have them. Raises StoreConflict.

        Bytes that no row named may have been collected since they were stored. From the row on they are safe, so they
        are looked for after it.
        """
        for ref, public in refs.items():
            records.add_blob(ref, public=public)
            if not self.blobs.has(ref.sha256):
                raise StoreConflict(f"blob {ref.sha256[:12]}… was collected before a row knew it; try again")

    def releases(self) -> list[Signed]:
        """The log of releases: every one that devices of secure rounds were ever shown, in order."""
        with self.database.reading() as records:
            return records.releases.log()

    def tasks(self) -> list[Task]:
        """Every task, oldest first."""
        with self.database.reading() as records:
            return records.tasks()

    def task(self, task_id: str) -> Task:
        """One task."""
        with self.database.reading() as records:
            return records.task(task_id)

    def progress(self, *task_ids: str) -> list[Progress]:
        """Why tasks are where they are: these, or every one, oldest first."""
        with self.database.reading() as records:
            return records.progress([*map(records.task, task_ids)] or records.tasks())

    def pause(self, task_id: str, by: str = STORE) -> None:
        """Open no new round; the running one finishes. Raises TaskEnded unless the task is active."""
        self._move(task_id, TaskState.PAUSED, by)

    def resume(self, task_id: str, by: str = STORE) -> None:
        """Undo `pause`. Raises TaskEnded unless the task is paused."""
        self._move(task_id, TaskState.ACTIVE, by)

    def cancel(self, task_id: str, by: str = STORE) -> None:
        """End the task and abandon its running round. Raises TaskEnded when it is over already."""
        self._move(task_id, TaskState.CANCELLED, by)

    def roll_back(self, task_id: str, number: int, lineage: SigningKey, by: str = STORE) -> None:
        """Let a paused task go on from the model after round `number`; 0 is the start.

        lineage: signs the checkpoint anew, as that of the round without devices.

        The history keeps the rounds since, and a round without devices is committed after them, with that model. Raises
        TaskEnded unless the task is paused and its last round has ended; UnknownRound when the model is not there, or
        the next round's trip cannot go on from it; KeysDiffer when the task's release names another lineage key.
        """
        with self.database.writing() as records:
            task = records.task(task_id)
            check_signer(lineage, task)
            if task.state is not TaskState.PAUSED:
                raise TaskEnded(f"task {task_id} is {task.state}; pause it, then roll it back")
            running = [one.number for one in records.overview.live() if one.task == task_id]
            if running:
                raise TaskEnded(
                    f"round {running[0]} of task {task_id} still runs; roll the task back when it has ended"
                )
            check_participations(task)
            to, last = records.snapshot(task, number), records.snapshot(task)
            check_rollback(last.number, to.number, len(self.plan(task.plan_sha256).trips))
            refs = {records.blob(digest, public=False): public for digest, public in to.blobs}
            if not all(self.blobs.has(ref.sha256) for ref in refs):
                raise UnknownRound(f"the model after round {number} of task {task_id} is not among the blobs any more")
            self.add_blobs(records, refs)
            signed = entry(lineage, task, last, to.checkpoint_sha256)
            records.roll_back(task, to, signed, f"rolled back to the model after round {number} by {by}")
            records.audit.append(by, Action.TASK_ROLLED_BACK, task_id, f"to the model after round {number}")

    def history(self, task_id: str) -> list[Transition]:
        """Every change of a task's state, in order, with its cause."""
        with self.database.reading() as records:
            return records.history(records.task(task_id))

    def rounds(self, task_id: str) -> list[RoundRecord]:
        """Every attempt at every round, in order."""
        with self.database.reading() as records:
            return records.rounds(records.task(task_id).id)

    def spent(self, task_id: str) -> list[Spent]:
        """What a task had spent of its privacy budget after each of its private rounds, in order."""
        with self.database.reading() as records:
            return records.ledger.spent(records.task(task_id).id)

    def sessions(self, task_id: str) -> list[SessionShape]:
        """Counts of sessions by their steps: those of the task, and those of its population that got no task."""
        with self.database.reading() as records:
            return records.sessions.of(records.task(task_id))

    def cohort(self, task_id: str, number: int) -> list[AssignmentRecord]:
        """The assignments of the last attempt at round `number`, by slot. Raises UnknownRound."""
        with self.database.reading() as records:
            attempts = [r.attempt for r in records.rounds(records.task(task_id).id) if r.number == number]
            if not attempts:
                raise UnknownRound(f"task {task_id} has no round {number}")
            return records.cohorts.drawn(task_id, number, max(attempts))

    def counted(self, task_id: str, number: int) -> list[AssignmentRecord]:
        """The assignments whose reports are in the model after round `number`. Raises UnknownRound."""
        with self.database.reading() as records:
            done = [one for one in records.rounds(records.task(task_id).id) if one.number == number]
            if not done or done[-1].state is not RoundState.COMMITTED:
                raise UnknownRound(f"task {task_id} has not committed a round {number}")
            return records.cohorts.counted(task_id, number, done[-1].attempt)

    def checkpoint(self, task_id: str, number: int | None = None) -> Vectors:
        """The broadcast vectors after round `number`, by default the last committed one; 0 is the start.

        Raises UnknownRound when that round was not committed.
        """
        with self.database.reading() as records:
            task = records.task(task_id)
            snapshot = records.snapshot(task, number)
        # What is broadcast after a round is what the next one begins with.
        plan = self.plan(task.plan_sha256).of_round(snapshot.number + 1)
        return checkpoint.decode(self.blobs.get(snapshot.checkpoint_sha256), plan.broadcast)

    def model(self, task_id: str, number: int | None = None, by: str = STORE) -> bytes:
        """The model after a round, as `model_file`; the audit log says who read it."""
        model = self.model_file(task_id, number)
        with self.database.writing() as records:
            which = "the last" if number is None else f"round {number}"
            records.audit.append(by, Action.MODEL_READ, task_id, which)
        return model

    def model_file(self, task_id: str, number: int | None = None) -> bytes:
        """The model after a round, as named tensors in safetensors' format. Raises UnknownRound, as `checkpoint`."""
        schema = self.plan(self.task(task_id).plan_sha256).schema
        return safetensors.numpy.save(schema.unflatten(self.checkpoint(task_id, number)["params"]))

    def devices(self, limit: int = 100, *, revoked: bool = False) -> list[Device]:
        """The devices that enrolled last, the newest first; or those that were revoked, the last one first."""
        with self.database.reading() as records:
            return records.devices.newest(limit, revoked=revoked)

    def revoke_device(self, device_id: str, by: str = STORE) -> Device:
        """Refuse a device from now on; again is the same as once. Raises UnknownDeviceId."""
        return self._set_revoked(device_id, by, Action.DEVICE_REVOKED)

    def allow_device(self, device_id: str, by: str = STORE) -> Device:
        """Take a revoked device back; again is the same as once. Raises UnknownDeviceId."""
        return self._set_revoked(device_id, by, Action.DEVICE_ALLOWED)

    def _set_revoked(self, device_id: str, by: str, action: Action) -> Device:
        with self.database.writing() as records:
            changed = records.devices.set_revoked(device_id, revoked=action is Action.DEVICE_REVOKED)
            found = records.devices.find(device_id)
            if found is None:
                raise UnknownDeviceId(f"there is no device {device_id!r}; `muster coordinator devices list` has them")
            if changed:
                records.audit.append(by, action, device_id)
        return found

    def audit(self, after: int | None = None, limit: int = 100) -> list[AuditEntry]:
        """The first entries of the audit log after that number, or the last ones; in order, a thousand at most."""
        with self.database.reading() as records:
            return records.audit.entries(after, limit)

    def plan(self, sha256: str) -> Plan:
        """A registered plan, decoded once."""
        if sha256 not in self._plans:
            self._plans[sha256] = Plan.decode(self.blobs.get(sha256))
        return self._plans[sha256]

    def algorithm(self, ref: AlgorithmRef) -> Algorithm:
        """The algorithm of a task, made from its settings. Raises AlgorithmError."""
        return algorithms.create(ref.name, ref.settings, self.algorithm_modules)

    def _move(self, task_id: str, to: TaskState, by: str) -> None:
        with self.database.writing() as records:
            task = records.task(task_id)
            try:
                records.move_task(task, to, by)
            except UnexpectedEvent as error:
                said = f"is {to} already" if task.state is to else f"is {task.state}; it cannot become {to}"
                raise TaskEnded(f"task {task_id} {said}") from error
            records.audit.append(by, _MOVES[to], task_id)


def open_coordinator_store(
    database: str,
    blobs: str | Path,
    *,
    create: bool = True,
    clock: Callable[[], float] = time.time,
    algorithm_modules: Sequence[str] = (),
) -> CoordinatorStore:
    """Open the state in `database` (a URL) and `blobs` (a folder or a URL), making them if missing and `create`.

    algorithm_modules: those from which algorithms that are not built in may be imported.

    Raises UnsupportedDatabase, WrongRevision, UnreadableTask and WrongBlobs; without `create`, MissingStore, so that a
    mistyped path is not taken for a new store.
    """
    opened = Database(database, clock, create=create)
    try:
        found = Blobs(blobs, create=create)
        check_same_store(opened, found)
        return CoordinatorStore(opened, found, algorithm_modules)
    except BaseException:
        opened.close()
        raise
