"""What a driver knows of its tasks in memory alone, looked at now and then, and written where other processes see it.

Pages, commands and metrics read it there (rules.progress). What is written holds times, not durations: while
nothing but time passes, nothing is written.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coordinator.driver.arrivals import Arrivals
from coordinator.driver.membership import Membership
from coordinator.driver.presence import Presence
from coordinator.driver.running import Job, RunningRound, Underway
from coordinator.driver.transaction import Selector
from coordinator.rules.progress import GRACE_S, Observation
from coordinator.rules.rounds import RoundState

_LOG = logging.getLogger(__name__)
_EVERY_S = 2.0
"""Looks cost memory alone, and one transaction for all tasks when something changed."""
_REJECTIONS_S = 60.0
"""How long what rejections alone changed waits for a write: a rejected check-in costs none of its own."""


@dataclass(frozen=True, slots=True)
class _Written:
    """What was written, when, and in which term of the population's lease: in another one, others wrote since."""

    observation: Observation
    at: float
    term: int


@dataclass(slots=True)
class Observer:
    """Looks at tasks for a driver, on its thread and its clock."""

    selector: Selector
    arrivals: Arrivals
    presence: Presence
    _since: dict[str, float] = field(default_factory=dict)
    _written: dict[str, _Written] = field(default_factory=dict)
    _next: float = -float("inf")

    def publish(self, membership: Membership, jobs: Mapping[str, Job], underway: Underway, now: float) -> None:
        """Look at every task when it is time, and write what changed. A failure is tried again at the next look."""
        if now < self._next:
            return
        self._next = now + _EVERY_S
        working = {task: job for task, job in jobs.items() if job.active or task in underway.running}
        self._written = {task: one for task, one in self._written.items() if task in working}
        self._since = {task: self._since.get(task, now) for task in working}
        seen = {task: self._look(job, underway, now) for task, job in working.items()}
        terms = {task: membership.term(job.population) for task, job in working.items()}
        changed = {task: one for task, one in seen.items() if self._is_news(task, one, terms[task], now)}
        if not changed:
            return
        try:
            with membership.writing() as records:
                for task, one in changed.items():
                    records.observations.write(task, membership.id, one.later(records.at - now))
        except Exception as error:
            # The driver's own transactions find out what is wrong, and do something about it.
            _LOG.debug("what is known of %d tasks could not be written: %s", len(changed), error)
            return
        self._written |= {task: _Written(one, now, terms[task]) for task, one in changed.items()}

    def _is_news(self, task: str, seen: Observation, term: int, now: float) -> bool:
        written = self._written.get(task)
        if written is None or written.term != term:
            return True
        if now < written.at + _REJECTIONS_S:
            seen = replace(seen, rejected=written.observation.rejected)
        return seen != written.observation

    def _look(self, job: Job, underway: Underway, now: float) -> Observation:
        task, running = job.task.id, underway.running.get(job.task.id)
        seen = Observation(
            since=self._since[task],
            begins_at=underway.not_before.get(task),
            accepted_at=self.arrivals.accepted_at(job.population),
        )
        if running is not None and running.value.state is not RoundState.SELECTING:
            seen = self._look_at_round(seen, running)
            if not seen.silent and not running.draws(now):
                # The next round's devices: how many wait changes all the time, and nobody wonders.
                return seen
        waiting = self._waiting(job, underway, now)
        eligible, rejected = waiting.pop("", 0), dict(self.arrivals.lately(task, now))
        return replace(seen, eligible=eligible, ineligible=waiting, rejected=rejected)

    def _waiting(self, job: Job, underway: Underway, now: float) -> dict[str, int]:
        """How many devices wait, by what keeps them from a task; "" is those that could be drawn."""
        sessions, running = self.selector.sessions, underway.running.get(job.task.id)
        found = sessions.obstacles(job.population, job.task.id, job.needs)
        again = 0
        if running is not None and running.reporting:
            fitting = sessions.eligible(job.population, job.task.id, job.needs)
            again = sum(session.device in running.devices for session in fitting)
            eligible = len(self.selector.candidates(running, underway, now))
        elif job.task.settings.separation is not None:
            eligible = len(self.selector.eligible(job, underway, now))
        else:
            return dict(found)
        resting = found[""] - again - eligible
        return dict(found + Counter({"": eligible - found[""], "again": again, "resting": resting}))

    def _look_at_round(self, seen: Observation, running: RunningRound) -> Observation:
        silence = self.presence.silence(running.id, GRACE_S)
        phase, answered, asked = running.secure.standing if running.secure else ("", 0, 0)
        return replace(
            seen, silent=silence.devices, silent_since=silence.since, phase=phase, answered=answered, asked=asked
        )
