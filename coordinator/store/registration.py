"""Registration of tasks: a bundle, or the manifest of one whose blobs are stored, becomes a task, if it fits."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from coordinator.errors import InvalidTask, StoreConflict, demand
from coordinator.failpoints import reach
from coordinator.rules import kinds
from coordinator.rules.aggregation import state_specs
from coordinator.rules.alerts import Action
from coordinator.rules.budget import Counted
from coordinator.rules.entities import Evaluates, RegularEvaluation, Regularly, Snapshot, Task, check_name
from coordinator.rules.private_sums import with_least_noise
from coordinator.rules.release import check_descent, check_release, check_settings, check_signed
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import TaskSettings
from coordinator.store.blobs import OpenedStore
from coordinator.store.models import ModelStore, check_budget
from coordinator.store.starting import first_checkpoint, release_of, start_of, started, trained_round
from fedcore import checkpoint
from fedcore.bundle import Bundle, Manifest
from fedcore.plan import BlobRef, Plan
from fedcore.release import Release, Signed


def check_evaluated(store: OpenedStore, bundle: Bundle, settings: TaskSettings, evaluates: Evaluates) -> Evaluates:
    """What a task on the bundle keeps of the models that it evaluates.

    Raises InvalidTask, UnknownTask or UnknownRound unless the bundle starts from the models that `evaluates` names. A
    model of a file has no origin that could be checked.
    """
    plan, algorithm = bundle.plan, store.algorithm(bundle.manifest.algorithm)
    specs = state_specs(plan, algorithm)
    kinds.check_evaluates(algorithm, specs, evaluates.against)
    state = checkpoint.decode(bundle.read(bundle.manifest.state), specs)
    for vector, source in kinds.sources(evaluates).items():
        if source.task is None:
            continue
        task = store.task(source.task)
        kinds.check_same_model(task, store.plan(task.plan_sha256), plan, settings)
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
    kinds.check_regular(settings, store.algorithm(bundle.manifest.algorithm), algorithm, state_specs(plan, algorithm))
    kinds.check_same_tensors("this task", bundle.plan, plan)
    first_checkpoint(evaluation, store.algorithm_modules)
    its_settings = kinds.settings_of_regular(settings, settings.rounds)
    check_settings(its_settings, algorithm, plan)
    check_release(plan, evaluation.certificate, its_settings)
    return regular.stored


@dataclass(frozen=True, slots=True)
class Registration:
    """Registers a task in a store, for an actor. Everything is as `TaskStore.register_task` says."""

    store: ModelStore
    by: str

    def register(
        self,
        bundle: Bundle | Manifest,
        settings: TaskSettings,
        release: Signed | None,
        name: str | None,
        evaluation: Evaluates | Regularly | RegularEvaluation | None,
    ) -> Task:
        """The new task."""
        self.store.demand_population(settings.population)
        with tempfile.TemporaryDirectory(prefix="muster-bundle-") as folder:
            whole = self._whole(bundle, Path(folder, "plan"))
            if isinstance(evaluation, RegularEvaluation):
                measuring = self._whole(evaluation.bundle, Path(folder, "evaluation"))
                evaluation = Regularly(evaluation.every, measuring)
            start_of(settings)
            whole, settings = self._started(whole, settings, Path(folder, "begun"))
            return self._register(whole, with_least_noise(settings), release, name, evaluation)

    def _started(self, bundle: Bundle, settings: TaskSettings, folder: Path) -> tuple[Bundle, TaskSettings]:
        """The bundle in the state in which the task starts, and settings that name the model's round.

        A task like one that began at a model has its state already, and says so too.
        """
        store, state = self.store, bundle.manifest.state.sha256
        known = {task.settings.starts_from for task in store.tasks() if task.initial.state_sha256 == state} - {None}
        if settings.starts_from is None:
            wording = f"{min(filter(None, known), default='')}: the bundle's state is the model of that task"
            demand(not known, "starts_from", wording, None)
            return bundle, settings
        source, number = trained_round(store, settings.starts_from)
        settings = replace(settings, starts_from=f"{source}@{number}")
        if settings.starts_from in known:
            return bundle, settings
        return started(store, bundle, settings, store.algorithm(bundle.manifest.algorithm), store.model_file, folder)

    def _whole(self, bundle: Bundle | Manifest, folder: Path) -> Bundle:
        return bundle if isinstance(bundle, Bundle) else stored_bundle(self.store, bundle, folder)

    def _register(
        self,
        bundle: Bundle,
        settings: TaskSettings,
        release: Signed | None,
        name: str | None,
        evaluation: Evaluates | Regularly | None,
    ) -> Task:
        store = self.store
        plan, _, manifest = bundle.plan, bundle.signer, bundle.manifest
        name = check_name(manifest.name if name is None else name)
        first = first_checkpoint(bundle, store.algorithm_modules)
        check_settings(settings, store.algorithm(manifest.algorithm), plan)
        check_release(plan, bundle.certificate, settings)
        evaluates, regular, measuring = None, None, None
        if isinstance(evaluation, Regularly):
            regular, measuring = check_evaluation(store, bundle, settings, evaluation), evaluation.bundle
        elif evaluation is not None:
            evaluates = check_evaluated(store, bundle, settings, evaluation)
        start = BlobRef.of(first).sha256
        with store.database.reading() as records:
            at, ancestors = records.at, records.attempts.ancestors(settings.population, start, settings.starts_from)
        check_descent(settings, ancestors, evaluated=regular is not None)
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
            initial=Snapshot(0, manifest.state.sha256, start),
            created_at=at,
            evaluates=evaluates,
            evaluation=regular,
        )
        check_signed(task, self._release(bundle, settings, measuring), at)
        with store.database.reading() as records:
            check_budget(records, Counted.new(task))  # before blobs are written; what decides is below
        bundles = [bundle] if measuring is None else [bundle, measuring]
        try:
            self._start(task, bundles, first)
        except StoreConflict:  # a collection took older blobs; those written now are new
            self._start(task, bundles, first)
        return task

    def _release(self, bundle: Bundle, settings: TaskSettings, evaluation: Bundle | None) -> Release | None:
        """The release that a task needs, apart from what its signer chooses; None without secure aggregation."""
        if settings.secagg is None:
            return None
        modules = self.store.algorithm_modules
        free = {"counter": 0, "expires_at": 0}
        return release_of(bundle, settings, "", **free, algorithm_modules=modules, evaluation=evaluation)

    def _start(self, task: Task, bundles: Sequence[Bundle], first: bytes) -> None:
        store = self.store
        # Public also where a private blob has the same bytes.
        public = {ref for bundle in bundles for ref in (bundle.manifest.plan, *bundle.plan.blob_refs)}
        refs = {store.blobs.put(data): ref in public for bundle in bundles for ref, data in bundle.blobs()}
        refs[store.blobs.put(first)] = True
        with store.database.writing() as records:
            records.budgets.hold()
            check_budget(records, Counted.new(task))
            store.add_blobs(records, refs)
            records.add_task(task, f"created by {self.by}")
            if task.release is not None:
                records.releases.append(task.release)
            population, where = task.settings.population, task.settings.where and f"; where {task.settings.where}"
            what = f"plan {task.plan_sha256}{where}"
            records.audit.append(self.by, Action.TASK_CREATED, task.id, what, population=population)
            reach("task.before-commit")
        reach("task.after-commit")


def stored_bundle(store: ModelStore, manifest: Manifest, folder: Path) -> Bundle:
    """The bundle with a manifest, written to a folder from stored blobs. Raises UnknownBlob, and fedcore's errors."""
    own = [ref.sha256 for ref in (manifest.plan, manifest.state, manifest.certificate)]
    store.demand_own(own)
    plan = store.blobs.get(manifest.plan.sha256)
    named = sorted({ref.sha256 for ref in Plan.decode(plan).blob_refs})
    store.demand_own(named, manifest.plan.sha256)
    return Bundle.write(folder, manifest, [plan, *map(store.blobs.get, [*own[1:], *named])])
