"""Pace steering as it runs: what rounds will ask for, and one pace per population, in memory alone."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.driver.running import Job, Underway
from coordinator.rules.pacing import Demand, Pace, drawn, idle_window, observe, window
from coordinator.rules.rounds import RoundState
from fedcore.wire.messages import RetryWindow

_GATHER_S = 20.0
"""Devices wait half a minute, as a rule: within less than that they must be there to be drawn together."""
_WEIGHT = 0.3
"""Of the round that ended last, in what is expected of the next."""


@dataclass(slots=True)
class _Rhythm:
    """When a task's round was drawn last, if that is known, and how long its rounds take from there, in seconds."""

    drawn_at: float | None = None
    takes_s: float | None = None


@dataclass(slots=True)
class _Population:
    pace: Pace
    demand: Demand | None = None
    opening: float = 0.0


@dataclass(slots=True)
class Steering:
    """Tells devices when to come back, within `bounds`. From any thread."""

    bounds: RetryWindow
    _rhythms: dict[str, _Rhythm] = field(default_factory=dict)
    _populations: dict[str, _Population] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def learn(self, jobs: Iterable[Job], underway: Underway, now: float) -> None:
        """From now on these tasks ask for devices, and their rounds stand so."""
        with self._lock:
            jobs = tuple(jobs)
            # Those of paused tasks too: a round that runs meanwhile ends after the task was resumed, say.
            self._rhythms = {job.task.id: self._rhythm(job.task.id) for job in jobs}
            by_population: dict[str, list[Job]] = {}
            for job in (job for job in jobs if job.active):
                by_population.setdefault(job.population, []).append(job)
            for name in self._populations.keys() | by_population.keys():
                one = self._at(name, now)
                one.demand = self._demand(by_population.get(name, ()), underway, now)
                one.opening = now + (one.demand.opens_in_s if one.demand else 0.0)

    def arrived(self, population: str, now: float) -> None:
        """A device checked in."""
        with self._lock:
            one = self._at(population, now)
            one.pace = observe(one.pace, 1.0, now, one.demand)

    def drawn(self, job: Job, now: float) -> None:
        """A cohort was drawn for a task."""
        with self._lock:
            self._rhythm(job.task.id).drawn_at = now
            one = self._at(job.population, now)
            one.pace = drawn(one.pace)

    def ended(self, job: Job, now: float) -> None:
        """A task's round, for which a cohort had been drawn, ended."""
        with self._lock:
            rhythm = self._rhythm(job.task.id)
            if rhythm.drawn_at is None:
                return
            took_s = now - rhythm.drawn_at
            before_s = took_s if rhythm.takes_s is None else rhythm.takes_s
            rhythm.takes_s = before_s + _WEIGHT * (took_s - before_s)

    def needed(self, population: str, now: float) -> RetryWindow:
        """When a device that rounds could use should come back."""
        with self._lock:
            one = self._at(population, now)
            demand = self._upcoming(one, now)
            if demand is None:
                return self.idle(population, now)
            one.pace, found = window(one.pace, demand, self.bounds)
            return found

    def after(self, population: str, rest_s: float, now: float) -> RetryWindow:
        """When a device that takes part now, or rests, should come back: after its rest. It takes no place."""
        with self._lock:
            one = self._at(population, now)
            demand = self._upcoming(one, now)
            _, found = window(one.pace, demand, self.bounds) if demand else idle_window(one.pace, self.bounds)
            return self._not_before(rest_s, found)

    def rested(self, population: str, rest_s: float, rounds: int, now: float) -> RetryWindow:
        """When a device that rests, for so many seconds and rounds, should come back."""
        with self._lock:
            one = self._at(population, now)
            rounds_s = rounds * one.demand.every_s if one.demand else 0.0
            return self.after(population, max(rest_s, rounds_s), now)

    def idle(self, population: str, now: float) -> RetryWindow:
        """When a device that no round could use should come back."""
        with self._lock:
            one = self._at(population, now)
            one.pace, found = idle_window(one.pace, self.bounds)
            return found

    def _at(self, name: str, now: float) -> _Population:
        """What is known of a population, as of now."""
        one = self._populations.setdefault(name, _Population(Pace(now)))
        one.pace = observe(one.pace, 0.0, now, one.demand)
        return one

    def _upcoming(self, one: _Population, now: float) -> Demand | None:
        if one.demand is None:
            return None
        opens_in_s = max(0.0, one.opening - now)
        return Demand(one.demand.cohort, opens_in_s, one.demand.every_s, one.demand.gather_s)

    def _not_before(self, rest_s: float, found: RetryWindow) -> RetryWindow:
        first = min(max(found.min_s, rest_s), max(self.bounds.max_s, found.min_s))
        return RetryWindow(first, max(first, min(first + found.max_s - found.min_s, self.bounds.max_s)))

    def _rhythm(self, task: str) -> _Rhythm:
        return self._rhythms.setdefault(task, _Rhythm())

    def _demand(self, jobs: Iterable[Job], underway: Underway, now: float) -> Demand | None:
        wanted = [(job.task.settings.policy.cohort, self._opens_in_s(job, underway, now), job) for job in jobs]
        if not wanted:
            return None
        cohort = sum(size for size, _, _ in wanted)
        per_s = sum(size / (self._takes_s(job) + _GATHER_S) for size, _, job in wanted)
        return Demand(cohort, min(opens_in_s for _, opens_in_s, _ in wanted), cohort / per_s, _GATHER_S)

    def _opens_in_s(self, job: Job, underway: Underway, now: float) -> float:
        running = underway.running.get(job.task.id)
        if running is None:
            return max(0.0, underway.not_before.get(job.task.id, now) - now)
        if running.value.state in (RoundState.SELECTING, RoundState.CONFIGURING):
            return 0.0
        if running.draws(now):
            return 0.0
        drawn_at = self._rhythm(job.task.id).drawn_at
        return max(0.0, (now if drawn_at is None else drawn_at) + self._takes_s(job) - now)

    def _takes_s(self, job: Job) -> float:
        """From the draw of a round to its end; until one has ended, half of what it may take."""
        expected_s = self._rhythm(job.task.id).takes_s
        return job.task.settings.policy.reporting_deadline_s / 2 if expected_s is None else expected_s
