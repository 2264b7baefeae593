"""Values that the overview and the page of a task show: rows in, no HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from coordinator.api.check_in_counts import PopulationCounts
from coordinator.dashboard import funnel
from coordinator.dashboard.curves import Chart, chart, charts
from coordinator.dashboard.funnel import Funnel
from coordinator.dashboard.round_views import attempts
from coordinator.dashboard.times import age, clock
from coordinator.errors import UnknownPopulation
from coordinator.rules.entities import LiveRound, Measured, RoundRecord, Task, Transition
from coordinator.rules.figures import Figures, figures_of, means_of
from coordinator.rules.progress import Progress
from coordinator.rules.states import RoundState
from coordinator.store.records.overview import Totals
from coordinator.store.records.records import Records

_RECENT = 10
_NOTHING = Totals(0, 0, 0, 0, 0, 0, 0, 0, 0)
SORTED_BY = ("newest", "name", "state", "progress", "metric")


class Live(NamedTuple):
    """A round that runs, with the task that it belongs to."""

    round: LiveRound
    task: Task

    @property
    def goal(self) -> int:
        """Reports that end it."""
        return self.task.settings.in_round(self.round.number).goal

    @property
    def until(self) -> str:
        """When its state ends at the latest, as a time of day, UTC; empty where nothing says so."""
        policy = self.task.settings.policy
        limits = {RoundState.SELECTING: policy.selection_timeout_s}
        if not policy.buffered:
            limits[RoundState.REPORTING] = policy.reporting_deadline_s
        limit_s = limits.get(self.round.state)
        return "" if limit_s is None else clock(self.round.entered_at + limit_s)


class TaskLine(NamedTuple):
    """A task on the overview. metric: the first of its newest metrics by name, with its value; None without any."""

    task: Task
    progress: Progress
    totals: Totals
    live: tuple[Live, ...]
    age: str
    metric: tuple[str, float] | None


class TaskPage(NamedTuple):
    """All that the page of a task shows. figures: of the newest round of a task that evaluates."""

    line: TaskLine
    funnel: Funnel
    figures: Figures | None
    charts: tuple[Chart, ...]
    spent: Chart | None
    epsilon: float
    attempts: tuple[RoundRecord, ...]
    history: tuple[Transition, ...]
    log: bool


def populations(records: Records, search: str = "", by: str = "newest") -> dict[str, list[TaskLine]]:
    """The tasks of each population, in the order of their names, sorted by one of SORTED_BY.

    search: what the name, the bundle, the id, the algorithm or the population of a task must have in it.
    """
    by_population: dict[str, list[TaskLine]] = {name: [] for name in sorted(records.populations())}
    for line in _lines(records, [task for task in records.tasks() if _matches(task, search)]):
        by_population[line.task.settings.population].append(line)
    return {name: _sorted(lines, by) for name, lines in by_population.items() if lines or not search}


def task_page(records: Records, task_id: str, *, log: bool = False) -> TaskPage:
    """The page of a task. log: with logarithmic values in its curves. Raises UnknownTask."""
    task, overview = records.task(task_id), records.overview
    (line,) = _lines(records, [task])
    sessions = [shape for shape in records.sessions.of(task) if shape.task]
    spent, kind, curve = records.ledger.spent(task_id), task.algorithm.name, overview.curve(task_id)
    figures = figures_of(kind, curve[-1][1]) if curve else None
    # Of a task that evaluates once the figures say it all.
    shown = [] if figures and len(curve) == 1 else [(number, means_of(kind, metrics)) for number, metrics in curve]
    return TaskPage(
        line=line,
        funnel=funnel.of_task(line.totals, sessions, overview.abort_reasons(task_id)),
        figures=figures,
        charts=charts([*shown, *evaluated(overview.evaluations(task_id))], log=log),
        spent=chart("ε", {"ε": [(row.number, row.epsilon) for row in spent]}, "spent"),
        epsilon=spent[-1].epsilon if spent else 0.0,
        attempts=attempts(records, task_id, _RECENT),
        history=tuple(records.history(task)),
        log=log,
    )


def evaluated(evaluations: Sequence[Measured]) -> list[tuple[int, dict[str, float]]]:
    """The means of evaluations over the rounds whose models they measured: of several of a round, the last one's."""
    return list({one.round: (one.round, one.means) for one in evaluations if one.metrics}.values())


def population_page(records: Records, name: str, counts: PopulationCounts) -> dict[str, Any]:
    """The page of a population, whose check-ins at this process are `counts`. Raises UnknownPopulation."""
    if name not in records.populations():
        raise UnknownPopulation(f"there is no population {name!r}")
    lines = _lines(records, [task for task in records.tasks() if task.settings.population == name])
    over_time = [(round((at - records.at) / 3600, 1), float(count)) for at, count in counts.over_time]
    return {
        "name": name,
        "counts": counts,
        "over_time": chart("check-ins", {"check-ins": over_time}, "in ten minutes", "hours from now"),
        "sessions": funnel.of_population(records.sessions.of_population(name)),
        "lines": _sorted(lines, "newest"),
    }


def kept_models(records: Records, task_id: str) -> dict[str, Any]:
    """A task, and the numbers and metrics of the rounds whose models are kept, newest first. Raises UnknownTask."""
    task = records.task(task_id)
    kept = set(records.garbage.rounds_with_models(task_id))
    rounds = [(number, metrics) for number, metrics in records.overview.curve(task_id) if number in kept]
    return {"task": task, "models": [*reversed(rounds), (0, {})]}


def _lines(records: Records, tasks: Sequence[Task]) -> list[TaskLine]:
    live, totals, newest = records.overview.live(), records.overview.totals(), records.overview.newest_metrics()
    lines = []
    for task, progress in zip(tasks, records.progress(tasks), strict=True):
        mine = tuple(Live(round_, task) for round_ in live if round_.task == task.id)
        metric = next(iter(sorted(newest.get(task.id, {}).items())), None)
        lived = age(records.at - task.created_at)
        lines.append(TaskLine(task, progress, totals.get(task.id, _NOTHING), mine, lived, metric))
    return lines


def _matches(task: Task, search: str) -> bool:
    words = (task.name, task.bundle, task.id, task.algorithm.name, task.settings.population)
    return any(search.casefold() in word.casefold() for word in words)


def _sorted(lines: list[TaskLine], by: str) -> list[TaskLine]:
    lines = lines[::-1]  # the newest first, and so among equals
    if by == "name":
        lines.sort(key=lambda line: line.task.name.casefold())
    elif by == "state":
        lines.sort(key=lambda line: (not line.progress.stalled, line.task.state))
    elif by == "progress":
        lines.sort(key=lambda line: -line.totals.committed / line.task.settings.rounds)
    elif by == "metric":
        lines.sort(key=lambda line: line.metric[1] if line.metric else float("inf"))
    return lines
