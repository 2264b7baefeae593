"""Pace steering in memory: what coming rounds will ask for, and one pace per population."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import InitVar, dataclass, field

from coordinator.driver.memory.loaded_task import LoadedTask
from coordinator.driver.memory.open_rounds import OpenRounds
from coordinator.driver.memory.returns import Returns, Told, Visit
from coordinator.rules.buffers import places
from coordinator.rules.pacing import Demand, Pace, drawn, idle_window, observe, window
from coordinator.rules.states import RoundState
from fedcore.wire.messages import RetryWindow

_GATHER_S = 20.0
"""Devices wait half a minute, as a rule: within less than that they must be there to be drawn together."""
_WEIGHT = 0.3
"""The weight of the round that ended last in the estimate for the next."""


@dataclass(slots=True)
class _RoundTimes:
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
    """Tells devices when to come back, within `bounds`, and knows who comes earlier. From any thread.

    key: what authenticates the tokens in which devices keep that time.
    A visit is counted when it is over: the device was drawn, or sent away until a time before which no other visit of
    it counts.
    """

    bounds: RetryWindow
    key: InitVar[Callable[[], bytes]]
    _round_times: dict[str, _RoundTimes] = field(default_factory=dict)
    _populations: dict[str, _Population] = field(default_factory=dict)
    _returns: Returns = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self, key: Callable[[], bytes]) -> None:
        self._returns = Returns(key)

    def learn(self, tasks: Iterable[LoadedTask], rounds: OpenRounds, now: float) -> None:
        """Take over the demand of these tasks, whose rounds stand so."""
        with self._lock:
            tasks = tuple(tasks)
            # Those of paused tasks too: a round that runs meanwhile ends after the task was resumed, say.
            self._round_times = {task.id: self._times(task.id) for task in tasks}
            by_population: dict[str, list[LoadedTask]] = {}
            for task in (task for task in tasks if task.active):
                by_population.setdefault(task.population, []).append(task)
            for name in self._populations.keys() | by_population.keys():
                population = self._at(name, now)
                population.demand = self._demand(by_population.get(name, ()), rounds, now)
                population.opening = now + (population.demand.opens_in_s if population.demand else 0.0)

    def early(self, visit: Visit, now: float) -> Told | None:
        """When a device that comes before its time may come; None for one that may come now. It changes nothing."""
        with self._lock:
            left = self._returns.left(visit, now)
        return None if left is None else Told(self._bounded(left.retry), left.token)

    def forget_returns(self, populations: AbstractSet[str]) -> None:
        """Let every device of these populations come: there is something new for them, or another process drives."""
        with self._lock:
            self._returns.forget(populations)

    def drawn(self, task: LoadedTask, devices: int, now: float) -> None:
        """Note that a cohort of `devices` was drawn for a task."""
        with self._lock:
            times = self._times(task.id)
            # Whoever comes to a buffered round is drawn, again and again: the first of them counts.
            if times.drawn_at is None or task.settings.buffered is None:
                times.drawn_at = now
            population = self._at(task.population, now, float(devices))
            population.pace = drawn(population.pace)

    def ended(self, task: LoadedTask, now: float) -> None:
        """Note that a task's round, for which a cohort had been drawn, ended."""
        with self._lock:
            times = self._times(task.id)
            if times.drawn_at is None:
                return
            took_s = now - times.drawn_at
            before_s = took_s if times.takes_s is None else times.takes_s
            times.takes_s = before_s + _WEIGHT * (took_s - before_s)
            times.drawn_at = None if task.settings.buffered is None else now

    def needed(self, visit: Visit, now: float) -> Told:
        """The window for a device that rounds could use, which is sent away."""
        with self._lock:
            state, counts = self._visited(visit, now)
            pace, window_ = window(state.pace, self._upcoming(state, now), self.bounds)
            return self._expect(visit, window_, now, state, pace) if counts else Told(window_)

    def idle(self, visit: Visit, now: float) -> Told:
        """The window for a device that no round could use, which is sent away."""
        with self._lock:
            state, counts = self._visited(visit, now)
            pace, window_ = idle_window(state.pace, self.bounds)
            return self._expect(visit, window_, now, state, pace) if counts else Told(window_)

    def rested(self, visit: Visit, rest_s: float, rounds: int, now: float) -> Told:
        """The window for a device that is sent away because it rests, for `rest_s` and `rounds`. It takes no place."""
        with self._lock:
            state, counts = self._visited(visit, now)
            rounds_s = rounds * state.demand.every_s if state.demand else 0.0
            window_ = self._after(state, max(rest_s, rounds_s), now)
            return self._expect(visit, window_, now, state, state.pace) if counts else Told(window_)

    def after(self, population: str, rest_s: float, now: float) -> RetryWindow:
        """The window for a device that takes part now: after its rest. It takes no place, and may come earlier."""
        with self._lock:
            return self._after(self._at(population, now), rest_s, now)

    @property
    def soon(self) -> RetryWindow:
        """The window for a device that the next trip needs again."""
        return RetryWindow(self.bounds.min_s, max(self.bounds.min_s, min(_GATHER_S, self.bounds.max_s)))

    def awaited(self, visit: Visit, now: float) -> Told:
        """The window for a device that the next trip needs again, which is sent away. It takes no place."""
        with self._lock:
            expected = self._returns.counts(visit, now)
            return self._returns.expect(visit, self.soon, now) if expected else Told(self.soon)

    def _after(self, state: _Population, rest_s: float, now: float) -> RetryWindow:
        _, usual = window(state.pace, self._upcoming(state, now), self.bounds)
        first = min(max(usual.min_s, rest_s), max(self.bounds.max_s, usual.min_s))
        return RetryWindow(first, max(first, min(first + usual.max_s - usual.min_s, self.bounds.max_s)))

    def _visited(self, visit: Visit, now: float) -> tuple[_Population, bool]:
        """The state of a population after a visit that is over, and whether the visit counts."""
        counts = self._returns.counts(visit, now)
        return self._at(visit.population, now, float(counts)), counts

    def _expect(self, visit: Visit, window_: RetryWindow, now: float, state: _Population, pace: Pace) -> Told:
        state.pace = pace
        return self._returns.expect(visit, window_, now)

    def _bounded(self, left: RetryWindow) -> RetryWindow:
        first = max(left.min_s, self.bounds.min_s)
        return RetryWindow(first, max(left.max_s, first))

    def _at(self, name: str, now: float, arrivals: float = 0.0) -> _Population:
        """The state of a population now, after `arrivals` more."""
        state = self._populations.setdefault(name, _Population(Pace(now)))
        state.pace = observe(state.pace, arrivals, now, state.demand)
        return state

    def _upcoming(self, state: _Population, now: float) -> Demand | None:
        if state.demand is None:
            return None
        opens_in_s = max(0.0, state.opening - now)
        return Demand(state.demand.cohort, opens_in_s, state.demand.every_s, state.demand.gather_s)

    def _times(self, task: str) -> _RoundTimes:
        return self._round_times.setdefault(task, _RoundTimes())

    def _demand(self, tasks: Iterable[LoadedTask], rounds: OpenRounds, now: float) -> Demand | None:
        wanted = [(_cohort(task, rounds), self._opens_in_s(task, rounds, now), task) for task in tasks]
        if not wanted:
            return None
        cohort = sum(size for size, _, _ in wanted)
        per_s = sum(size / (self._takes_s(task) + _GATHER_S) for size, _, task in wanted)
        return Demand(cohort, min(opens_in_s for _, opens_in_s, _ in wanted), cohort / per_s, _GATHER_S)

    def _opens_in_s(self, task: LoadedTask, rounds: OpenRounds, now: float) -> float:
        running = rounds.running.get(task.id)
        if running is None:
            return max(0.0, rounds.not_before.get(task.id, now) - now)
        if running.value.state in (RoundState.SELECTING, RoundState.CONFIGURING):
            return 0.0
        if running.draws_more(now):
            return 0.0
        drawn_at = self._times(task.id).drawn_at
        return max(0.0, (now if drawn_at is None else drawn_at) + self._takes_s(task) - now)

    def _takes_s(self, task: LoadedTask) -> float:
        """From the draw of a round to its end; until one has ended, half of what it may take."""
        expected_s = self._times(task.id).takes_s
        return task.settings.policy.reporting_deadline_s / 2 if expected_s is None else expected_s


def _cohort(task: LoadedTask, rounds: OpenRounds) -> int:
    """The devices that the latest round draws; of a task without one, those of its first.

    A buffered round draws as many as it has places, and over its time about as many as it counts reports.
    """
    latest = rounds.held.get(task.id) or rounds.running.get(task.id)
    if latest is not None and latest.buffered:
        return max(places(latest.value), latest.value.policy.goal)
    return (latest.value.policy if latest else task.settings.policy).cohort
