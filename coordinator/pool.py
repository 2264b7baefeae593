"""Sessions, in memory only: who checked in, who waits, who was given what. A restart forgets them all."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from coordinator.errors import ForeignSession, UnknownSession
from coordinator.leases import new_id
from coordinator.selection import Capabilities, Needs
from coordinator.shapes import Shapes
from coordinator.submissions import Wait, settle
from fedcore.wire.messages import Assignment, Rejected

_IDLE_S = 60.0
"""How long a session lives on when its device does not wait."""


@dataclass(slots=True)
class Session:
    """One device's visit. It waits while it has `answer`; `until` ends the wait, the assignment or the session.

    tasks: those that it is willing for; None is any. steps: what it has gone through, in order.
    """

    id: str
    population: str
    device: str
    capabilities: Capabilities
    until: float
    tasks: frozenset[str] | None = None
    answer: Future[Any] | None = None
    assignment: Assignment | None = None
    steps: list[str] = field(default_factory=lambda: ["accepted"])

    def reach(self, step: str) -> None:
        """Note a step, once."""
        if step not in self.steps:
            self.steps.append(step)


class Pool:
    """Every live session at a replica. At most one per device: a newer visit ends the older.

    A device that was given an assignment is busy until it has reported or is let go, whatever became of its session.
    """

    def __init__(self, replica: str, shapes: Shapes) -> None:
        self.replica = replica
        self._shapes = shapes
        self._working: dict[str, Session] = {}
        self._sessions: dict[str, Session] = {}
        self._devices: dict[tuple[str, str], str] = {}
        self._busy: dict[tuple[str, str], str] = {}

    def enter(self, population: str, device: str, capabilities: Capabilities, now: float) -> tuple[str, list[Session]]:
        """Start a visit; answers its session id and the visit that it ends, if the device had one."""
        session_id = new_id(self.replica)
        older = self._sessions.get(self._devices.get((population, device), ""))
        self._sessions[session_id] = Session(session_id, population, device, capabilities, now + _IDLE_S)
        self._devices[population, device] = session_id
        return session_id, [] if older is None else [older]

    def wait(self, request: Wait, answer: Future[Any], now: float) -> None:
        """Park `answer` until the session is given an assignment or rejected.

        A session that was given one already hears it again: the first answer may have been lost on its way.
        Raises UnknownSession or ForeignSession.
        """
        session = self._sessions.get(request.session)
        if session is None:
            raise UnknownSession("the session does not exist or has ended; check in again")
        if session.device != request.device:
            raise ForeignSession("the session is another device's; check in for one of your own")
        if session.assignment is not None:
            settle(answer, msgspec.structs.replace(session.assignment, report_within_s=session.until - now))
            return
        if session.answer is not None:
            raise UnknownSession("the session waits already, on another connection")
        session.answer, session.until, session.tasks = answer, now + request.wait_s, request.tasks
        session.reach("waited")

    def hang_up(self, session_id: str, now: float) -> None:
        """Stop waiting, unless the session has been answered already."""
        session = self._sessions.get(session_id)
        if session is not None and session.answer is not None:
            session.answer, session.until = None, now + _IDLE_S

    def waiting(self) -> Iterator[Session]:
        """Every session that waits, in order of arrival."""
        return (session for session in self._sessions.values() if session.answer is not None)

    def of(self, populations: AbstractSet[str]) -> list[Session]:
        """Every session in these populations."""
        return [session for session in self._sessions.values() if session.population in populations]

    def eligible(self, population: str, task: str, needs: Needs) -> list[Session]:
        """Who waits and may take part in a task."""
        everyone = (one for one in self.waiting() if one.population == population)
        free = (one for one in everyone if (population, one.device) not in self._busy)
        willing = (one for one in free if one.tasks is None or task in one.tasks)
        return [one for one in willing if needs.met_by(one.capabilities)]

    def assign(self, session: Session, assignment: Assignment, until: float) -> None:
        """Answer a waiting session with its assignment."""
        session.assignment, session.until = assignment, until
        self._busy[session.population, session.device] = assignment.task
        self._working[session.device] = session
        session.reach("assigned")
        self._answer(session, assignment)

    def reject(self, session: Session, rejected: Rejected) -> None:
        """End a session, telling its device why when it waits."""
        session.reach(f"rejected: {rejected.reason}" if session.answer is not None else "left")
        self._remove(session)
        self._answer(session, rejected)

    def overdue(self, now: float) -> list[Session]:
        """Sessions whose time is up."""
        return [session for session in self._sessions.values() if session.until <= now]

    def let_go(self, population: str, device: str, how: str) -> None:
        """A device's assignment has ended, before its round did."""
        self._busy.pop((population, device), None)
        if device in self._working:
            self._working[device].reach(how)

    def fetched(self, device: str, sha256: str) -> None:
        """A device was given a blob."""
        session = self._working.get(device)
        if session is not None and session.assignment is not None:
            for what in ("plan", "checkpoint"):
                if getattr(session.assignment, what).sha256 == sha256:
                    session.reach(f"fetched {what}")

    def forget_assigned(self, task: str) -> None:
        """End the sessions that hold an assignment of a task whose round is over, and let its devices go."""
        self._busy = {device: busy_with for device, busy_with in self._busy.items() if busy_with != task}
        over = [s for s in self._sessions.values() if s.assignment is not None and s.assignment.task == task]
        for session in over:
            ended = session.steps[-1] == "reported" or session.steps[-1].startswith("aborted")
            if not ended:
                session.reach("expired")
            self._remove(session)

    def _remove(self, session: Session) -> None:
        if self._sessions.pop(session.id, None) is not None:
            self._shapes.count(session.population, session.assignment.task if session.assignment else "", session.steps)
        if self._working.get(session.device) is session:
            del self._working[session.device]
        if self._devices.get((session.population, session.device)) == session.id:
            del self._devices[session.population, session.device]

    def _answer(self, session: Session, answer: Assignment | Rejected) -> None:
        if session.answer is not None:
            settle(session.answer, answer)
        session.answer = None
