"""`muster task watch`: the figures of rounds and evaluations as they are committed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.rules.states import RoundState
from muster.commands.stores import with_store
from muster.options.task import TaskId
from muster.output import say, say_next

if TYPE_CHECKING:
    from coordinator.operations import TaskStore


EVERY_S = 2.0


def figures(store: TaskStore, task: str, every_s: float = EVERY_S) -> Iterator[tuple[int, dict[str, int | float]]]:
    """The number of every committed round with its figures, and with those of evaluations of its model, once they end.

    From the first round, until the task and its evaluations are over. every_s: seconds between looks.
    """
    told: set[tuple[int, str]] = set()
    while True:
        over = store.task(task).state.ended  # looked at before the rounds: none follows
        evaluations = store.evaluations(task)
        done = [
            (one.number, "", one.metrics, one.seconds)
            for one in store.rounds(task)
            if one.state is RoundState.COMMITTED
        ]
        done += [(one.round, one.task, one.metrics, None) for one in evaluations if one.state.ended and one.metrics]
        for number, by, metrics, seconds in sorted(done, key=lambda each: each[:2]):
            if (number, by) not in told:
                told.add((number, by))
                yield number, metrics | ({} if seconds is None else {"seconds": seconds})
        if over and all(one.state.ended for one in evaluations):
            return
        time.sleep(every_s)


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
    from coordinator.dashboard.new_task import values
    from coordinator.rules.kinds import question_of
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
