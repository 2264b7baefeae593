"""Values that the pages of a task and of a population show: rows in, no HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from coordinator.api.check_in_counts import PopulationCounts
from coordinator.dashboard import funnel
from coordinator.dashboard.curves import Chart, chart, charts
from coordinator.dashboard.funnel import Funnel
from coordinator.dashboard.overview import TaskLine, task_lines, task_table
from coordinator.dashboard.round_views import attempts
from coordinator.dashboard.times import clock
from coordinator.errors import UnknownPopulation
from coordinator.rules.entities import LiveRound, Measured, RoundRecord, Task, Transition
from coordinator.rules.figures import Figures, figures_of, means_of
from coordinator.rules.states import RoundState
from coordinator.store.records.overview import TaskQuery, Totals
from coordinator.store.records.records import Records

_RECENT = 10


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


class TaskPage(NamedTuple):
    """All that the page of a task shows. figures: of the newest round of a task that evaluates."""

    line: TaskLine
    totals: Totals
    live: tuple[Live, ...]
    funnel: Funnel
    figures: Figures | None
    charts: tuple[Chart, ...]
    spent: Chart | None
    epsilon: float
    attempts: tuple[RoundRecord, ...]
    history: tuple[Transition, ...]
    log: bool


def task_page(records: Records, task_id: str, *, log: bool = False) -> TaskPage:
    """The page of a task. log: with logarithmic values in its curves. Raises UnknownTask."""
    task, overview = records.task(task_id), records.overview
    (line,), totals = task_lines(records, [task]), overview.totals(task_id)
    sessions = [shape for shape in records.sessions.of(task) if shape.task]
    spent, kind, curve = records.ledger.spent(task_id), task.algorithm.name, overview.curve(task_id)
    figures = figures_of(kind, curve[-1][1]) if curve else None
    # Of a task that evaluates once the figures say it all, and of a question its answer does.
    said = (figures and len(curve) == 1) or line.kind == "question"
    shown = [] if said else [(number, means_of(kind, metrics)) for number, metrics in curve]
    return TaskPage(
        line=line,
        totals=totals,
        live=tuple(Live(round_, task) for round_ in overview.live([task_id])),
        funnel=funnel.of_task(totals, sessions, overview.abort_reasons(task_id)),
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
    over_time = [(round((at - records.at) / 3600, 1) or 0.0, float(count)) for at, count in counts.over_time]
    return task_table(records, TaskQuery(population=name)) | {
        "name": name,
        "counts": counts,
        "over_time": chart("check-ins", {"check-ins": over_time}, "in ten minutes", "hours from now"),
        "sessions": funnel.of_population(records.sessions.of_population(name)),
    }


def kept_models(records: Records, task_id: str) -> dict[str, Any]:
    """A task, and the numbers and metrics of the rounds whose models are kept, newest first. Raises UnknownTask."""
    task = records.task(task_id)
    kept = set(records.garbage.rounds_with_models(task_id))
    rounds = [(number, metrics) for number, metrics in records.overview.curve(task_id) if number in kept]
    return {"task": task, "models": [*reversed(rounds), (0, {})]}
