"""Queries of the devices that took part in rounds, within one transaction."""

from __future__ import annotations

from sqlalchemy import ColumnElement, String, case, cast, func, select

from coordinator.errors import UnknownAssignment
from coordinator.rules.entities import AssignedDevice, AssignmentRecord
from coordinator.rules.rounds import HELD_UP
from coordinator.rules.states import AssignmentState, LeftOut, RoundState, TaskState
from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.rows import assignment_of
from coordinator.store.tables import ASSIGNMENTS, REPORTS, ROUNDS, TASKS, TRANSITIONS
from fedcore.wire.messages import Settled

_OF_ASSIGNMENT = REPORTS.c.assignment == ASSIGNMENTS.c.id
ASSIGNED_ROWS = (
    select(ASSIGNMENTS, ROUNDS.c.task, ROUNDS.c.number, TASKS.c.plan_sha256, REPORTS.c.sha256)
    .select_from(ASSIGNMENTS.join(ROUNDS).join(TASKS, ROUNDS.c.task == TASKS.c.id).outerjoin(REPORTS, _OF_ASSIGNMENT))
    .order_by(ASSIGNMENTS.c.slot)
)
_SUMS = ROUNDS.alias()
_OF_REPORT = REPORTS.c.round == _SUMS.c.id


class CohortRecords(WithinTransaction):
    """The queries; nothing is written."""

    def drawn(self, task_id: str, number: int, attempt: int) -> list[AssignmentRecord]:
        """The assignments of one attempt at a round, by slot."""
        where = (ROUNDS.c.task == task_id) & (ROUNDS.c.number == number) & (ROUNDS.c.attempt == attempt)
        return [assignment_of(row) for row in self._connection.execute(ASSIGNED_ROWS.where(where))]

    def counted(self, task_id: str, number: int, attempt: int) -> list[AssignmentRecord]:
        """The assignments whose reports are in the sum of one attempt at a round, by number and slot.

        Those of a buffered round may have been drawn by earlier ones, as their numbers say.
        """
        this = (_SUMS.c.task == task_id) & (_SUMS.c.number == number) & (_SUMS.c.attempt == attempt)
        query = (
            ASSIGNED_ROWS.where(REPORTS.c.round.in_(select(_SUMS.c.id).where(this)))
            .order_by(None)
            .order_by(ROUNDS.c.number, ASSIGNMENTS.c.slot)
        )
        return [assignment_of(row) for row in self._connection.execute(query)]

    def at_work(self, task_id: str, numbers: range) -> list[AssignedDevice]:
        """The open assignments of a task's rounds of these numbers.

        In a transaction that writes, no replica counts a report of theirs before it ends.
        """
        within = (ROUNDS.c.number >= numbers.start) & (ROUNDS.c.number < numbers.stop)
        rounds = select(ROUNDS.c.id).where((ROUNDS.c.task == task_id) & within)
        open_ = ASSIGNMENTS.c.round.in_(rounds) & (ASSIGNMENTS.c.state == AssignmentState.ASSIGNED)
        query = self._held(select(ASSIGNMENTS.c.id, ASSIGNMENTS.c.slot, ASSIGNMENTS.c.device).where(open_), ASSIGNMENTS)
        return [AssignedDevice(*row) for row in self._connection.execute(query)]

    def settled(self, assignment_id: str) -> Settled:
        """What became of the round of an assignment, and of its task. Raises UnknownAssignment."""
        summed = ASSIGNMENTS.outerjoin(REPORTS, _OF_ASSIGNMENT)
        summed = summed.join(ROUNDS, ROUNDS.c.id == func.coalesce(REPORTS.c.round, ASSIGNMENTS.c.round))
        columns = (ASSIGNMENTS.c.state, ROUNDS.c.state, TASKS.c.state)
        query = select(*columns).select_from(summed.join(TASKS)).where(ASSIGNMENTS.c.id == assignment_id)
        row = self._connection.execute(query).one_or_none()
        if row is None:
            raise UnknownAssignment("there is no such assignment; check in again")
        assigned, round_, task = AssignmentState(row[0]), RoundState(row[1]), TaskState(row[2])
        reported, open_ = assigned is AssignmentState.REPORTED, assigned is AssignmentState.ASSIGNED
        waits = open_ or (reported and not round_.ended)
        return Settled(counted=None if waits else reported and round_ is RoundState.COMMITTED, over=task.ended)

    def counted_devices(self, task_id: str, number: int) -> frozenset[str]:
        """The devices whose reports a committed round counted, of a task whose rounds draw cohorts."""
        of_round = (ROUNDS.c.task == task_id) & (ROUNDS.c.number == number)
        counted = of_round & (ASSIGNMENTS.c.state == AssignmentState.REPORTED)
        query = select(ASSIGNMENTS.c.device).join(ROUNDS).where(counted & (ROUNDS.c.state == RoundState.COMMITTED))
        return frozenset(self._connection.scalars(query))

    def unreliable_devices(self, task_id: str, since: int, *, buffered: bool) -> dict[str, int]:
        """Devices that brought no report to round `since` or later, nor one after it, and the number of the last such.

        In rounds that draw a cohort, those that gave up or were lost count only where they ended the round: of any
        other they held up nothing.
        """
        silent: ColumnElement[bool] = ASSIGNMENTS.c.state.in_((AssignmentState.ABORTED, AssignmentState.LOST))
        if not buffered:
            of_round = (TRANSITIONS.c.entity == "round") & (TRANSITIONS.c.entity_id == cast(ROUNDS.c.id, String))
            ends = (TRANSITIONS.c.from_state == RoundState.REPORTING) & TRANSITIONS.c.cause.in_(sorted(HELD_UP))
            silent = silent & select(TRANSITIONS.c.id).where(of_round & ends).exists()
        silent |= (ASSIGNMENTS.c.state == AssignmentState.EXPIRED) | (ASSIGNMENTS.c.reason == LeftOut.SUSPECTED)
        reported = ASSIGNMENTS.c.state == AssignmentState.REPORTED
        last, again = (func.max(case((how, ROUNDS.c.id), else_=0)) for how in (silent, reported))
        query = select(ASSIGNMENTS.c.device, func.max(case((silent, ROUNDS.c.number)))).join(ROUNDS)
        lately = (ROUNDS.c.task == task_id) & (ROUNDS.c.number >= since)
        rows = self._connection.execute(query.where(lately).group_by(ASSIGNMENTS.c.device).having(last > again))
        return {row[0]: row[1] for row in rows}

    def participations(self, task_id: str, numbers: range, since: float) -> list[tuple[str, float, int]]:
        """Devices that took part, and stayed, in these rounds or later ones, or in some that ended after `since`.

        Device, time of its last assignment in seconds since 1970, and number of that round. numbers: rounds up to the
        last committed one. Of an abandoned attempt at a committed round those count that further attempts left out, or
        that went on after it.
        """
        gone = ASSIGNMENTS.c.state.in_((AssignmentState.ABORTED, AssignmentState.LOST))
        goes_on = (ASSIGNMENTS.c.state == AssignmentState.ASSIGNED) | (_SUMS.c.state != RoundState.ABANDONED)
        stayed = ~gone & ((ROUNDS.c.state != RoundState.ABANDONED) | goes_on)
        left_out = ASSIGNMENTS.c.reason.in_(list(LeftOut)) & (ROUNDS.c.number < numbers.stop)
        counting = (ROUNDS.c.task == task_id) & (stayed | left_out)
        lately = (ROUNDS.c.number >= numbers.start) | (ROUNDS.c.ended_at > since) | ROUNDS.c.ended_at.is_(None)
        columns = (ASSIGNMENTS.c.device, func.max(ASSIGNMENTS.c.assigned_at), func.max(ROUNDS.c.number))
        summed = ASSIGNMENTS.join(ROUNDS).outerjoin(REPORTS, _OF_ASSIGNMENT).outerjoin(_SUMS, _OF_REPORT)
        query = select(*columns).select_from(summed).where(counting & lately)
        return [(row[0], row[1], row[2]) for row in self._connection.execute(query.group_by(ASSIGNMENTS.c.device))]
