"""`muster task watch`: the rounds of a task as they are committed, for people and for trackers."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from muster.commands.stores import with_store
from muster.options.task import TaskId
from muster.output import say, say_next

if TYPE_CHECKING:
    from coordinator.operations import TaskStore


@with_store
def watch(
    *,
    task: TaskId,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the watch, for the next two.")] = None,
    tensorboard: Annotated[bool, typer.Option(help="Write every figure for TensorBoard, below --out.")] = False,
    mlflow: Annotated[bool, typer.Option(help="Log to MLflow, at MLFLOW_TRACKING_URI.")] = False,
    store: TaskStore,
) -> None:
    """Show every round as it is committed, until the task is over.

    The names of figures are those of `muster simulate`, and their step is the round. This process tells TensorBoard and
    MLflow, never the coordinator. With the same --out a later watch goes on where this one ended, and nothing is there
    twice.
    """
    from coordinator.dashboard.settings_table import values
    from coordinator.rules.kinds import question_of
    from muster.watching import figures
    from simulator.runs.trackers import trackers

    if out is None and (tensorboard or mlflow):
        raise typer.BadParameter(
            "they keep what they logged in a folder: give --out DIR", param_hint="--tensorboard/--mlflow"
        )
    facts = store.task(task)
    parameters = {"task": task, "name": facts.name, "algorithm": facts.algorithm.name, **values(facts.settings)}
    if question := question_of(facts.algorithm):
        say(f"asks: {question}")
    with ExitStack() as stack:
        told = []
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            told = trackers(out, parameters, "watch again", tensorboard=tensorboard, mlflow=mlflow)
        for tracker in told:
            stack.enter_context(closing(tracker))
        for number, point in figures(store, task):
            say(f"round {number}: " + ", ".join(f"{name} {value:.4g}" for name, value in sorted(point.items())))
            for tracker in told:
                tracker(number, point)
    say(store.progress_of(task).sentence)
    if question:
        say_next("read its answer", ["muster", "ask", "--task", task])
