"""What devices that look for work are told, out of memory alone: check-ins, waiting, and being sent away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from typing import Any

from coordinator.errors import Unavailable, UnknownPopulation
from coordinator.jobs import Job, Underway
from coordinator.participation import Apart
from coordinator.pool import Pool, Session
from coordinator.selection import Capabilities, Needs, formats_wanted
from coordinator.steering import Steering
from coordinator.submissions import Arrive, Wait
from fedcore.wire.messages import Accepted, CheckInAnswer, Rejected, RejectionReason


class Reception:
    """Answers devices out of `pool` and what `learn` was told last. Used by the driver's thread alone."""

    def __init__(self, pool: Pool, apart: Apart, steering: Steering) -> None:
        self._pool = pool
        self._apart = apart
        self._steering = steering
        self._populations: frozenset[str] = frozenset()
        self._driven: AbstractSet[str] = frozenset()
        self._jobs: Sequence[Job] = ()
        self.closed = False

    def learn(
        self, populations: frozenset[str], driven: AbstractSet[str], jobs: Iterable[Job], underway: Underway, now: float
    ) -> None:
        """From now on these populations and tasks are known; whoever waits for what will not come is sent away.

        driven: the populations that this process drives, of which the tasks are.
        """
        self._populations, self._driven, self._jobs = populations, driven, tuple(jobs)
        open_ = [job for job in self._jobs if job.active or underway.selects(job)]
        self._steering.learn(self._jobs, underway, now)
        self.send_away([one for one in self._pool.waiting() if not _has_offer(one, open_)], "no-task", now)

    def arrive(self, request: Arrive, now: float, look_again: Callable[[], None]) -> CheckInAnswer:
        """Start a session, or say why not; `look_again` learns of populations since.

        Raises UnknownPopulation, or Unavailable for a population that another process drives.
        """
        if request.population not in self._populations:
            look_again()
        if request.population not in self._populations:
            raise UnknownPopulation(f"no population is called {request.population!r}")
        if request.population not in self._driven:
            raise Unavailable("another replica is taking this population over; ask again")
        self._steering.arrived(request.population, now)
        device, name = Capabilities.stated_by(request.message), request.message.device
        offers = [job for job in self._jobs if job.population == request.population and job.active]
        if self.closed:
            return self._rejected(request.population, "shutting-down", now)
        fitting = [job for job in offers if job.needs.met_by(device)]
        if not fitting:
            return self._without_offer(request.population, [job.needs for job in offers], device, now)
        rested = [job for job in fitting if not self._apart.rests(job.task.id, name, now)]
        if not rested:
            left = [self._apart.remaining(job.task.id, name, now) for job in fitting]
            return Rejected("resting", self._steering.rested(request.population, *min(left), now))
        session, older = self._pool.enter(request.population, name, device, now)
        self.send_away(older, "superseded", now)
        rest_s = min(job.task.settings.min_separation_s for job in rested)
        retry = self._steering.after(request.population, rest_s, now)
        return Accepted(session, tuple(job.offer for job in rested), retry)

    def wait(self, request: Wait, answer: Future[Any], now: float) -> None:
        """Park `answer` until there is one. Raises UnknownSession."""
        self._pool.wait(request, answer, now)

    def hang_up(self, session: str, now: float) -> None:
        """Nobody hears a session any more."""
        self._pool.hang_up(session, now)

    def send_away(self, sessions: Iterable[Session], reason: RejectionReason, now: float) -> None:
        """End sessions, and tell their devices why and when to come back."""
        for session in sessions:
            self._pool.reject(session, self._rejected(session.population, reason, now))

    def forget(self, populations: frozenset[str], now: float) -> None:
        """These are driven by another process now: their devices come back, and reach it."""
        self._driven -= populations
        self.send_away(self._pool.of(populations), "shutting-down", now)

    def dismiss(self, now: float) -> None:
        """Send away whose time is up; once closed, everybody who waits."""
        self.send_away(self._pool.overdue(now), "not-selected", now)
        if self.closed:
            self.send_away(list(self._pool.waiting()), "shutting-down", now)

    def _without_offer(self, population: str, offers: Sequence[Needs], device: Capabilities, now: float) -> Rejected:
        formats = formats_wanted(offers, device)
        if formats:
            return Rejected("unsupported-format", self._steering.idle(population, now), tuple(sorted(formats)))
        return self._rejected(population, "not-eligible" if offers else "no-task", now)

    def _rejected(self, population: str, reason: RejectionReason, now: float) -> Rejected:
        useful = reason in ("not-selected", "superseded", "shutting-down")
        when = self._steering.needed if useful else self._steering.idle
        return Rejected(reason, when(population, now))


def _has_offer(session: Session, jobs: Iterable[Job]) -> bool:
    mine = (job for job in jobs if job.population == session.population)
    return any(job.needs.met_by(session.capabilities) for job in mine)
