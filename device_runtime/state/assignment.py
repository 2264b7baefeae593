"""The last assignment in the state folder, its finished report, and vectors kept for later rounds.

A device that was stopped at any point learns here how to continue: do nothing, give the assignment up, or send exactly
the same report again. It never trains twice for one assignment.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from device_runtime.conditions import MOMENT, Clock, Moment
from device_runtime.errors import BadAnswer, PlanRefused, Refused, ReportLost, SealBroken
from device_runtime.state.database import StateDatabase, read_json
from device_runtime.state.folder import OVERHEAD_BYTES, Sealer, write_whole
from fedcore import checkpoint
from fedcore.params import Float32
from fedcore.plan import Plan
from fedcore.validation import decoder
from fedcore.wire.messages import Assignment, Settled

SUFFIX = ".report"


class StoredAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """An assignment and its progress.

    assigned: work began. trained: the report is in the file `sha256`: weighted, for the upload, or in a secure round
    unweighted, for masking. masked: `sha256` is of the masked report, which may have left; `secagg` is the sealed state
    of secure aggregation, with secrets of other devices. uploaded: the receipt has arrived, the file is gone. `due` is
    the reporting deadline. `examples`, `collection` and `steps` describe the training of the report; `question` is what
    its plan asked, visible, and `numbers` how many the report has.
    """

    given: Assignment
    due: Moment
    phase: Literal["assigned", "trained", "masked", "uploaded"] = "assigned"
    sha256: str = ""
    collection: str = ""
    examples: int = 0
    steps: int = 0
    question: str | None = None
    numbers: int = 0
    secagg: bytes = b""


_STORED = decoder(StoredAssignment)


class AssignmentStore:
    """The last assignment from one population of one coordinator. Every method raises StateError or KeyUnavailable.

    Reports and the state of secure aggregation are kept sealed.
    """

    def __init__(
        self, database: StateDatabase, folder: Path, sealer: Sealer, coordinator: str, population: str
    ) -> None:
        self._database = database
        self._folder = folder
        self._sealer = sealer
        self._key = coordinator, population
        # The report that this process finished, so that it is neither read nor hashed again.
        self._finished: bytes | None = None

    def get(self) -> StoredAssignment | None:
        """The last assignment, unless it was dropped."""
        query = "SELECT stored FROM assignment WHERE coordinator = ? AND population = ?"
        for (stored,) in self._database.execute(query, *self._key):
            return _decode(stored)
        return None

    def assigned(self, assignment: Assignment, due: Moment) -> StoredAssignment:
        """Store an assignment whose work begins."""
        return self._put(StoredAssignment(given=assignment, due=due))

    def carried_over(self, stored: StoredAssignment, clock: Clock) -> StoredAssignment:
        """The assignment that an earlier process left, with its deadline on the clock of this boot."""
        return self._put(replace(stored, due=stored.due.carried_over(clock)))

    def trained(self, stored: StoredAssignment, report: bytes) -> StoredAssignment:
        """Store the finished report: first in a file, then in the database."""
        sha256 = hashlib.sha256(report).hexdigest()
        write_whole(self._file(sha256), self._sealer.seal(_report_of(stored), report))
        self._finished = report
        return self._put(replace(stored, phase="trained", sha256=sha256))

    def report(self, stored: StoredAssignment) -> bytes:
        """The bytes of a trained report. Raises ReportLost when an earlier process left none, or they were changed."""
        finished, self._finished = self._finished, None
        if finished is not None:
            return finished
        try:
            data = self._sealer.open(_report_of(stored), self._file(stored.sha256).read_bytes())
        except OSError as error:
            raise ReportLost("the kept report is gone", str(error)) from error
        except SealBroken as error:
            raise ReportLost("the kept report is damaged") from error
        if hashlib.sha256(data).hexdigest() != stored.sha256:
            raise ReportLost("the kept report is damaged")
        return data

    def size(self, stored: StoredAssignment) -> int:
        """Bytes of a trained report; 0 when there is none, or it is gone."""
        try:
            return self._file(stored.sha256).stat().st_size - OVERHEAD_BYTES
        except OSError:
            return 0

    def masked(self, stored: StoredAssignment, sha256: str, secagg: bytes) -> StoredAssignment:
        """Store that the report is masked. The unmasked report is no longer needed."""
        return self.stepped(replace(stored, phase="masked", sha256=sha256), secagg)

    def stepped(self, stored: StoredAssignment, secagg: bytes) -> StoredAssignment:
        """Store the state of secure aggregation after a further step, replacing the one before."""
        return self._put(replace(stored, secagg=self._sealer.seal(_state_of(stored), secagg)))

    def state(self, stored: StoredAssignment) -> bytes:
        """The state of secure aggregation. Raises ReportLost when it does not open: the report cannot be counted."""
        try:
            return self._sealer.open(_state_of(stored), stored.secagg)
        except SealBroken as error:
            raise ReportLost("the kept state of a secure aggregation is damaged") from error

    def uploaded(self, stored: StoredAssignment) -> None:
        """Store that the receipt has arrived."""
        self._put(replace(stored, phase="uploaded", secagg=b""))

    def drop(self) -> None:
        """Forget the assignment: it was given up, or its report is no longer needed."""
        self._database.execute("DELETE FROM assignment WHERE coordinator = ? AND population = ?", *self._key)
        self.sweep()

    def sweep(self) -> None:
        """Remove report files that no assignment of this state folder needs; ignore files that cannot be removed."""
        rows = (_decode(stored) for (stored,) in self._database.execute("SELECT stored FROM assignment"))
        needed = {f"{stored.sha256}{SUFFIX}" for stored in rows if stored.phase == "trained"}
        for path in self._folder.glob(f"*{SUFFIX}"):
            if path.name not in needed:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _put(self, stored: StoredAssignment) -> StoredAssignment:
        text = msgspec.json.encode(stored).decode()
        self._database.execute("INSERT OR REPLACE INTO assignment VALUES (?, ?, ?)", *self._key, text)
        return stored

    def _file(self, sha256: str) -> Path:
        return self._folder / f"{sha256}{SUFFIX}"


def _report_of(stored: StoredAssignment) -> str:
    return f"report of assignment {stored.given.assignment}"


def _state_of(stored: StoredAssignment) -> str:
    return f"state of the secure aggregation of assignment {stored.given.assignment}"


def _decode(stored: str) -> StoredAssignment:
    return read_json(_STORED, stored, "an assignment in the state database")


# Vectors that a device keeps from one of its rounds of a task to the next: named, float32, sealed.
#
# Those that a round made are pending until the device knows whether that round was committed with its report in it.
# Each call is one statement of the database, so a device that is killed has all of its effect or none.

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
