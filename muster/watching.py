"""A task from the outside, while it runs: the figures of every round and evaluation, each once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from coordinator.rules.states import RoundState

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
