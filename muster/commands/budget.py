"""`muster privacy budget`: the budget that all tasks of a population share, and what they have spent of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from muster.commands.stores import with_store
from muster.output import Json, emit, say, show_fields, show_table

if TYPE_CHECKING:
    from coordinator.operations import TaskStore
    from coordinator.rules.budget import BudgetReport, TaskSpending


@with_store
def budget(
    *,
    population: Annotated[str, typer.Option(metavar="NAME", help="The population.")],
    epsilon: Annotated[
        float | None, typer.Option(help="Set the budget: the most that all tasks may say of a device, with --delta.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Chance that --epsilon leaves open, below 1 / users.")] = None,
    minimum_devices: Annotated[
        int, typer.Option(min=1, help="With a budget: refuse questions that show groups of fewer devices.")
    ] = 1,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the budget; what is spent stays counted.")] = False,
    store: TaskStore,
    json: Json = False,
) -> None:
    """Show, set or remove the privacy budget of a population.

    All tasks of a population share it: trainings, evaluations and questions. With a budget, a task that would exceed
    it, or promises no privacy, is refused when it is created. A running task counts with all rounds that it may still
    do, an ended one with those that it did. For example:

    \b
      muster privacy budget --population phones
      muster privacy budget --population phones --epsilon 8 --delta 1e-7 --minimum-devices 20
    """
    if remove and (epsilon, delta) != (None, None):
        raise typer.BadParameter("a budget is set or removed: leave --epsilon and --delta out", param_hint="--remove")
    if (epsilon is None) != (delta is None) or (minimum_devices > 1 and epsilon is None):
        raise typer.BadParameter("a budget is an epsilon and a delta: give both", param_hint="--epsilon, --delta")
    if remove:
        report = store.remove_budget(population)
    elif epsilon is not None and delta is not None:
        report = store.set_budget(population, epsilon, delta, minimum_devices)
    else:
        report = store.budget(population)
    if json:
        emit(report)
    else:
        _show(report)


def _show(report: BudgetReport) -> None:
    from coordinator.rules.budget import CLAIM, in_words

    columns = ("task", "name", "what", "state", "rounds", "ε alone", "ε it adds")
    show_table(columns, [_row(one) for one in report.tasks])
    at = "" if report.delta is None else f" at δ {report.delta:g}"
    say()
    show_fields(
        {
            "spent or reserved": f"ε {in_words(report.epsilon)}{at}",
            "budget": report.budget.words if report.budget else "none is set: no task is refused",
            "left": None if report.left is None else f"ε {report.left:.4g}",
            "of": CLAIM,
        }
    )


def _row(one: TaskSpending) -> tuple[object, ...]:
    from coordinator.rules.budget import in_words

    rounds = f"{one.released} of {one.rounds}" if one.mechanism else ""
    return one.task, one.name, one.kind, one.state, rounds, in_words(one.epsilon), in_words(one.adds)
