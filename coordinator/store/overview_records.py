"""Queries of the dashboard, within one transaction. Each reads few rows, however many rounds there were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import String, cast, func, select
from sqlalchemy.engine import Connection

from coordinator.rules.entities import LiveRound
from coordinator.rules.states import AssignmentState, RoundState
from coordinator.store.tables import ASSIGNMENTS, ROUNDS, TRANSITIONS

_ENDED = [state for state in RoundState if state.ended]


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


class OverviewRecords:
    """The queries; nothing is written."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def version(self) -> int:
        """A number that grows with changes of state; a change committed out of order may leave it."""
        return self._connection.scalar(select(func.max(TRANSITIONS.c.id))) or 0

    def live(self) -> list[LiveRound]:
        """Every round that has not ended, by task, in order."""
        entered = (
            select(func.max(TRANSITIONS.c.at))
            .where((TRANSITIONS.c.entity == "round") & (TRANSITIONS.c.entity_id == cast(ROUNDS.c.id, String)))
            .scalar_subquery()
            .label("entered_at")
        )
        query = select(ROUNDS, entered).where(ROUNDS.c.state.not_in(_ENDED)).order_by(ROUNDS.c.task, ROUNDS.c.id)
        same = ("task", "number", "attempt", "assigned", "reported", "aborted", "lost", "expired", "taken_over")
        return [
            LiveRound(
                **{name: getattr(row, name) for name in same},
                state=RoundState(row.state),
                staleness=tuple(row.staleness),
                entered_at=row.entered_at,
            )
            for row in self._connection.execute(query)
        ]

    def totals(self) -> dict[str, Totals]:
        """Sums over the rounds that ended, of every task that has any."""
        counted = (ROUNDS.c.state == RoundState.COMMITTED).label("counted")
        names = ("assigned", "reported", "aborted", "lost", "expired", "stale")
        sums = [func.sum(ROUNDS.c[name]) for name in names]
        going_on = func.sum(ROUNDS.c.handed_on - ROUNDS.c.taken_over)
        query = select(ROUNDS.c.task, counted, *sums, going_on, func.count()).where(ROUNDS.c.state.in_(_ENDED))
        found: dict[str, list[int]] = {}
        for task, committed, *counts, rounds in self._connection.execute(query.group_by(ROUNDS.c.task, counted)):
            of_task = found.setdefault(task, [0] * 9)
            more = (*counts, rounds if committed else 0, 0 if committed else rounds)
            found[task] = [int(a) + int(b) for a, b in zip(of_task, more, strict=True)]
        return {task: Totals(*sums) for task, sums in found.items()}

    def curve(self, task_id: str) -> list[tuple[int, dict[str, float]]]:
        """Number and metrics of every committed round of a task."""
        committed = (ROUNDS.c.task == task_id) & (ROUNDS.c.state == RoundState.COMMITTED)
        query = select(ROUNDS.c.number, ROUNDS.c.metrics).where(committed).order_by(ROUNDS.c.number)
        return [(row.number, row.metrics) for row in self._connection.execute(query)]

    def latest(self, task_id: str, most: int) -> Sequence[Any]:
        """The newest attempts of a task that ended, newest first, as rows."""
        ended = (ROUNDS.c.task == task_id) & ROUNDS.c.state.in_(_ENDED)
        return self._connection.execute(select(ROUNDS).where(ended).order_by(ROUNDS.c.id.desc()).limit(most)).all()

    def abort_reasons(self, rounds: Sequence[int]) -> dict[str, int]:
        """Aborted assignments of these rounds (row ids) by reason, most first."""
        given_up = ASSIGNMENTS.c.round.in_(rounds) & (ASSIGNMENTS.c.state == AssignmentState.ABORTED)
        count = func.count()
        query = select(ASSIGNMENTS.c.reason, count).where(given_up).group_by(ASSIGNMENTS.c.reason)
        return {row[0]: row[1] for row in self._connection.execute(query.order_by(count.desc()))}
