"""Privacy budgets of populations against the rows of a store: what is spent, and whether there is room."""

from __future__ import annotations

from dataclasses import replace

from msgspec import UNSET

from coordinator.errors import UnknownBlob, UnknownPopulation
from coordinator.rules import budget as budget_rules
from coordinator.rules.audit import Action
from coordinator.rules.entities import Task
from coordinator.rules.evaluated import rounds_after
from coordinator.rules.kinds import Kind
from coordinator.store.blobs import OpenedStore
from coordinator.store.records.records import Records
from fedcore.algorithms.evaluation import EVALUATION
from fedcore.errors import FedcoreError


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
            records.audit.append(by, Action.BUDGET_SET, population, budget.words)
        else:
            _check_known(records, population)
            records.audit.append(by, Action.BUDGET_REMOVED, population)
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
