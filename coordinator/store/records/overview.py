"""Queries of the dashboard, within one transaction. Each reads few rows, however many rounds there were."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import String, case, cast, func, or_, select, true

from coordinator.errors import UnknownRound
from coordinator.rules.entities import LiveRound, Measured, RoundRecord, Task
from coordinator.rules.states import AssignmentState, RoundState, TaskState
from coordinator.store.records.rows import ENDED, ROUND_ROWS, Part, reader, round_of, task_of
from coordinator.store.tables import ASSIGNMENTS, POPULATIONS, REPORTS, ROUNDS, TASKS, TRANSITIONS

PAGE = 50
"""Tasks on a page of a list."""
SORTED_BY = ("newest", "name")
_PACE_ROUNDS = 9
"""Rounds before the last one that its pace is made of."""
_live = reader(LiveRound, seconds=None, abort_reasons={})


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of a task: its assignments in rounds that ended, by outcome, and its attempts, by outcome.

    going_on: those that the last of these rounds, a buffered one, handed on.
    """

    assigned: int
    reported: int
    aborted: int
    lost: int
    expired: int
    stale: int
    going_on: int
    committed: int
    abandoned: int

    @property
    def not_needed(self) -> int:
        """Devices whose report was not needed."""
        return self.assigned - self.reported - self.aborted - self.lost - self.expired - self.stale - self.going_on


class TaskQuery(NamedTuple):
    """Which tasks a list has, in which order. An empty word asks for every task.

    search: what the name, the bundle, the id, the algorithm or the population has in it. by: one of SORTED_BY.
    page: from 1, of PAGE tasks each.
    """

    search: str = ""
    state: str = ""
    population: str = ""
    by: str = SORTED_BY[0]
    page: int = 1


class Pace(NamedTuple):
    """How many rounds a task has committed, and the seconds that each of the last ones took, waiting included."""

    committed: int
    round_s: float


class OverviewRecords(Part):
    """The queries; nothing is written."""

    def version(self) -> int:
        """A number that grows with changes of state; a change committed out of order may leave it."""
        return self._connection.scalar(select(func.max(TRANSITIONS.c.id))) or 0

    def page(self, which: TaskQuery) -> tuple[list[Task], int]:
        """A page of the tasks that a query asks for, and how many there are in all."""
        columns = (TASKS.c.name, TASKS.c.bundle, TASKS.c.id, TASKS.c.algorithm, TASKS.c.population)
        wanted = or_(*(column.icontains(which.search, autoescape=True) for column in columns))
        wanted &= self._shown(TASKS.c.population)
        for column, value in ((TASKS.c.state, which.state), (TASKS.c.population, which.population)):
            wanted &= column == value if value else true()
        order = (TASKS.c.created_at.desc(), TASKS.c.id.desc())
        query = (
            select(TASKS).where(wanted).order_by(*((func.lower(TASKS.c.name),) if which.by == "name" else ()), *order)
        )
        tasks = self._all(task_of, query.limit(PAGE).offset(PAGE * (which.page - 1)))
        return tasks, self._connection.scalar(select(func.count()).select_from(TASKS).where(wanted)) or 0

    def questions(self, population: str, algorithms: Collection[str], most: int) -> list[tuple[Task, int]]:
        """The newest tasks of a population with these algorithms, each with the reports of its committed rounds."""
        reports = func.coalesce(func.sum(ROUNDS.c.reported), 0)
        counted = select(ROUNDS.c.task, reports.label("reports")).where(ROUNDS.c.state == RoundState.COMMITTED)
        by_task = counted.group_by(ROUNDS.c.task).subquery()
        query = select(TASKS, func.coalesce(by_task.c.reports, 0).label("reports"))
        query = query.outerjoin(by_task, by_task.c.task == TASKS.c.id)
        query = query.where((TASKS.c.population == population) & TASKS.c.algorithm.in_(sorted(algorithms)))
        newest = query.order_by(TASKS.c.created_at.desc(), TASKS.c.id.desc()).limit(most)
        return [(task_of(row), int(row.reports)) for row in self._connection.execute(newest)]

    def population_names(self, most: int) -> list[str]:
        """The first names of populations."""
        names = select(POPULATIONS.c.name).where(self._shown(POPULATIONS.c.name))
        return list(self._connection.scalars(names.order_by(POPULATIONS.c.name).limit(most)))

    def paces(self, tasks: Sequence[str]) -> dict[str, Pace]:
        """The pace of each task that has committed a round."""
        last, first = ROUNDS.alias(), ROUNDS.alias()
        of_task = (ROUNDS.c.task == TASKS.c.id) & (ROUNDS.c.state == RoundState.COMMITTED)
        number = select(func.max(ROUNDS.c.number)).where(of_task).scalar_subquery()
        begin = case((last.c.number > _PACE_ROUNDS, last.c.number - _PACE_ROUNDS), else_=1)
        query = (
            select(TASKS.c.id, last.c.number, (last.c.ended_at - first.c.opened_at) / (last.c.number - begin + 1))
            .select_from(TASKS)
            .join(last, (last.c.task == TASKS.c.id) & (last.c.number == number))
            .join(first, (first.c.task == TASKS.c.id) & (first.c.number == begin))
            .where(TASKS.c.id.in_(tasks), *(one.c.state == RoundState.COMMITTED for one in (last, first)))
        )
        return {task: Pace(committed, float(seconds)) for task, committed, seconds in self._connection.execute(query)}

    def live(self, tasks: Sequence[str]) -> list[LiveRound]:
        """Every round of these tasks that has not ended, by task, in order."""
        entered = (
            select(func.max(TRANSITIONS.c.at))
            .where((TRANSITIONS.c.entity == "round") & (TRANSITIONS.c.entity_id == cast(ROUNDS.c.id, String)))
            .scalar_subquery()
            .label("entered_at")
        )
        query = (
            select(ROUNDS, entered)
            .where(ROUNDS.c.task.in_(tasks) & ROUNDS.c.state.not_in(ENDED))
            .order_by(ROUNDS.c.task, ROUNDS.c.id)
        )
        return self._all(_live, query)

    def totals(self, task_id: str) -> Totals:
        """Sums over the rounds of a task that ended."""
        counted = (ROUNDS.c.state == RoundState.COMMITTED).label("counted")
        names = ("assigned", "reported", "aborted", "lost", "expired", "stale")
        sums = [func.sum(ROUNDS.c[name]) for name in names]
        going_on = func.sum(ROUNDS.c.handed_on - ROUNDS.c.taken_over)
        ended = (ROUNDS.c.task == task_id) & ROUNDS.c.state.in_(ENDED)
        query = select(counted, *sums, going_on, func.count()).where(ended).group_by(counted)
        added = [0] * 9
        for committed, *counts, rounds in self._connection.execute(query):
            more = (*counts, rounds if committed else 0, 0 if committed else rounds)
            added = [a + int(b) for a, b in zip(added, more, strict=True)]
        return Totals(*added)

    def curve(self, task_id: str) -> list[tuple[int, dict[str, float]]]:
        """Number and metrics of every committed round of a task."""
        committed = (ROUNDS.c.task == task_id) & (ROUNDS.c.state == RoundState.COMMITTED)
        query = select(ROUNDS.c.number, ROUNDS.c.metrics).where(committed).order_by(ROUNDS.c.number)
        return [(row.number, row.metrics) for row in self._connection.execute(query)]

    def evaluations(self, task_id: str) -> list[Measured]:
        """The evaluations of a task's models, by round, then the oldest first; each with its newest metrics."""
        model = TASKS.c.evaluates["model"]
        number, of_task = model["round"].as_integer(), model["task"].as_string() == task_id
        of_task &= self._shown(TASKS.c.population)
        committed = ROUNDS.c.state == RoundState.COMMITTED
        last = select(ROUNDS.c.task, func.max(ROUNDS.c.number).label("number")).where(committed)
        newest = last.group_by(ROUNDS.c.task).subquery()
        done = (ROUNDS.c.task == newest.c.task) & (ROUNDS.c.number == newest.c.number) & committed
        columns = (number, TASKS.c.id, TASKS.c.algorithm, TASKS.c.state, ROUNDS.c.metrics)
        query = select(*columns).outerjoin(newest, newest.c.task == TASKS.c.id).outerjoin(ROUNDS, done).where(of_task)
        rows = self._connection.execute(query.order_by(number, TASKS.c.created_at, TASKS.c.id))
        return [Measured(at, task, name, TaskState(state), metrics or {}) for at, task, name, state, metrics in rows]

    def latest(self, task_id: str, most: int, before: int | None = None) -> list[RoundRecord]:
        """The newest attempts of a task that ended, newest first; those with row ids below `before`."""
        ended = (ROUNDS.c.task == task_id) & ROUNDS.c.state.in_(ENDED)
        if before is not None:
            ended &= ROUNDS.c.id < before
        return self._all(round_of, ROUND_ROWS.where(ended).order_by(ROUNDS.c.id.desc()).limit(most))

    def committed_attempt(self, task_id: str, number: int) -> int | None:
        """The attempt at a round that was committed; None without one."""
        this = (ROUNDS.c.task == task_id) & (ROUNDS.c.number == number) & (ROUNDS.c.state == RoundState.COMMITTED)
        return self._connection.scalar(select(ROUNDS.c.attempt).where(this))

    def attempt(self, task_id: str, number: int, attempt: int) -> RoundRecord:
        """An attempt at a round. Raises UnknownRound."""
        this = (ROUNDS.c.task == task_id) & (ROUNDS.c.number == number) & (ROUNDS.c.attempt == attempt)
        found = self._one(round_of, ROUND_ROWS.where(this))
        if found is None:
            raise UnknownRound(f"task {task_id} has no attempt {attempt} at a round {number}")
        return found

    def phases(self, round_id: int) -> list[tuple[str, float]]:
        """The states of a round, each with when it came into it, in seconds since 1970."""
        of_round = (TRANSITIONS.c.entity == "round") & (TRANSITIONS.c.entity_id == str(round_id))
        query = select(TRANSITIONS.c.to_state, TRANSITIONS.c.at).where(of_round).order_by(TRANSITIONS.c.id)
        return [(row[0], row[1]) for row in self._connection.execute(query)]

    def outcomes(self, round_id: int) -> list[tuple[str, str, int]]:
        """The assignments of a round by state and reason, most first."""
        columns, count = (ASSIGNMENTS.c.state, ASSIGNMENTS.c.reason), func.count()
        query = select(*columns, count).where(ASSIGNMENTS.c.round == round_id).group_by(*columns)
        return [(row[0], row[1], row[2]) for row in self._connection.execute(query.order_by(count.desc(), *columns))]

    def report_times(self, round_id: int) -> list[float]:
        """How long each device of a round took from its assignment to its report, in seconds."""
        took = REPORTS.c.received_at - ASSIGNMENTS.c.assigned_at
        query = select(took).join(ASSIGNMENTS).where(ASSIGNMENTS.c.round == round_id)
        return [float(seconds) for seconds in self._connection.scalars(query)]

    def newest_metrics(self, tasks: Sequence[str]) -> dict[str, dict[str, float]]:
        """The metrics of the last committed round that has any, of each of these tasks."""
        done = ROUNDS.c.task.in_(tasks) & (ROUNDS.c.state == RoundState.COMMITTED) & (ROUNDS.c.reported > 0)
        newest = select(func.max(ROUNDS.c.id)).where(done).group_by(ROUNDS.c.task)
        query = select(ROUNDS.c.task, ROUNDS.c.metrics).where(ROUNDS.c.id.in_(newest))
        return {row.task: row.metrics for row in self._connection.execute(query)}

    def abort_reasons(self, task_id: str) -> dict[str, int]:
        """Aborted assignments of the rounds of a task that ended, by reason, most first; as far as they are kept."""
        rounds = select(ROUNDS.c.id).where((ROUNDS.c.task == task_id) & ROUNDS.c.state.in_(ENDED))
        given_up = ASSIGNMENTS.c.round.in_(rounds) & (ASSIGNMENTS.c.state == AssignmentState.ABORTED)
        count = func.count()
        query = select(ASSIGNMENTS.c.reason, count).where(given_up).group_by(ASSIGNMENTS.c.reason)
        return {row[0]: row[1] for row in self._connection.execute(query.order_by(count.desc(), ASSIGNMENTS.c.reason))}
