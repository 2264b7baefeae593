"""What devices that look for work are told, out of memory alone: check-ins, waiting, and being sent away."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.commands import Arrive, HangUp, Wait
from coordinator.driver.arrivals import Arrivals
from coordinator.driver.participation import ParticipationLimit
from coordinator.driver.running import Job, Underway
from coordinator.driver.sessions import Session, Sessions
from coordinator.driver.steering import Steering
from coordinator.errors import Unavailable, UnknownPopulation
from coordinator.rules.selection import Capabilities, formats_wanted
from coordinator.session_counts import SessionCounts
from fedcore.wire.messages import Accepted, CheckInAnswer, Rejected, RejectionReason


@dataclass(frozen=True, slots=True)
class _Known:
    """What check-ins are answered by: replaced as a whole, so that any thread may read it.

    driven: the populations that this process drives. active: their active tasks, by population.
    """

    populations: frozenset[str] = frozenset()
    driven: AbstractSet[str] = frozenset()
    active: Mapping[str, tuple[Job, ...]] = field(default_factory=dict)


class CheckIns:
    """Answers devices out of `sessions` and what `learn` was told. Only `turn_away` may be called from any thread."""

    def __init__(
        self, sessions: Sessions, participation: ParticipationLimit, steering: Steering, session_counts: SessionCounts
    ) -> None:
        self._sessions = sessions
        self._participation = participation
        self._steering = steering
        self._session_counts = session_counts
        self.arrivals = Arrivals()
        self._known = _Known()
        self._open: dict[str, Job] = {}
        """Tasks for which a device may wait, as `learn` was told last."""
        self.closed = False

    @property
    def populations(self) -> frozenset[str]:
        """Those that are known, whoever drives them."""
        return self._known.populations

    def learn(
        self, populations: frozenset[str], driven: AbstractSet[str], jobs: Iterable[Job], underway: Underway, now: float
    ) -> None:
        """From now on these populations and tasks are known; whoever waits for what will not come is sent away.

        driven: the populations that this process drives, of which the tasks are.
        """
        jobs = tuple(jobs)
        active = {name: tuple(job for job in jobs if job.active and job.population == name) for name in driven}
        self._known = _Known(populations, frozenset(driven), active)
        self._steering.learn(jobs, underway, now)
        before, self._open = self._open, {job.task.id: job for job in jobs if job.active or underway.selects(job)}
        if before.keys() - self._open.keys():
            left = [one for one in self._sessions.waiting() if not _has_offer(one, self._open.values())]
            self.send_away(left, "no-task", now)

    def turn_away(self, request: Arrive, now: float) -> Rejected | None:
        """Reject a device for which there is surely nothing, at once; None for all that `arrive` must decide.

        From any thread, without waiting for the driver's: most check-ins of a large population end here, and cost no
        more than this.
        """
        known = self._known
        if self.closed or request.population not in known.driven:
            return None
        found = self._offers(known, request, now)
        if isinstance(found, Rejected):
            self._steering.arrived(request.population, now)
            self._session_counts.count(request.population, "", [f"rejected: {found.reason}"])
            return found
        return None

    def arrive(self, request: Arrive, now: float) -> CheckInAnswer:
        """Start a session, or say why not.

        Raises UnknownPopulation, or Unavailable for a population that another process drives.
        """
        if request.population not in self._known.populations:
            raise UnknownPopulation(f"no population is called {request.population!r}")
        if request.population not in self._known.driven:
            raise Unavailable("another replica is taking this population over; ask again")
        self._steering.arrived(request.population, now)
        offers: list[Job] | Rejected
        if self.closed:
            offers = self._rejected(request.population, "shutting-down", now)
        else:
            offers = self._offers(self._known, request, now)
        if isinstance(offers, Rejected):
            self._session_counts.count(request.population, "", [f"rejected: {offers.reason}"])
            return offers
        self.arrivals.accepted(request.population, now)
        session, older = self._sessions.enter(
            request.population, request.device, Capabilities.stated_by(request.message), now
        )
        rest_s = min(job.task.settings.min_separation_s for job in offers)
        retry = self._steering.after(request.population, rest_s, now)
        if older is not None:
            # The same device: it is told to come back once.
            self._sessions.reject(older, Rejected("superseded", retry))
        return Accepted(session, tuple(job.offer for job in offers), retry)

    def _offers(self, known: _Known, request: Arrive, now: float) -> list[Job] | Rejected:
        """The tasks that a device may wait for, one at least; or why there is none."""
        name, device = request.population, Capabilities.stated_by(request.message)
        active = known.active.get(name, ())
        obstacles = {job.task.id: job.needs.unmet_by(device) for job in active}
        fitting = [job for job in active if not obstacles[job.task.id]]
        if not fitting:
            self.arrivals.rejected(obstacles, now)
            formats = formats_wanted([job.needs for job in active], device)
            if formats:
                return Rejected("unsupported-format", self._steering.idle(name, now), tuple(sorted(formats)))
            return self._rejected(name, "not-eligible" if active else "no-task", now)
        rested = [job for job in fitting if not self._participation.rests(job.task.id, request.device, now)]
        if rested:
            return rested
        self.arrivals.rejected({task: obstacle or "resting" for task, obstacle in obstacles.items()}, now)
        left = [self._participation.remaining(job.task.id, request.device, now) for job in fitting]
        return Rejected("resting", self._steering.rested(name, *min(left), now))

    def wait(self, request: Wait, answer: Future[Any], now: float) -> None:
        """Park `answer` until there is one. Raises UnknownSession or ForeignSession."""
        self._sessions.wait(request, answer, now)

    def hang_up(self, request: HangUp, now: float) -> None:
        """Nobody hears a wait any more."""
        self._sessions.hang_up(request, now)

    def send_away(self, sessions: Iterable[Session], reason: RejectionReason, now: float) -> None:
        """End sessions, and tell their devices why and when to come back."""
        for session in sessions:
            if session.answer is None:
                # Nobody hears it, so nobody is expected back.
                self._sessions.leave(session)
            else:
                self._sessions.reject(session, self._rejected(session.population, reason, now))

    def forget(self, populations: frozenset[str], now: float) -> None:
        """These are driven by another process now: their devices come back, and reach it."""
        self._known = replace(self._known, driven=self._known.driven - populations)
        self.send_away(self._sessions.of(populations), "shutting-down", now)

    def dismiss(self, now: float) -> None:
        """Send away whose time is up; once closed, everybody who waits."""
        self.send_away(self._sessions.overdue(now), "not-selected", now)
        if self.closed:
            self.send_away(list(self._sessions.waiting()), "shutting-down", now)

    def _rejected(self, population: str, reason: RejectionReason, now: float) -> Rejected:
        useful = reason in ("not-selected", "shutting-down")
        when = self._steering.needed if useful else self._steering.idle
        return Rejected(reason, when(population, now))


def _has_offer(session: Session, jobs: Iterable[Job]) -> bool:
    mine = (job for job in jobs if job.population == session.population)
    return any(job.needs.met_by(session.capabilities) for job in mine)
