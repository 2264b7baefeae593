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
from coordinator.submissions import Arrive, Wait
from fedcore.wire.messages import Accepted, CheckInAnswer, Rejected, RejectionReason, RetryWindow


class Reception:
    """Answers devices out of `pool` and what `learn` was told last. Used by the driver's thread alone."""

    def __init__(self, pool: Pool, apart: Apart, retry: RetryWindow) -> None:
        self._pool = pool
        self._apart = apart
        self._retry = retry
        self._populations: frozenset[str] = frozenset()
        self._driven: AbstractSet[str] = frozenset()
        self._jobs: Sequence[Job] = ()
        self.closed = False

    def learn(
        self, populations: frozenset[str], driven: AbstractSet[str], jobs: Iterable[Job], underway: Underway
    ) -> None:
        """From now on these populations and tasks are known; whoever waits for what will not come is sent away.

        driven: the populations that this process drives, of which the tasks are.
        """
        self._populations, self._driven, self._jobs = populations, driven, tuple(jobs)
        open_ = [job for job in self._jobs if job.active or underway.selects(job)]
        self.send_away([one for one in self._pool.waiting() if not _has_offer(one, open_)], "no-task")

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
        device = Capabilities.stated_by(request.message)
        offers = [job for job in self._jobs if job.population == request.population and job.active]
        if self.closed:
            return self._rejected("shutting-down")
        fitting = [job for job in offers if job.needs.met_by(device)]
        if not fitting:
            return self._without_offer([job.needs for job in offers], device)
        rested = [job for job in fitting if not self._apart.rests(job.task.id, request.device, now)]
        if not rested:
            return self._rejected("resting")
        session, older = self._pool.enter(request.population, request.device, device, now)
        self.send_away(older, "superseded")
        return Accepted(session, tuple(job.offer for job in rested), self._retry)

    def wait(self, request: Wait, answer: Future[Any], now: float) -> None:
        """Park `answer` until there is one. Raises UnknownSession or ForeignSession."""
        self._pool.wait(request, answer, now)

    def hang_up(self, session: str, now: float) -> None:
        """Nobody hears a session any more."""
        self._pool.hang_up(session, now)

    def send_away(self, sessions: Iterable[Session], reason: RejectionReason) -> None:
        """End sessions, and tell their devices why and when to come back."""
        for session in sessions:
            self._pool.reject(session, self._rejected(reason))

    def forget(self, populations: frozenset[str]) -> None:
        """These are driven by another process now: their devices come back, and reach it."""
        self._driven -= populations
        self.send_away(self._pool.of(populations), "shutting-down")

    def dismiss(self, now: float) -> None:
        """Send away whose time is up; once closed, everybody who waits."""
        self.send_away(self._pool.overdue(now), "not-selected")
        if self.closed:
            self.send_away(list(self._pool.waiting()), "shutting-down")

    def _without_offer(self, offers: Sequence[Needs], device: Capabilities) -> Rejected:
        formats = formats_wanted(offers, device)
        if formats:
            return Rejected("unsupported-format", self._retry, tuple(sorted(formats)))
        return self._rejected("not-eligible" if offers else "no-task")

    def _rejected(self, reason: RejectionReason) -> Rejected:
        return Rejected(reason, self._retry)


def _has_offer(session: Session, jobs: Iterable[Job]) -> bool:
    mine = (job for job in jobs if job.population == session.population)
    return any(job.needs.met_by(session.capabilities) for job in mine)
