"""Tasks on the store itself: the operations that the command line, the demo and the admin API call."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from msgspec import UNSET

from coordinator.errors import NotPrivate, TaskEnded, UnexpectedEvent, UnknownBlob, UnknownDeviceId, UnknownRound
from coordinator.keys import check_signer, entry
from coordinator.operations import LineageKey, TaskStore
from coordinator.rules import entities
from coordinator.rules.alerts import STORE, Action, Alert, AuditEntry
from coordinator.rules.budget import BudgetReport, PopulationBudget
from coordinator.rules.kinds import TaskAnswer, check_clients, check_participations, check_rollback
from coordinator.rules.progress import Progress
from coordinator.rules.states import OnDevice, Requires, RoundState, TaskState
from coordinator.rules.task_settings import FootprintBudget, PrivacyBudget, Secagg, TaskSettings
from coordinator.store import models
from coordinator.store.blobs import Blobs, Data, check_same_store
from coordinator.store.database import Database
from coordinator.store.registration import Registration
from coordinator.store.starting import before, spent_before
from fedcore.bundle import Bundle, Manifest
from fedcore.privacy.accounting import spent
from fedcore.privacy.settings import Ancestor, CertifiedLedger, LedgerEntry, PrivacyCertificate, ledger_digest
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


class CoordinatorStore(models.ModelStore, TaskStore, AbstractContextManager["CoordinatorStore"]):
    """The coordinator's durable state: rows and files. Several processes may have it open; one of them serves.

    Methods of `TaskStore` that the history or the audit log records also take `by`, the actor. Methods that take a
    task id raise UnknownTask. lineage_key: gives the key that signs
    checkpoints anew, and certificates; set by the opener of a store for operators.
    """

    lineage_key: Callable[[], SigningKey]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def register_task(
        self,
        bundle: Bundle | Manifest,
        settings: TaskSettings,
        release: Signed | None = None,
        by: str = STORE,
        *,
        name: str | None = None,
        evaluation: entities.Evaluates | entities.Regularly | entities.RegularEvaluation | None = None,
    ) -> entities.Task:
        return Registration(self, by).register(bundle, settings, release, name, evaluation)

    def manifest(self, task_id: str) -> Manifest:
        with self.database.reading() as records:
            task = records.task(task_id)
            digests = task.plan_sha256, task.initial.state_sha256, task.certificate_sha256
            plan, state, certificate = (records.blob(digest, public=False) for digest in digests)
        return Manifest(
            name=task.bundle,
            model="",
            algorithm=task.algorithm,
            plan=plan,
            state=state,
            certificate=certificate,
            signature=task.plan_signature,
        )

    def lineage(self) -> LineageKey:
        return LineageKey(self.lineage_key().signer)

    def releases(self) -> list[Signed]:
        with self.database.reading() as records:
            return records.releases.log()

    def progress(self) -> list[Progress]:
        with self.database.reading() as records:
            return records.progress(records.tasks())

    def progress_of(self, task_id: str) -> Progress:
        with self.database.reading() as records:
            (progress,) = records.progress([records.task(task_id)])
            return progress

    def pause(self, task_id: str, by: str = STORE) -> entities.Task:
        return self._move(task_id, TaskState.PAUSED, by)

    def resume(self, task_id: str, by: str = STORE) -> entities.Task:
        return self._move(task_id, TaskState.ACTIVE, by)

    def cancel(self, task_id: str, by: str = STORE) -> entities.Task:
        return self._move(task_id, TaskState.CANCELLED, by)

    def roll_back(self, task_id: str, number: int, by: str = STORE) -> entities.Task:
        lineage = self.lineage_key()
        with self.database.writing() as records:
            records.budgets.hold()
            task = records.task(task_id)
            check_signer(lineage, task)
            if task.state is not TaskState.PAUSED:
                raise TaskEnded(f"task {task_id} is {task.state}; pause it, then roll it back")
            running = [round_.number for round_ in records.overview.live([task_id])]
            if running:
                raise TaskEnded(
                    f"round {running[0]} of task {task_id} still runs; roll the task back when it has ended"
                )
            check_participations(task)
            check_clients(task)
            to, last = records.snapshot(task, number), records.snapshot(task)
            check_rollback(last.number, to.number, len(self.plan(task.plan_sha256).trips))
            refs = {records.blob(digest, public=False): public for digest, public in to.blobs}
            if not all(self.blobs.has(ref.sha256) for ref in refs):
                raise UnknownRound(f"the model after round {number} of task {task_id} is not among the blobs any more")
            self.add_blobs(records, refs)
            models.check_rounds(records, task, last.number, to.number)
            signed = entry(lineage, task, last, to.checkpoint_sha256)
            records.roll_back(task, to, signed, f"rolled back to the model after round {number} by {by}")
            what, population = f"to the model after round {number}", task.settings.population
            records.audit.append(by, Action.TASK_ROLLED_BACK, task_id, what, population=population)
            return records.task(task_id)

    def history(self, task_id: str) -> list[entities.Transition]:
        with self.database.reading() as records:
            return records.history(records.task(task_id))

    def evaluations(self, task_id: str) -> list[entities.Measured]:
        with self.database.reading() as records:
            return records.overview.evaluations(records.task(task_id).id)

    def spent(self, task_id: str) -> list[entities.Spent]:
        with self.database.reading() as records:
            return records.ledger.spent(records.task(task_id).id)

    def sessions(self, task_id: str) -> list[entities.SessionShape]:
        with self.database.reading() as records:
            return records.sessions.of(records.task(task_id))

    def cohort(self, task_id: str, number: int) -> list[entities.AssignmentRecord]:
        """The assignments of the last attempt at round `number`, by slot. Raises UnknownRound."""
        with self.database.reading() as records:
            attempts = [r.attempt for r in records.rounds(records.task(task_id).id) if r.number == number]
            if not attempts:
                raise UnknownRound(f"task {task_id} has no round {number}")
            return records.cohorts.drawn(task_id, number, max(attempts))

    def counted(self, task_id: str, number: int) -> list[entities.AssignmentRecord]:
        """The assignments whose reports are in the model after round `number`. Raises UnknownRound."""
        with self.database.reading() as records:
            done = [round_ for round_ in records.rounds(records.task(task_id).id) if round_.number == number]
            if not done or done[-1].state is not RoundState.COMMITTED:
                raise UnknownRound(f"task {task_id} has not committed a round {number}")
            return records.cohorts.counted(task_id, number, done[-1].attempt)

    def model(self, task_id: str, number: int | None = None, by: str = STORE) -> bytes:
        task = self.task(task_id)
        models.check_has_model(task)
        model = self.model_file(task_id, number)
        self.note_read(by, Action.MODEL_READ, task, number)
        return model

    def note_read(self, by: str, what: Action, task: entities.Task, number: int | None = None) -> None:
        """Write into the audit log who read something that devices' reports made, after which round."""
        after = "the last" if number is None else f"round {number}"
        with self.database.writing() as records:
            records.audit.append(by, what, task.id, after, population=task.settings.population)

    def answer(self, task_id: str, by: str = STORE) -> TaskAnswer:
        with self.database.reading() as records:
            task = records.task(task_id)
            found = models.read_answer(self, records, task)
        self.note_read(by, Action.ANSWER_READ, task, found.round)
        return found

    def certificate(self, task_id: str, number: int | None = None, by: str = STORE) -> CertifiedLedger:
        key = self.lineage_key()
        with self.database.reading() as records:
            task = records.task(task_id)
            last = records.snapshot(task, number).number
            rows = records.ledger.entries(task_id, last)  # every round up to that one, those before a rollback too
        if task.settings.privacy is None:
            spent_there = spent_before(self, task.settings)
            began = "" if spent_there is None else f"; the model that it began at is of a task with {spent_there.words}"
            raise NotPrivate(
                f"task {task_id} was created without --privacy: no noise was added, and no certificate exists{began}"
            )
        privacy, ancestors, ledgers = task.settings.promise, [], []
        for one, number_ in before(self, task.settings):
            ancestor, its_rows = self._ancestor(one, number_)
            ancestors.append(ancestor)
            ledgers += [] if ancestor.privacy is None else [its_rows]
        certificate = PrivacyCertificate(
            task=task_id,
            round=last,
            model=hashlib.sha256(self.model_file(task_id, last)).hexdigest(),
            privacy=privacy,
            rounds=len(rows),
            epsilon=spent(rows, privacy.delta),
            ledger=ledger_digest(rows),
            before=tuple(ancestors) or UNSET,
        )
        certified = CertifiedLedger(key.sign_statement(certificate), rows, tuple(ledgers) or UNSET)
        self.note_read(by, Action.CERTIFICATE_READ, task, last)
        return certified

    def _ancestor(self, task: entities.Task, number: int) -> tuple[Ancestor, tuple[LedgerEntry, ...]]:
        """What a certificate says of a task at whose model another one began, and its ledger up to there."""
        if task.settings.privacy is None:
            return Ancestor(task=task.id, round=number), ()
        with self.database.reading() as records:
            rows = records.ledger.entries(task.id, number)
        privacy = task.settings.promise
        epsilon = spent(rows, privacy.delta)
        digest = ledger_digest(rows)
        about = Ancestor(task=task.id, round=number, privacy=privacy, rounds=len(rows), epsilon=epsilon, ledger=digest)
        return about, rows

    def budget(self, population: str) -> BudgetReport:
        with self.database.reading() as records:
            return models.budget_report(self, records, population)

    def set_budget(
        self, population: str, epsilon: float, delta: float, minimum_devices: int = 1, by: str = STORE
    ) -> BudgetReport:
        self.demand_population(population)
        budget = PopulationBudget(epsilon=epsilon, delta=delta, minimum_devices=minimum_devices)
        return models.change_budget(self, population, budget, by)

    def remove_budget(self, population: str, by: str = STORE) -> BudgetReport:
        return models.change_budget(self, population, None, by)

    def devices(self, limit: int = 100, *, revoked: bool = False) -> list[entities.Device]:
        with self.database.reading() as records:
            return records.devices.newest(limit, revoked=revoked)

    def revoke_device(self, device_id: str, by: str = STORE) -> entities.Device:
        return self._set_revoked(device_id, by, Action.DEVICE_REVOKED)

    def allow_device(self, device_id: str, by: str = STORE) -> entities.Device:
        return self._set_revoked(device_id, by, Action.DEVICE_ALLOWED)

    def _set_revoked(self, device_id: str, by: str, action: Action) -> entities.Device:
        with self.database.writing() as records:
            changed = records.devices.set_revoked(device_id, revoked=action is Action.DEVICE_REVOKED)
            device = records.devices.find(device_id)
            if device is None:
                raise UnknownDeviceId(f"there is no device {device_id!r}; `muster coordinator devices list` has them")
            if changed:
                records.audit.append(by, action, device_id)
        return device

    def present(self, sha256: str) -> None:
        """As `AdminService` says."""
        with self.database.reading() as records:
            records.blob(sha256, public=False)  # bytes that no row names may be collected before a task names them
        self.demand_own([sha256])
        if not self.blobs.has(sha256):
            raise UnknownBlob(f"there is no blob {sha256[:12]}…")

    def upload(self, data: Data) -> None:
        """Store a blob, which an operator of these populations may then name."""
        ref = self.blobs.put(data)
        if self.database.only is not None:
            with self.database.writing() as records:
                records.uploads.add(ref.sha256)

    def audit(self, after: int | None = None, limit: int = 100) -> list[AuditEntry]:
        with self.database.reading() as records:
            return records.audit.entries(after, limit)

    def alerts(self, limit: int = 100) -> list[Alert]:
        with self.database.reading() as records:
            return records.alerts.listed(limit)

    def _move(self, task_id: str, to: TaskState, by: str) -> entities.Task:
        with self.database.writing() as records:
            task = records.task(task_id)
            try:
                records.move_task(task, to, by)
            except UnexpectedEvent as error:
                said = f"is {to} already" if task.state is to else f"is {task.state}; it cannot become {to}"
                raise TaskEnded(f"task {task_id} {said}") from error
            records.audit.append(by, _MOVES[to], task_id, population=task.settings.population)
            return records.task(task_id)


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

    Raises UnusableStore; without `create` also where nothing is, so that a mistyped path is not taken for a new store.
    """
    opened = Database(database, clock, create=create)
    try:
        stored = Blobs(blobs, create=create)
        check_same_store(opened, stored)
        return CoordinatorStore(opened, stored, algorithm_modules)
    except BaseException:
        opened.close()
        raise
