"""Sessions of devices, from an accepted check-in to their end. Only in memory: a restart forgets them all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from coordinator.commands import AwaitAssignment, CancelWait, CheckInDevice, settle
from coordinator.errors import ForeignSession, Refusal, ReplayedSignature, UnknownSession
from coordinator.rules.replicas import new_id
from coordinator.rules.selection import Eligibility, Needs
from coordinator.tally import SessionCounts
from fedcore.wire.messages import Assignment, Rejected

_IDLE_S = 60.0
"""How long a session lives on when its device does not wait."""


@dataclass(slots=True)
class Session:
    """A session of one device. It waits while it has `answer`; `until` ends the wait, the assignment or the session.

    token: that of the device's last rejection, or "". signed: when it signed its check-in. tasks: those that it is
    willing for; None is any. steps: its steps so far, in order.
    """

    id: str
    population: str
    device: str
    eligibility: Eligibility
    until: float
    token: str = ""
    signed: int = 0
    tasks: frozenset[str] | None = None
    answer: Future[Any] | None = None
    assignment: Assignment | None = None
    steps: list[str] = field(default_factory=lambda: ["accepted"])

    def obstacle(self, task: str, needs: Needs) -> str:
        """The obstacle between the device and a task, "unwilling" too; "" for none."""
        obstacle = self.eligibility.obstacle(task, needs)
        return obstacle or ("" if self.tasks is None or task in self.tasks else "unwilling")

    def reach(self, step: str) -> None:
        """Add a step, once."""
        if step not in self.steps:
            self.steps.append(step)


class Sessions:
    """Every live session at a replica. At most one per device: a newer one ends the older.

    A device that was given an assignment is busy until that has ended. Its steps until then are counted as one session,
    even if a newer session has begun.
    """

    def __init__(self, replica: str, session_counts: SessionCounts) -> None:
        self.replica = replica
        self._session_counts = session_counts
        self._sessions: dict[str, Session] = {}
        self._devices: dict[tuple[str, str], str] = {}
        self._waiting: defaultdict[str, dict[str, Session]] = defaultdict(dict)
        """Sessions that wait, by population and id. There may be ten thousand, and every turn asks."""
        self._working: dict[str, dict[str, Session]] = {}
        """Sessions whose assignment has not ended, by device and population."""

    def enter(self, visit: CheckInDevice, eligibility: Eligibility, now: float) -> tuple[str, Session | None]:
        """Start a session; answers its id, and the session that it supersedes, which the caller must reject.

        Raises ReplayedSignature for a check-in that was signed before that of the session: another replica may have
        answered it, and then somebody sends it again.
        """
        session_id, (population, device) = new_id(self.replica), (visit.population, visit.device)
        older = self._sessions.get(self._devices.get((population, device), ""))
        if older is not None and visit.signed < older.signed:
            raise ReplayedSignature("the device has signed a later check-in since; sign every request anew")
        entered = Session(session_id, population, device, eligibility, now + _IDLE_S, visit.token, visit.signed)
        self._sessions[session_id], self._devices[population, device] = entered, session_id
        return session_id, older

    def wait(self, command: AwaitAssignment, answer: Future[Any], now: float) -> Session | None:
        """Park `answer` until the session, which is returned, is given an assignment or rejected.

        A session that was given one already gets it again: the first answer may have been lost on its way. Then None
        is returned. Raises UnknownSession or ForeignSession.
        """
        session = self._sessions.get(command.session)
        if session is None or (session.assignment is not None and session.until <= now):
            raise UnknownSession("the session does not exist or has ended; check in again")
        if session.device != command.device:
            raise ForeignSession("the session is another device's; check in for one of your own")
        if session.assignment is not None:
            settle(answer, msgspec.structs.replace(session.assignment, report_within_s=session.until - now))
            return None
        if session.answer is not None:
            raise UnknownSession("the session waits already, on another connection")
        session.answer, session.until, session.tasks = answer, now + command.wait_s, command.tasks
        self._waiting[session.population][session.id] = session
        session.reach("waited")
        return session

    def cancel_wait(self, command: CancelWait, now: float) -> None:
        """Stop waiting, if it is that wait that goes on."""
        session = self._sessions.get(command.session)
        if session is not None and session.answer is command.answer:
            session.until = now + _IDLE_S
            self._stop_waiting(session)

    def waiting(self) -> list[Session]:
        """Every session that waits."""
        return [session for there in self._waiting.values() for session in there.values()]

    def count(self, population: str | None = None) -> int:
        """How many wait, in a population or in all."""
        return sum(map(len, self._waiting.values())) if population is None else len(self._waiting[population])

    def of(self, populations: AbstractSet[str]) -> list[Session]:
        """Every session in these populations."""
        return [session for session in self._sessions.values() if session.population in populations]

    def of_device(self, device: str) -> list[Session]:
        """Every session of a device, those of assignments that have not ended too."""
        mine = {session.id: session for session in self._sessions.values() if session.device == device}
        return list((mine | {session.id: session for session in self._working.get(device, {}).values()}).values())

    def eligible(self, population: str, task: str, needs: Needs) -> list[Session]:
        """The sessions that wait and may take part in a task."""
        fitting = (session for session in self._waiting[population].values() if not session.obstacle(task, needs))
        return [session for session in fitting if population not in self._working.get(session.device, ())]

    def obstacles(self, population: str, task: str, needs: Needs) -> Counter[str]:
        """How many wait, by the obstacle between them and a task; "" is those that may take part."""
        busy = {device for device, sessions in self._working.items() if population in sessions}
        waiting = self._waiting[population].values()
        return Counter(
            session.obstacle(task, needs) or ("busy" if session.device in busy else "") for session in waiting
        )

    def assign(self, session: Session, assignment: Assignment, until: float) -> None:
        """Answer a waiting session with its assignment."""
        session.assignment, session.until = assignment, until
        self._working.setdefault(session.device, {})[session.population] = session
        session.reach("assigned")
        self._answer(session, assignment)

    def reject(self, session: Session, rejected: Rejected) -> None:
        """End a session, and tell its device why if it waits."""
        if session.answer is None:
            self.leave(session)
            return
        self._end(session, f"rejected: {rejected.reason}")
        self._answer(session, rejected)

    def refuse(self, session: Session, refusal: Refusal) -> None:
        """End a session without an assignment whose device is refused from now on."""
        self._end(session, refusal.slug)
        if session.answer is not None:
            settle(session.answer, refusal)
        self._stop_waiting(session)

    def leave(self, session: Session) -> None:
        """End a session whose device does not wait. One with an assignment is counted when that ends."""
        if session.assignment is None:
            self._end(session, "left")
        else:
            self._remove(session)

    def overdue(self, now: float) -> list[Session]:
        """Sessions without an assignment whose time is up; the others end with their assignments."""
        return [session for session in self._sessions.values() if session.assignment is None and session.until <= now]

    def late(self, task: str, now: float) -> list[str]:
        """The open assignments of a task whose deadlines have passed."""
        return [assignment.assignment for session, assignment in self._at_work(task) if session.until <= now]

    def at_work(self, task: str) -> dict[str, str]:
        """The open assignments of a task, with their devices."""
        return {assignment.assignment: session.device for session, assignment in self._at_work(task)}

    def is_late(self, population: str, device: str, now: float) -> bool:
        """Whether a device works on an assignment whose deadline has passed."""
        session = self._working.get(device, {}).get(population)
        return session is not None and session.until <= now

    def end_assignment(self, population: str, device: str, assignment: str, how: str) -> None:
        """End the session of a device whose assignment has ended; `how` is its last step.

        A device that works on another one by now goes on.
        """
        session = self._working.get(device, {}).get(population)
        if session is None or session.assignment is None or session.assignment.assignment != assignment:
            return
        self._end(session, how)
        del self._working[device][population]
        if not self._working[device]:
            del self._working[device]

    def fetched(self, device: str, sha256: str) -> None:
        """Add the step of a device that was given a blob."""
        for session in self._working.get(device, {}).values():
            for what in ("plan", "checkpoint"):
                if getattr(session.assignment, what).sha256 == sha256:
                    session.reach(f"fetched {what}")

    def end_assignments(self, task: str, how: str) -> None:
        """End the sessions that still have an assignment of a task, once its round takes no more reports."""
        for session, assigned in self._at_work(task):
            self.end_assignment(session.population, session.device, assigned.assignment, how)

    def _at_work(self, task: str) -> list[tuple[Session, Assignment]]:
        """The sessions with an open assignment of a task."""
        pairs = ((session, session.assignment) for mine in self._working.values() for session in mine.values())
        return [(session, assigned) for session, assigned in pairs if assigned is not None and assigned.task == task]

    def _end(self, session: Session, how: str) -> None:
        session.reach(how)
        self._session_counts.count(
            session.population, session.assignment.task if session.assignment else "", session.steps
        )
        self._remove(session)

    def _remove(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        if self._devices.get((session.population, session.device)) == session.id:
            del self._devices[session.population, session.device]

    def _answer(self, session: Session, answer: Assignment | Rejected) -> None:
        if session.answer is not None:
            settle(session.answer, answer)
        self._stop_waiting(session)

    def _stop_waiting(self, session: Session) -> None:
        session.answer = None
        self._waiting[session.population].pop(session.id, None)
