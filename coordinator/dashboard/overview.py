"""Values of the overview: a page of tasks, one line each, and alerts of which equal ones are one. Rows in, no HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias
from urllib.parse import urlencode

from fastapi import Depends
from pydantic import Field

from coordinator.dashboard.times import age
from coordinator.rules.alerts import Alert
from coordinator.rules.entities import Task
from coordinator.rules.kinds import Kind, kind_of
from coordinator.rules.progress import Progress
from coordinator.rules.states import TaskState
from coordinator.store.records.overview import PAGE, SORTED_BY, TaskQuery
from coordinator.store.records.records import Records

_MOST_NAMES = 100
"""Populations that the form offers; others can be typed."""
MOST_ALIKE = 20
"""Alerts of a line that are listed; the others are counted."""


def _asked(
    search: str = "",
    state: str = "",
    population: str = "",
    by: str = SORTED_BY[0],
    page: Annotated[int, Field(ge=1, le=2**31)] = 1,
) -> TaskQuery:
    return TaskQuery(search, state, population, by, page)


Asked: TypeAlias = Annotated[TaskQuery, Depends(_asked)]
"""The tasks that an address asks for."""


class TaskLine(NamedTuple):
    """A task in a list. left: the time that its last rounds would take, empty where nobody knows.

    metric: the first of its newest metrics by name, with its value; None without any, and of a question.
    """

    task: Task
    progress: Progress
    committed: int
    left: str
    age: str
    metric: tuple[str, float] | None

    @property
    def kind(self) -> Kind:
        """Whether it trains, evaluates or asks."""
        return kind_of(self.task.algorithm.name)

    @property
    def why(self) -> str:
        """The reason of its progress in a few words; empty where the state says it."""
        reason = self.progress.reason.value
        return "" if reason == self.task.state else reason.removeprefix("paused-").replace("-", " ")


class AlertLine(NamedTuple):
    """Alerts that are alike: of one kind, and with the same to do."""

    kind: str
    remedy: str
    alerts: tuple[Alert, ...]


def task_table(records: Records, which: TaskQuery) -> dict[str, Any]:
    """A page of tasks as lines, the numbers of its first and last of all that match, and the pages beside it."""
    tasks, matching = records.overview.page(which)
    first = PAGE * (which.page - 1) + 1
    return {
        "lines": task_lines(records, tasks),
        "first": first,
        "last": first + len(tasks) - 1,
        "matching": matching,
        "earlier": address(which._replace(page=which.page - 1)) if which.page > 1 else None,
        "later": address(which._replace(page=which.page + 1)) if PAGE * which.page < matching else None,
    }


def overview_page(records: Records, which: TaskQuery) -> dict[str, Any]:
    """The tasks of the overview, and what its form offers."""
    return task_table(records, which) | {
        "which": which,
        "query": address(which),
        "narrowed": which[:3] != TaskQuery()[:3],
        "states": tuple(TaskState),
        "populations": records.overview.population_names(_MOST_NAMES),
        "sorted_by": SORTED_BY,
    }


def address(which: TaskQuery) -> str:
    """The query of an address that asks for these tasks."""
    usual = TaskQuery()._asdict()
    return urlencode({name: value for name, value in which._asdict().items() if value != usual[name]})


def task_lines(records: Records, tasks: Sequence[Task]) -> list[TaskLine]:
    """A line for each task."""
    these = [task.id for task in tasks]
    paces, newest = records.overview.paces(these), records.overview.newest_metrics(these)
    lines = []
    for task, progress in zip(tasks, records.progress(tasks), strict=True):
        pace = paces.get(task.id)
        committed = 0 if pace is None else pace.committed
        moves = task.state is TaskState.ACTIVE and not progress.stalled
        left = f"{age((task.settings.rounds - committed) * pace.round_s)}" if pace is not None and moves else ""
        shown = {} if kind_of(task.algorithm.name) == "question" else newest.get(task.id, {})
        metric = next(iter(sorted(shown.items())), None)
        lines.append(TaskLine(task, progress, committed, left, age(records.at - task.created_at), metric))
    return lines


def folded(alerts: Iterable[Alert]) -> list[AlertLine]:
    """Alerts as lines, in their order; those with one thing to do are one line. What to do may stand in the text."""
    alike: dict[tuple[str, str], list[Alert]] = {}
    for one in alerts:
        alike.setdefault((one.kind, one.remedy or one.text), []).append(one)
    return [AlertLine(kind, remedy, tuple(some)) for (kind, remedy), some in alike.items()]
