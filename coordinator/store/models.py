"""Parts of a store beside tasks: privacy budgets, answers to questions, and released models."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
from msgspec import UNSET

from coordinator.errors import InvalidModel, RoleLacking, UnknownBlob, UnknownModel, UnknownPopulation, WrongKind
from coordinator.rules import budget as budget_rules, roll_outs as roll_out_rules
from coordinator.rules.aggregation import state_specs
from coordinator.rules.alerts import STORE, Action
from coordinator.rules.entities import Task
from coordinator.rules.kinds import Kind, TaskAnswer, kind_of, minimum_devices, question_of, rounds_after, task_answer
from coordinator.rules.private_sums import deviation_of
from coordinator.rules.task_settings import canonical
from coordinator.store.blobs import OpenedStore
from coordinator.store.records.records import Records
from fedcore import checkpoint
from fedcore.algorithms.evaluation import EVALUATION
from fedcore.bundle import AlgorithmRef
from fedcore.errors import FedcoreError, QuestionError
from fedcore.params import ParamSchema
from fedcore.plan import BlobRef, Plan
from fedcore.questions.answer import Answer, answer_of
from fedcore.release import Signed
from fedcore.signing import ModelRelease, verified

# Privacy budgets of populations against the rows of a store: what is spent, and whether there is room.


def check_budget(records: Records, new: budget_rules.Counted) -> None:
    """Raise BudgetExceeded if a task would exceed the budget of its population. It need not be written yet.

    Whoever writes it holds the budgets in the same transaction, before.
    """
    population = new.task.settings.population
    budget = records.budgets.of(population)
    if budget is not None:
        others = [one for one in records.budgets.counted(population) if one.task.id != new.task.id]
        budget_rules.check_room(budget, others, new)


def check_rounds(records: Records, task: Task, last: int, to: int) -> None:
    """Raise BudgetExceeded if a task that goes back from the model after round `last` to an earlier one has no room.

    The rollback is a round itself, and the task gets those again that it lost.
    """
    settings = replace(task.settings, rounds=rounds_after(task.settings.rounds, last + 1, to))
    (own,) = [one for one in records.budgets.counted(settings.population) if one.task.id == task.id]
    check_budget(records, own._replace(task=replace(task, settings=settings), committed=last + 1))


def budget_report(store: OpenedStore, records: Records, population: str) -> budget_rules.BudgetReport:
    """What the tasks of a population have spent, and its budget. Raises PrivacyError without an accountant."""
    _check_known(records, population)
    return _report(store, records, population)


def _check_known(records: Records, population: str) -> None:
    """Raise UnknownPopulation for one that has neither a task nor a budget."""
    if population not in records.populations() and records.budgets.of(population) is None:
        raise UnknownPopulation(f"there is no population {population!r}")


def _report(store: OpenedStore, records: Records, population: str) -> budget_rules.BudgetReport:
    counted = records.budgets.counted(population)
    kinds = {one.task.id: _kind(store, one.task) for one in counted}
    return budget_rules.report(population, records.budgets.of(population), counted, kinds)


def change_budget(
    store: OpenedStore, population: str, budget: budget_rules.PopulationBudget | None, by: str
) -> budget_rules.BudgetReport:
    """Set the budget of a population, or remove it; answers what `budget_report` says then.

    Raises InvalidBudget, and UnknownPopulation when there is none to remove a budget from.
    """
    with store.database.writing() as records:
        records.budgets.hold()
        if budget is not None:
            budget_rules.check_lowered(
                budget_rules.check_population(population), budget, records.budgets.counted(population)
            )
            records.audit.append(by, Action.BUDGET_SET, population, budget.words, population=population)
        else:
            _check_known(records, population)
            records.audit.append(by, Action.BUDGET_REMOVED, population, population=population)
        records.budgets.set(population, budget)
    with store.database.reading() as records:
        return _report(store, records, population)


def _kind(store: OpenedStore, task: Task) -> Kind:
    try:
        if store.plan(task.plan_sha256).question is not UNSET:
            return "question"
        evaluates = store.algorithm(task.algorithm).family == EVALUATION
    except (UnknownBlob, FedcoreError):  # what it spent counts, also where its plan is damaged
        evaluates = task.evaluates is not None
    return "evaluation" if evaluates else "training"


# The answer to a task's question, from the server state that its rounds made.


def read_answer(store: OpenedStore, records: Records, task: Task) -> TaskAnswer:
    """The answer as far as there is one. Raises WrongKind, UnknownBlob and QuestionError."""
    kind = kind_of(task.algorithm.name)
    if kind != "question":
        does = "evaluates a model" if kind == "evaluation" else "trains a model"
        raise WrongKind(f"task {task.id} {does} and asks no question, so it has no answer")
    algorithm, plan, snapshot = store.algorithm(task.algorithm), store.plan(task.plan_sha256), records.snapshot(task)
    state = checkpoint.decode(store.blobs.get(snapshot.state_sha256), state_specs(plan, algorithm))
    entries = records.ledger.entries(task.id)
    deviation = deviation_of(entries, task.settings, plan.report)
    clip = float(task.algorithm.settings.get("clip_norm", 1.0))
    settings = tuple(task.algorithm.settings.items())
    noise = deviation / clip, len(entries)
    found = _read(task.algorithm.name, settings, plan.schema, state["params"].tobytes(), noise)
    if isinstance(found, QuestionError):
        raise found
    return task_answer(
        found,
        task=task.id,
        question=question_of(task.algorithm),
        minimum_devices=minimum_devices(algorithm),
        round=snapshot.number,
        over=task.state.ended,
    )


def check_has_model(task: Task) -> None:
    """Raise WrongKind for a task that asks a question."""
    if kind_of(task.algorithm.name) == "question":
        raise WrongKind(
            f"task {task.id} asks a question and has no model: `muster ask --task {task.id}` has its answer"
        )


@lru_cache(maxsize=64)
def _read(
    name: str, settings: tuple[tuple[str, Any], ...], schema: ParamSchema, params: bytes, noise: tuple[float, int]
) -> Answer | QuestionError:
    """Pages ask again and again, and errors cost hundreds of draws of the noise. noise: of how many rounds.

    Kept is also why there is no answer.
    """
    tensors = schema.unflatten(np.frombuffer(params, np.float32))
    multiplier, rounds = noise
    try:
        return answer_of(AlgorithmRef(name, dict(settings)), tensors, multiplier, max(rounds, 1))
    except QuestionError as error:
        return error


# Released models on the store itself: what is released, and which devices are given which version.


COUNTED_DAYS = 30
"""Days of counts that are shown, this one and those before."""


class ModelStore(OpenedStore):
    """The operations of `TaskStore` on models. Those that change something also take `by`, the actor."""

    def limited(self, populations: Collection[str] | None) -> Self:
        """The same store for an operator of these populations, or of every one: others are as if they were not.

        It is not to be closed.
        """
        same = copy.copy(self)
        same.database = self.database.limited(populations)
        return same

    def demand_population(self, name: str) -> None:
        """Raise RoleLacking unless an operator of these populations may make something in one of this name."""
        only = self.database.only
        if only is not None and name not in only:
            raise RoleLacking(
                f"population {name!r} is none of {', '.join(sorted(only))}, to which the token is limited"
            )

    def demand_own(self, digests: Iterable[str], plan: str = "") -> None:
        """Raise UnknownBlob for bytes that no operator of these populations sent, and no task or model there has.

        plan: that which names them; they need no look where a task has it.
        """
        if self.database.only is None:
            return
        with self.database.reading() as records:
            foreign = set() if records.uploads.has_plan(plan) else records.uploads.foreign(digests)
        if foreign:
            raise UnknownBlob(f"there is no blob {min(foreign)[:12]}…")

    def models(self) -> list[roll_out_rules.Model]:
        with self.database.reading() as records:
            return [model_of(records, population, name) for population, name in records.models.names()]

    def model_versions(self, population: str, name: str) -> list[roll_out_rules.ModelVersion]:
        with self.database.reading() as records:
            return versions_of(records, population, name)

    def model_history(self, population: str, name: str) -> list[roll_out_rules.RollOut]:
        with self.database.reading() as records:
            versions_of(records, population, name)
            return records.models.roll_outs(population, name)

    def model_counts(self, population: str, name: str) -> list[roll_out_rules.ModelCount]:
        with self.database.reading() as records:
            versions_of(records, population, name)
            return records.models.counts(population, name, COUNTED_DAYS)

    def release_model(self, signed: Signed, by: str = STORE) -> roll_out_rules.ModelVersion:
        release = verified(signed, ModelRelease)
        plan = Plan.decode(self._read(release.plan))
        roll_out_rules.check_model(plan, self._read(release.parameters))
        served = {release.plan, release.parameters, *roll_out_rules.predicting(plan)}
        for ref in served:
            self._read(ref, release.plan.sha256)
        with self.database.writing() as records:
            records.models.hold()
            if release.population not in records.populations():
                raise InvalidModel(f"there is no population {release.population!r}: a task's is the first of its name")
            earlier_ones = records.models.versions(release.population, release.name)
            roll_out_rules.check_next(release, signed.signer, earlier_ones, records.at)
            if release.origin is not UNSET:
                task = records.task(release.origin.task)
                roll_out_rules.check_origin(release, task.settings.population, task.plan_sha256)
            self.add_blobs(records, dict.fromkeys(served, True))
            made = records.models.add_version(release, signed)
            what = f"version {release.number} for {release.population}, signed by {signed.signer}"
            records.audit.append(by, Action.MODEL_RELEASED, release.name, what, population=release.population)
        return made

    def promote_model(  # noqa: PLR0913  # as the protocol has it, and the actor
        self,
        population: str,
        name: str,
        version: int,
        share: float,
        gate: str | None = None,
        *,
        where: str = "",
        by: str = STORE,
    ) -> roll_out_rules.RollOut:
        rule, target = None if gate is None else roll_out_rules.Gate.parse(gate), canonical(where, InvalidModel)
        with self.database.writing() as records:
            records.models.hold()
            promoted, before = _version(records, population, name, version), records.models.roll_outs(population, name)
            roll_out_rules.check_promotion(before, version, share, target)
            compared = (
                ""
                if rule is None
                else rule.compare(promoted.statement.evaluation, records.models.versions(population, name), before)
            )
            kind = roll_out_rules.RollOutKind.PROMOTE
            return _roll_out(records, promoted, share, kind, by, gate=compared, target=target)

    def roll_back_model(
        self, population: str, name: str, version: int | None = None, withdraw: bool = False, by: str = STORE
    ) -> roll_out_rules.RollOut:
        with self.database.writing() as records:
            records.models.hold()
            versions, before = versions_of(records, population, name), records.models.roll_outs(population, name)
            to = roll_out_rules.earlier(before, version)
            roll_out_rules.check_withdrawal(before, to, withdraw=withdraw)
            if to is None:
                return _roll_out(
                    records, versions[before[-1].number - 1], 0.0, roll_out_rules.RollOutKind.ROLL_BACK, by
                )
            return _roll_out(
                records, _version(records, population, name, to), 1.0, roll_out_rules.RollOutKind.ROLL_BACK, by
            )

    def plan_part(self, task_id: str, part: str | None = None) -> bytes:
        with self.database.reading() as records:
            plan = records.task(task_id).plan_sha256
            data = self.blobs.get(plan)
        if part is None:
            return data
        named = next((ref for ref in roll_out_rules.predicting(Plan.decode(data)) if ref.sha256 == part), None)
        if named is None:
            raise UnknownBlob(f"the plan of task {task_id} names no predict graph or frozen vectors {part[:12]}…")
        return self._read(named, plan)

    def model_for(self, device: str, labels: Mapping[str, str], population: str, name: str) -> Signed | None:
        """The release of a model for a device that tells these labels; None when it has none."""
        with self.database.reading() as records:
            number = roll_out_rules.version_for(device, labels, records.models.roll_outs(population, name))
            return None if number is None else records.models.version(population, name, number).release

    def _read(self, ref: BlobRef, plan: str = "") -> bytes:
        """A blob that a release, or a plan, names. Raises UnknownBlob, or DigestMismatch when it has another size."""
        self.demand_own([ref.sha256], plan)
        return ref.check(self.blobs.get(ref.sha256))


def model_of(records: Records, population: str, name: str) -> roll_out_rules.Model:
    """A model that was released, and what devices have of it."""
    roll_outs = records.models.roll_outs(population, name)
    newest = roll_outs[-1] if roll_outs else None
    return roll_out_rules.Model(
        population=population,
        name=name,
        versions=len(records.models.versions(population, name)),
        current=newest.number if newest else None,
        share=newest.share if newest else None,
        others=roll_out_rules.for_all(roll_outs) if newest and not newest.to_all else None,
        target=newest.target if newest else "",
    )


def versions_of(records: Records, population: str, name: str) -> list[roll_out_rules.ModelVersion]:
    """The versions of a model, one at least. Raises UnknownModel."""
    versions = records.models.versions(population, name)
    if not versions:
        raise UnknownModel(f"population {population!r} has no model {name!r}; `muster model list` has them")
    return versions


def _version(records: Records, population: str, name: str, number: int) -> roll_out_rules.ModelVersion:
    """A version that may be rolled out. Raises UnknownModel, and InvalidModel when devices would refuse it."""
    versions = {version.number: version for version in versions_of(records, population, name)}
    if number not in versions:
        raise UnknownModel(f"version {number} of model {name!r} was not released; the last one is {max(versions)}")
    version = versions[number]
    shown = {one.number for one in records.models.roll_outs(population, name)}
    roll_out_rules.check_counter(version.statement, version.release.signer, [versions[one] for one in sorted(shown)])
    roll_out_rules.check_unexpired(version.statement, records.at)
    return version


def _roll_out(
    records: Records,
    version: roll_out_rules.ModelVersion,
    share: float,
    kind: roll_out_rules.RollOutKind,
    by: str,
    **more: str,
) -> roll_out_rules.RollOut:
    """more: the gate and the target of a promotion."""
    made = roll_out_rules.RollOut(
        population=version.population,
        name=version.name,
        number=version.number,
        share=share,
        kind=kind,
        at=records.at,
        actor=by,
        **more,
    )
    done = Action.MODEL_PROMOTED if kind is roll_out_rules.RollOutKind.PROMOTE else Action.MODEL_ROLLED_BACK
    extra = (made.target and f" where {made.target}") + (made.gate and f"; {made.gate}")
    what = f"version {version.number} for {share:.6g} of the devices of {version.population}{extra}"
    records.audit.append(by, done, version.name, what, population=version.population)
    records.models.add_roll_out(made)
    return made
