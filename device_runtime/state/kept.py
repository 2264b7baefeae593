"""Vectors that a device keeps from one of its rounds of a task to the next: named, float32, sealed.

Those that a round made are pending until the device knows whether that round was committed with its report in it. Each
call is one statement of the database, so a device that is killed has all of its effect or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from device_runtime.clock import MOMENT, Clock, Moment
from device_runtime.errors import BadAnswer, PlanRefused, Refused, SealBroken
from device_runtime.state.database import StateDatabase, read_json
from device_runtime.state.sealing import Sealer
from fedcore import checkpoint
from fedcore.params import Float32
from fedcore.plan import Plan
from fedcore.wire.messages import Assignment, Settled

KEPT_S = 90 * 86_400.0
"""Seconds after which a device forgets what it keeps for a task in which it has not taken part since."""
MOST_ASKED = 16
"""How many unsettled rounds a session asks about, each with one request before its check-in."""
_OPEN = Settled(counted=None, over=False)


class KeptVectors:
    """What is kept for the tasks of one population of one coordinator.

    Every method raises StateError or KeyUnavailable.
    """

    def __init__(
        self, database: StateDatabase, sealer: Sealer, clock: Clock, coordinator: str, population: str
    ) -> None:
        self._database, self._sealer, self._clock = database, sealer, clock
        self._key = coordinator, population

    def settle_all(self, ask: Callable[[str], Settled]) -> dict[str, str]:
        """Settle every round that can be settled, and forget tasks that are over or old. `ask` is told an assignment.

        Answers the tasks that have to wait, each with words that say for what. So does one about which the coordinator
        gives no answer: other tasks go on. In one session MOST_ASKED are asked about, drawn at random. Raises what
        `ask` does, but Refused and BadAnswer.
        """
        self._forget_old()
        query = "SELECT task, assignment, round, attempt FROM kept WHERE coordinator = ? AND population = ?"
        rows = self._rows(f"{query} AND pending IS NOT NULL ORDER BY random()")
        waits = {}
        for place, (task, assignment, number, attempt) in enumerate(rows):
            what = f"round {number} of task {task}, attempt {attempt}"
            waits[task] = f"it is not known yet whether {what}, counts with this device's report"
            try:
                answer = ask(assignment) if place < MOST_ASKED else _OPEN
            except (BadAnswer, Refused) as error:
                waits[task] += f": {error.detail}"
                continue
            if answer.over:
                self.forget(task)
            elif answer.counted is not None:
                self._settle(task, counted=answer.counted)
            if answer.over or answer.counted is not None:
                del waits[task]
        return waits

    def _settle(self, task: str, *, counted: bool) -> None:
        """Take over what the last round made, or drop it."""
        self._database.execute(
            "UPDATE kept SET current = CASE WHEN ? THEN pending ELSE current END, pending = NULL "
            "WHERE coordinator = ? AND population = ? AND task = ?",
            counted, *self._key, task,
        )  # fmt: skip

    def of(self, assignment: Assignment, plan: Plan) -> dict[str, Float32] | None:
        """What counts for an assignment's task; None before the first round of this device that counted.

        Raises PlanRefused when it cannot be used: a round is unsettled, the plan is another, or the bytes are damaged.
        """
        query = "SELECT plan, current, pending FROM kept WHERE coordinator = ? AND population = ? AND task = ?"
        for plan_sha256, current, pending in self._rows(query, assignment.task):
            if pending is not None:
                raise PlanRefused(f"how the last round of task {assignment.task} ended is not known here yet")
            if current is None:
                return None
            if plan_sha256 != assignment.plan.sha256:
                raise PlanRefused(
                    f"what is kept for task {assignment.task} is of plan {plan_sha256[:12]}…, not of "
                    f"{assignment.plan.sha256[:12]}…; it stays as it is: a new plan needs a new task"
                )
            try:
                return checkpoint.decode(self._sealer.open(_name(assignment.task), current), plan.kept)
            except SealBroken as error:
                self.forget(assignment.task)
                raise PlanRefused(
                    f"what was kept for task {assignment.task} is damaged, and forgotten: the next round begins anew"
                ) from error
        return None

    def put(self, assignment: Assignment, vectors: Mapping[str, Float32]) -> None:
        """Keep what an assignment's round made, until it is settled. Before a device sends its report."""
        sealed = self._sealer.seal(_name(assignment.task), checkpoint.encode(dict(vectors)))
        until = msgspec.json.encode(Moment.after(KEPT_S, self._clock)).decode()
        made = assignment.assignment, assignment.round, assignment.attempt, sealed, until
        self._database.execute(
            "INSERT INTO kept (coordinator, population, task, plan, assignment, round, attempt, pending, until) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (coordinator, population, task) DO UPDATE SET "
            "plan = excluded.plan, assignment = excluded.assignment, round = excluded.round, "
            "attempt = excluded.attempt, pending = excluded.pending, until = excluded.until",
            *self._key, assignment.task, assignment.plan.sha256, *made,
        )  # fmt: skip

    def bytes_besides(self, task: str) -> int:
        """Bytes that are kept in the state folder but for this task, also of other populations and coordinators."""
        query = "SELECT sum(coalesce(length(current), 0) + coalesce(length(pending), 0)) FROM kept"
        return int(self._rows(f"{query} WHERE (coordinator, population, task) <> (?, ?, ?)", task)[0][0] or 0)

    def forget(self, task: str) -> None:
        """Forget a task: it has ended."""
        self._rows("DELETE FROM kept WHERE coordinator = ? AND population = ? AND task = ?", task)

    def _forget_old(self) -> None:
        for (text,) in self._database.execute("SELECT until FROM kept"):
            kept = read_json(MOMENT, text, "the time of kept vectors in the state database")
            until = kept.carried_over(self._clock)
            if not until.remaining_s(self._clock):
                self._database.execute("DELETE FROM kept WHERE until = ?", text)
            elif until != kept:
                now = msgspec.json.encode(until).decode()
                self._database.execute("UPDATE kept SET until = ? WHERE until = ?", now, text)

    def _rows(self, sql: str, *values: str) -> list[Any]:
        return self._database.execute(sql, *self._key, *values)


def _name(task: str) -> str:
    return f"vectors that are kept for task {task}"
