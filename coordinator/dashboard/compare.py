"""Comparison of tasks: one metric of several tasks in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.dashboard.curves import chart, unit_of
from coordinator.rules.kinds import kind_of
from coordinator.store.records.records import Records

_MOST = 6
"""Tasks in one picture: more colours cannot be told apart."""


def comparison(chosen: Sequence[str], metric: str, scale: str, records: Records) -> dict[str, Any]:
    """The page that compares the tasks with these ids; without a metric, by the first that one of them has.

    Ids of no task are left out, and so are tasks beyond the sixth, and questions, which have no curve.
    """
    tasks = [task for task in records.tasks()[::-1] if kind_of(task.algorithm.name) != "question"]
    shown = [task for task in tasks if task.id in chosen][:_MOST]
    curves = {task.id: records.overview.curve(task.id) for task in shown}
    metrics = sorted({name for rounds in curves.values() for _, values in rounds for name in values})
    metric = metric if metric in metrics else next(iter(metrics), "")
    series = {
        f"{task.name}, {task.id[:4]}": [
            (number, values[metric]) for number, values in curves[task.id] if metric in values
        ]
        for task in shown
    }
    return {
        "tasks": tasks,
        "chosen": {task.id for task in shown},
        "metrics": metrics,
        "metric": metric,
        "scale": scale,
        "chart": chart(metric, series, unit_of(metric), log=scale == "log"),
        "most": _MOST,
    }
