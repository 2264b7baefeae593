"""Sessions of devices, from an accepted check-in to their end, and the presence of devices in running rounds."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from coordinator.commands import AwaitAssignment, CancelWait, CheckInDevice, settle
from coordinator.errors import ForeignSession, NoLongerNeeded, Refusal, ReplayedSignature, UnknownSession
from coordinator.rules.replicas import new_id
from coordinator.rules.selection import Eligibility, Needs
from coordinator.rules.states import broken_after_s
from coordinator.store.records.rows import SessionCounts
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


# Presence of devices in running rounds: their open requests, and when each was last heard of.
#
# Spec: docs/spec/rounds.md §4. Only in memory. The driver's thread and the event loop both use it.
#
# A device is there as long as a request about its assignment is open. Without one it has `lost_after_s` to make the
# next, and less when the connection broke: a process that is killed closes its connections, and so does a proxy that
# restarts, but behind the proxy the device asks again at once.


_LOOK_S = 0.25
_STALL_S = 1.0
"""After this long without a look, this process stood still: it has not yet read the requests since then."""


class Silence(NamedTuple):
    """How many devices of a round are not heard of, and since when the first of them is not, on its clock."""

    devices: int = 0
    since: float | None = None


@dataclass(slots=True)
class _OpenAssignment:
    """An assignment that is open. `due` is when it is lost, unless a request is open by then.

    given_up: it is lost, whatever its device still asks.
    """

    round_id: int
    lost_after_s: float
    heard_at: float
    due: float
    open: int = 0
    given_up: bool = False
    holds: set[Future[None]] = field(default_factory=set)


class Presence:
    """The open assignments of this process's rounds. Safe from any thread. clock: seconds, with any origin."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._assignments: dict[str, _OpenAssignment] = {}
        self._rounds: defaultdict[int, set[str]] = defaultdict(set)
        self._looked_at = clock()

    def expect(self, round_id: int, assignment: Assignment) -> None:
        """An assignment of a round was given."""
        now, lost_after = self._clock(), assignment.lost_after_s or math.inf
        with self._lock:
            self._assignments[assignment.assignment] = _OpenAssignment(round_id, lost_after, now, now + lost_after)
            self._rounds[round_id].add(assignment.assignment)

    def is_open(self, assignment: str) -> bool:
        """Whether a running round of this process waits for an assignment."""
        return assignment in self._assignments

    def begin(self, assignment: str) -> None:
        """A request about an assignment has come, and is open until `end`."""
        with self._lock:
            if assignment in self._assignments:
                self._assignments[assignment].open += 1

    def end(self, assignment: str, *, broken: bool) -> None:
        """A request about an assignment is over; `broken` says that its connection was lost."""
        now = self._clock()
        with self._lock:
            open_ = self._assignments.get(assignment)
            if open_ is None:
                return
            open_.open = max(0, open_.open - 1)
            open_.heard_at = now
            open_.due = now + (broken_after_s(open_.lost_after_s) if broken else open_.lost_after_s)

    def heard(self, assignment: str) -> None:
        """A device asked about its assignment and was sent away, because this process has too much to do."""
        with self._lock:
            open_ = self._assignments.get(assignment)
            if open_ is not None:
                open_.heard_at = self._clock()
                open_.due = max(open_.due, open_.heard_at + open_.lost_after_s)

    def give_up(self, assignment: str) -> None:
        """Stop waiting for a device: its assignment is lost from now on."""
        with self._lock:
            if assignment in self._assignments:
                self._assignments[assignment].given_up = True

    def hold(self, assignment: str) -> Future[None]:
        """A future that fails with NoLongerNeeded as soon as the round needs nothing more of an assignment.

        An older one of the same assignment gets its result now, None: no device keeps more than one request open by
        this. Give it back with `release`. Raises NoLongerNeeded when the round needs nothing more of it now.
        """
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # so that no waiting task can cancel it while another thread settles it
        with self._lock:
            if assignment not in self._assignments:
                raise _over()
            open_ = self._assignments[assignment]
            older, open_.holds = open_.holds, {future}
        for earlier in older:
            settle(earlier, None)
        return future

    def release(self, assignment: str, future: Future[None]) -> None:
        """A future of `hold` is not waited for any more."""
        with self._lock:
            if assignment in self._assignments:
                self._assignments[assignment].holds.discard(future)

    def dismiss(self) -> None:
        """Settle every future of `hold` with None now: the devices may ask again."""
        with self._lock:
            holds = [future for open_ in self._assignments.values() for future in open_.holds]
        for future in holds:
            settle(future, None)

    def hand_over(self, ended: int, successor: int) -> None:
        """The open assignments of a round that ended are those of its successor from now on."""
        with self._lock:
            names = self._rounds.pop(ended, set())
            for name in names:
                self._assignments[name].round_id = successor
                self._rounds[successor].add(name)

    def forget(self, assignments: Iterable[str], refusal: NoLongerNeeded | None = None) -> None:
        """Drop assignments that have ended, and tell the devices that hold them, with `refusal` if there is one."""
        holds: list[Future[None]] = []
        with self._lock:
            for assignment in assignments:
                open_ = self._assignments.pop(assignment, None)
                if open_ is not None:
                    holds += open_.holds
                    self._rounds[open_.round_id].discard(assignment)
                    if not self._rounds[open_.round_id]:
                        del self._rounds[open_.round_id]
        for future in holds:
            settle(future, refusal or _over())

    def forget_all_but(self, round_ids: Collection[int]) -> None:
        """Drop the assignments of all rounds but these."""
        with self._lock:
            ended = [name for round_id, names in self._rounds.items() if round_id not in round_ids for name in names]
        self.forget(ended)

    def lost(self) -> dict[int, list[str]]:
        """The assignments that are lost by now, by round; the caller drops them with `forget`.

        Time in which this was not called does not count: this process stood still, and read no request.
        """
        now = self._clock()
        with self._lock:
            away_s = now - self._looked_at
            if away_s < _LOOK_S:
                return {}
            self._looked_at = now
            if away_s > _STALL_S:
                for open_ in self._assignments.values():
                    open_.due += away_s
            lost: defaultdict[int, list[str]] = defaultdict(list)
            for assignment, open_ in self._assignments.items():
                if open_.given_up or (not open_.open and open_.due <= now):
                    lost[open_.round_id].append(assignment)
        return dict(lost)

    def silence(self, round_id: int, least_s: float) -> Silence:
        """The devices of a round that have had no request open for more than `least_s`."""
        now = self._clock()
        with self._lock:
            in_round = [self._assignments[name] for name in self._rounds.get(round_id, ())]
            silent = [open_.heard_at for open_ in in_round if not open_.open and now - open_.heard_at > least_s]
        return Silence(len(silent), min(silent, default=None))


def _over() -> NoLongerNeeded:
    return NoLongerNeeded("the round has what it needs of this assignment, or is over")
