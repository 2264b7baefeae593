"""Pace steering in memory: what coming rounds will ask for, and when devices return. Spec: docs/spec/rounds.md §7."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Set as AbstractSet
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from coordinator.driver.memory.open_rounds import LoadedTask, OpenRounds
from coordinator.rules.buffers import places
from coordinator.rules.pacing import (
    GATHER_S,
    IDLE_PER_S,
    Demand,
    Generation,
    Pace,
    Return,
    RoundTimes,
    after,
    drawn,
    idle_window,
    observe,
    together,
    window,
)
from coordinator.rules.states import RoundState
from fedcore.wire.messages import RetryWindow

# Returns of devices that were sent away, so that pacing counts each once until then. Spec: docs/spec/rounds.md §7.
#
# A device carries its time in a token. Only what the last devices were told is remembered, so that none of them counts
# again with an earlier token, or without one.

LIMIT = 1 << 16
"""Devices that are remembered, at about 300 bytes each. One that hides its token, or shows an old one, counts twice at
most as often as so many others were sent away since."""


class Told(NamedTuple):
    """When a device should come back, from now, and its token; "" without one."""

    retry: RetryWindow
    token: str = ""


class Visit(Protocol):
    """A device that came to a population, with its token or ""."""

    @property
    def population(self) -> str:
        """The population."""

    @property
    def device(self) -> str:
        """The id of the device."""

    @property
    def token(self) -> str:
        """The token of the device's last rejection, or ""."""


class Returns:
    """When devices may come back. For one thread at a time. key: the secret of all replicas, as it is now."""

    def __init__(self, key: Callable[[], bytes], limit: int = LIMIT) -> None:
        self._key = key
        self._limit = limit
        self._generations: dict[str, Generation] = {}
        self._told: OrderedDict[tuple[str, bytes], Return] = OrderedDict()

    def __len__(self) -> int:
        return len(self._told)

    def left(self, visit: Visit, now: float) -> Told | None:
        """The rest of its window for a device that comes too early, which changes nothing; None for any other.

        A visit counts if it is not too early: once with each token, and without one once until the time that was told.
        """
        generation = self.generation(visit.population)
        shown = generation.read(visit.device, visit.token) if visit.token else None
        told = self._told.get((visit.population, generation.mark(visit.device)))
        later = max((when for when in (shown, told) if when is not None), default=None)
        if later is None or now >= later.first:
            return None
        return Told(RetryWindow(later.first - now, later.last - now), generation.token(visit.device, later))

    def expect(self, visit: Visit, window: RetryWindow, now: float) -> Told:
        """Expect the device of a visit that counts within a window from now."""
        generation = self.generation(visit.population)
        told = Return(now + window.min_s, now + window.max_s)
        self._remember(visit.population, generation.mark(visit.device), told)
        return Told(window, generation.token(visit.device, told))

    def hear(self, population: str, mark: bytes, told: Return, now: float) -> bool:
        """Take over what another replica told a device with this mark; false if its visit does not count."""
        before = self._told.get((population, mark))
        if told.last <= now or (before is not None and now < before.first):
            return False
        self._remember(population, mark, told)
        return True

    def generation(self, population: str) -> Generation:
        """The tokens of a population that hold now."""
        generation = self._generations.get(population)
        if generation is None:
            generation = self._generations[population] = Generation.new(self._key(), population)
        return generation

    def follow(self, population: str, name: bytes) -> None:
        """Take over the generation of another replica by its name; if it is new here, every device may come."""
        if population not in self._generations or self._generations[population].name != name:
            self.forget({population})
            self._generations[population] = Generation(self._key(), population, name)

    def forget(self, populations: AbstractSet[str]) -> None:
        """Let every device of these populations come: a new generation begins."""
        for population in populations:
            self._generations.pop(population, None)
        for key in [key for key in self._told if key[0] in populations]:
            del self._told[key]

    def _remember(self, population: str, mark: bytes, told: Return) -> None:
        self._told[population, mark] = told
        self._told.move_to_end((population, mark))
        if len(self._told) > self._limit:
            self._told.popitem(last=False)


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
    _round_times: dict[str, RoundTimes] = field(default_factory=dict)
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
        return None if left is None else bounded(left, self.bounds)

    def generation(self, population: str) -> bytes:
        """The name of the return tokens that hold."""
        with self._lock:
            return self._returns.generation(population).name

    def idle_until(self, population: str, now: float) -> float:
        """When the queue of the devices ends that no round can use."""
        with self._lock:
            return now + self._at(population, now).pace.idle / IDLE_PER_S

    def heard(self, population: str, visits: Iterable[tuple[bytes, Return]], now: float) -> None:
        """Count the visits of idle devices that other replicas sent away, by their marks: each once until its time."""
        with self._lock:
            most = now + self.bounds.max_s
            capped = ((mark, Return(min(told.first, most), min(told.last, most))) for mark, told in visits)
            new = float(sum(self._returns.hear(population, mark, told, now) for mark, told in capped))
            state = self._at(population, now, new)
            state.pace = replace(state.pace, idle=state.pace.idle + new)

    def forget_returns(self, populations: AbstractSet[str]) -> None:
        """Let every device of these populations come: there is something new for them, or another process drives."""
        with self._lock:
            self._returns.forget(populations)

    def drawn(self, task: LoadedTask, devices: int, now: float) -> None:
        """Note that a cohort of `devices` was drawn for a task."""
        with self._lock:
            buffered = task.settings.buffered is not None
            self._round_times[task.id] = self._times(task.id).drawn(now, buffered=buffered)
            population = self._at(task.population, now, float(devices))
            population.pace = drawn(population.pace)

    def ended(self, task: LoadedTask, now: float) -> None:
        """Note that a task's round, for which a cohort had been drawn, ended."""
        with self._lock:
            buffered = task.settings.buffered is not None
            self._round_times[task.id] = self._times(task.id).ended(now, buffered=buffered)

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

    def turned_away(self, visit: Visit, now: float) -> tuple[bool, Told]:
        """Whether a device that no round can use comes early; and its window, a new one unless it does."""
        with self._lock:
            left = self._returns.left(visit, now)
            if left is not None:
                return True, bounded(left, self.bounds)
            state = self._at(visit.population, now, 1.0)
            pace, window_ = idle_window(state.pace, self.bounds)
            return False, self._expect(visit, window_, now, state, pace)

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
        return RetryWindow(self.bounds.min_s, max(self.bounds.min_s, min(GATHER_S, self.bounds.max_s)))

    def awaited(self, visit: Visit, now: float) -> Told:
        """The window for a device that the next trip needs again, which is sent away. It takes no place."""
        with self._lock:
            expected = self._returns.left(visit, now) is None
            return self._returns.expect(visit, self.soon, now) if expected else Told(self.soon)

    def _after(self, state: _Population, rest_s: float, now: float) -> RetryWindow:
        _, usual = window(state.pace, self._upcoming(state, now), self.bounds)
        return after(usual, rest_s, self.bounds)

    def _visited(self, visit: Visit, now: float) -> tuple[_Population, bool]:
        """The state of a population after a visit that is over, and whether the visit counts."""
        counts = self._returns.left(visit, now) is None
        return self._at(visit.population, now, float(counts)), counts

    def _expect(self, visit: Visit, window_: RetryWindow, now: float, state: _Population, pace: Pace) -> Told:
        state.pace = pace
        return self._returns.expect(visit, window_, now)

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

    def _times(self, task: str) -> RoundTimes:
        return self._round_times.get(task, RoundTimes())

    def _demand(self, tasks: Iterable[LoadedTask], rounds: OpenRounds, now: float) -> Demand | None:
        return together(
            [
                Demand(
                    _cohort(task, rounds),
                    self._opens_in_s(task, rounds, now),
                    self._times(task.id).takes_s(task.settings.policy) + GATHER_S,
                    GATHER_S,
                )
                for task in tasks
            ]
        )

    def _opens_in_s(self, task: LoadedTask, rounds: OpenRounds, now: float) -> float:
        running = rounds.running.get(task.id)
        if running is None:
            return max(0.0, rounds.not_before.get(task.id, now) - now)
        if running.value.state in (RoundState.SELECTING, RoundState.CONFIGURING):
            return 0.0
        if running.draws_more(now):
            return 0.0
        return self._times(task.id).left_s(task.settings.policy, now)


def bounded(left: Told, bounds: RetryWindow) -> Told:
    """What is left of a device's window, but at least the least time."""
    first = max(left.retry.min_s, bounds.min_s)
    return Told(RetryWindow(first, max(left.retry.max_s, first)), left.token)


def _cohort(task: LoadedTask, rounds: OpenRounds) -> int:
    """The devices that the latest round draws; of a task without one, those of its first.

    A buffered round draws as many as it has places, and over its time about as many as it counts reports.
    """
    latest = rounds.held.get(task.id) or rounds.running.get(task.id)
    if latest is not None and latest.buffered:
        return max(places(latest.value), latest.value.policy.goal)
    return (latest.value.policy if latest else task.settings.policy).cohort
