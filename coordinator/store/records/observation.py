"""Rows of observations, which drivers make of their tasks, within one transaction. The rule: rules/progress.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from sqlalchemy import func, insert, select, update

from coordinator.rules.entities import LiveRound, Task
from coordinator.rules.progress import LastAttempt, Observation, TaskStatus
from coordinator.rules.states import RoundState
from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.start import start_of
from coordinator.store.tables import OBSERVATIONS, POPULATIONS, REPLICAS, ROUNDS


class ObservationRecords(WithinTransaction):
    """The operations on observations, and the situations of tasks that are made of them."""

    def write(self, task: str, replica: str, seen: Observation) -> None:
        """Write a driver's observation of a task in place of the last one; times are in seconds since 1970."""
        values = {"replica": replica, **asdict(seen)}
        changed = update(OBSERVATIONS).where(OBSERVATIONS.c.task == task)
        more = {"version": OBSERVATIONS.c.version + 1}
        if not self._connection.execute(changed.values(**values, **more)).rowcount:
            self._connection.execute(insert(OBSERVATIONS).values(task=task, version=1, **values))

    def version(self) -> int:
        """A number that changes whenever something is written."""
        return self._connection.scalar(select(func.sum(OBSERVATIONS.c.version))) or 0

    def situations(self, tasks: Sequence[Task], live: Iterable[LiveRound]) -> list[TaskStatus]:
        """The situations of these tasks. live: the rounds that have not ended, of a task in their order."""
        running: dict[str, LiveRound] = {}
        for round_ in live:
            running.setdefault(round_.task, round_)
        these = [task.id for task in tasks]
        committed, ended, observed = self._committed(these), self._ended(these), self._observed(these)
        drivers = self._drivers()
        statuses = []
        for task in tasks:
            driver, seen_at = drivers.get(task.settings.population, (None, None))
            statuses.append(
                TaskStatus(
                    task=task,
                    committed=committed.get(task.id, 0),
                    round=running.get(task.id),
                    last=ended.get(task.id),
                    driver_seen_at=seen_at,
                    observed=observed.get((task.id, driver)),
                    starts_at=start_of(task.settings),
                )
            )
        return statuses

    def _committed(self, tasks: Sequence[str]) -> dict[str, int]:
        done = ROUNDS.c.task.in_(tasks) & (ROUNDS.c.state == RoundState.COMMITTED)
        query = select(ROUNDS.c.task, func.max(ROUNDS.c.number)).where(done).group_by(ROUNDS.c.task)
        return {row[0]: row[1] for row in self._connection.execute(query)}

    def _ended(self, tasks: Sequence[str]) -> dict[str, LastAttempt]:
        """The last ended attempt of each task."""
        ended = ROUNDS.c.task.in_(tasks) & ROUNDS.c.ended_at.is_not(None)
        newest = select(func.max(ROUNDS.c.id)).where(ended).group_by(ROUNDS.c.task)
        query = select(ROUNDS.c.task, ROUNDS.c.number, ROUNDS.c.reason, ROUNDS.c.ended_at).where(
            ROUNDS.c.id.in_(newest)
        )
        rows = self._connection.execute(query)
        return {row.task: LastAttempt(number=row.number, reason=row.reason, ended_at=row.ended_at) for row in rows}

    def _drivers(self) -> dict[str, tuple[str, float]]:
        """The replica that drives each population, and the time of its last beat."""
        query = select(POPULATIONS.c.name, REPLICAS.c.id, REPLICAS.c.seen_at)
        present = query.join(REPLICAS, POPULATIONS.c.holder == REPLICAS.c.id)
        return {name: (replica, seen_at) for name, replica, seen_at in self._connection.execute(present)}

    def _observed(self, tasks: Sequence[str]) -> dict[tuple[str, str | None], Observation]:
        """The observation of each task by each replica."""
        names = Observation.__dataclass_fields__
        return {
            (row.task, row.replica): Observation(**{name: getattr(row, name) for name in names})
            for row in self._connection.execute(select(OBSERVATIONS).where(OBSERVATIONS.c.task.in_(tasks)))
        }
