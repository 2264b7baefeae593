"""A week of check-ins, simulated by counts: check-ins, those in vain, and the time that rounds wait for devices.

Devices are alike but for chance, so the simulation moves numbers of them: those that are due in each step, and those
that were due while they could not come. A device can come while it is charged and idle, in stretches of two hours on
average; the share that can swings fourfold over the day. The windows come from the coordinator's own `pacing`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.options import PacingOptions
from coordinator.rules.pacing import HOUR_S, Demand, Pace, drawn, observe, window
from fedcore.wire.messages import RetryWindow
from muster.output import Say
from muster.pictures.curves import Axes, Picture, draw_curves

DAY_S = 24 * HOUR_S
MEAN_SHARE, SWING = 0.25, 0.6
"""Devices that can come: a quarter, between 10 % and 40 %."""
STRETCH_S = 2 * HOUR_S
WAIT_S, TIMEOUT_S, GATHER_S = 30.0, 60.0, 20.0
FIXED = RetryWindow(5.0, 30.0)
"""The window of a coordinator without pacing."""
BOUNDS = RetryWindow(5.0, DAY_S)


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """A population and its one task. `reporting_s` is the mean time from a draw to a commit; `step_s` is resolution."""

    population: int
    cohort: int
    minimum: int
    reporting_s: float
    step_s: float


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a week, after its first two days, in which the hours of the day are learned.

    peak_to_mean: of arrivals, by minute and by hour. in_vain: share of check-ins that ended without an assignment.
    fill_s: from the moment when a round could draw to its draw. arrivals_per_s: each hour's mean.
    """

    population: int
    paced: bool
    check_ins: int
    rounds: int
    peak_to_mean_minute: float
    peak_to_mean_hour: float
    in_vain: float
    fill_s_p50: float
    fill_s_p99: float
    arrivals_per_s: list[float]


class PacingCourses(msgspec.Struct, frozen=True, kw_only=True):
    """Two courses of every scene: without pacing, then with it."""

    days: int
    scenes: list[Scene]
    courses: list[Course]


SCENES = (
    Scene(population=1_000, cohort=65, minimum=50, reporting_s=120.0, step_s=5.0),
    Scene(population=1_000_000, cohort=10_000, minimum=7_500, reporting_s=300.0, step_s=10.0),
)


def run(options: PacingOptions, say: Say) -> PacingCourses:
    """Simulate every scene twice, without pacing and with it."""
    courses = []
    for scene in SCENES:
        for paced in (False, True):
            say(f"{scene.population} devices, {'paced' if paced else 'a fixed window'}")
            courses.append(course(scene, options.days, options.seed, paced=paced))
    result = PacingCourses(days=options.days, scenes=list(SCENES), courses=courses)
    if options.plot is not None:
        draw(result).save(options.plot)
    return result


def course(scene: Scene, days: int, seed: int, *, paced: bool) -> Course:
    """One week of one scene."""
    week = _Week(scene, paced, np.random.default_rng(seed))
    steps = int(days * DAY_S / scene.step_s)
    for _ in range(steps):
        week.step()
    from_day_3 = int(2 * DAY_S / scene.step_s) if days > 2 else 0
    came = np.array(week.came[from_day_3:], np.float64)
    fills = [fill for at, fill in week.fills if at >= from_day_3 * scene.step_s]
    minutes, hours = (_rates(came, scene.step_s, width_s) for width_s in (60.0, HOUR_S))
    assigned = sum(count for at, count in week.assigned if at >= from_day_3 * scene.step_s)
    return Course(
        population=scene.population,
        paced=paced,
        check_ins=int(came.sum()),
        rounds=len(fills),
        peak_to_mean_minute=float(minutes.max() / minutes.mean()),
        peak_to_mean_hour=float(hours.max() / hours.mean()),
        in_vain=1 - assigned / float(came.sum()),
        fill_s_p50=float(np.quantile(fills, 0.5)) if fills else math.inf,
        fill_s_p99=float(np.quantile(fills, 0.99)) if fills else math.inf,
        arrivals_per_s=[
            round(float(rate), 4) for rate in _rates(np.array(week.came, np.float64), scene.step_s, HOUR_S)
        ],
    )


def _rates(came: NDArray[np.float64], step_s: float, width_s: float) -> NDArray[np.float64]:
    each = int(width_s / step_s)
    whole = came[: len(came) // each * each].reshape(-1, each)
    rates: NDArray[np.float64] = whole.sum(axis=1) / width_s
    return rates


def share(at: float) -> float:
    """The share of devices that can come: it is largest at three in the night."""
    return MEAN_SHARE * (1 + SWING * math.cos(2 * math.pi * (at - 3 * HOUR_S) / DAY_S))


@dataclass(slots=True)
class _Week:
    """The state of one simulation."""

    scene: Scene
    paced: bool
    chance: np.random.Generator
    now: float = 0.0
    asleep: int = 0
    pace: Pace = field(default_factory=lambda: Pace(0.0))
    due: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    still: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    index: int = 0
    waiting: deque[tuple[float, int]] = field(default_factory=deque)
    selecting_since: float | None = 0.0
    timeout_at: float = TIMEOUT_S
    reporting_until: float = 0.0
    drawn_at: float = 0.0
    takes_s: float = 0.0
    came: list[int] = field(default_factory=list)
    assigned: list[tuple[float, int]] = field(default_factory=list)
    fills: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        slots = int(2.5 * DAY_S / self.scene.step_s)
        self.due, self.still = np.zeros(slots, np.int64), np.zeros(slots)
        self.takes_s = self.scene.reporting_s
        # The application is released: every device checks in within the first hour.
        self._put(self.scene.population, RetryWindow(0.0, HOUR_S), 0.0)

    def step(self) -> None:
        """Simulate one step."""
        arrivals = self._arrive()
        self.came.append(arrivals)
        self.pace = observe(self.pace, float(arrivals), self.now, self._demand())
        if arrivals:
            self.waiting.append((self.now + WAIT_S, arrivals))
        self._select()
        while self.waiting and self.waiting[0][0] <= self.now:
            self._send_away(self.waiting.popleft()[1])
        self.now += self.scene.step_s
        self.index = (self.index + 1) % len(self.due)

    def _arrive(self) -> int:
        """Devices that are due and can come, and those that were due and can come by now."""
        can, later = share(self.now), share(self.now + self.scene.step_s)
        due, still = int(self.due[self.index]), float(self.still[self.index])
        self.due[self.index], self.still[self.index] = 0, 0.0
        here = int(self.chance.binomial(due, min(1.0, still / due))) if due else 0
        here += int(self.chance.binomial(due - here, can))
        wakes_per_s = max(0.0, (later - can) / self.scene.step_s + can / STRETCH_S) / (1 - can)
        woken = int(self.chance.binomial(self.asleep, 1 - math.exp(-wakes_per_s * self.scene.step_s)))
        self.asleep += due - here - woken
        return here + woken

    def _select(self) -> None:
        if self.selecting_since is None:
            if self.now < self.reporting_until:
                return
            self.selecting_since, self.timeout_at = self.now, self.now + TIMEOUT_S
            self.takes_s += 0.3 * (self.now - self.drawn_at - self.takes_s)
        here = sum(count for _, count in self.waiting)
        late = self.now >= self.timeout_at
        if here >= self.scene.cohort or (late and here >= self.scene.minimum):
            self._draw(min(here, self.scene.cohort), self.selecting_since)
        elif late:
            # The round is abandoned, and the next one opens.
            self.timeout_at = self.now + TIMEOUT_S
            self._send_away(here)
            self.waiting.clear()

    def _draw(self, count: int, since: float) -> None:
        self.fills.append((self.now, self.now - since))
        self.assigned.append((self.now, count))
        self.selecting_since, self.drawn_at = None, self.now
        spread = self.chance.uniform(0.7, 1.3)
        self.reporting_until = self.now + self.scene.reporting_s * spread
        self._put(count, self._window(count), self.reporting_until - self.now)
        self.pace = drawn(self.pace)
        left, self.waiting = count, deque(self.waiting)
        while left:
            until, here = self.waiting.popleft()
            if here > left:
                self.waiting.appendleft((until, here - left))
            left -= min(here, left)

    def _send_away(self, count: int) -> None:
        parts = 8
        for part in range(parts):
            share_of_part = count // parts + (part < count % parts)
            if share_of_part:
                self._put(share_of_part, self._window(share_of_part), 0.0)

    def _window(self, count: int) -> RetryWindow:
        if not self.paced:
            return FIXED
        self.pace, retry = window(self.pace, self._demand(), BOUNDS, float(count))
        return retry

    def _demand(self) -> Demand:
        ends = self.drawn_at + self.takes_s if self.selecting_since is None else self.now
        return Demand(self.scene.cohort, max(0.0, ends - self.now), self.takes_s + GATHER_S, GATHER_S)

    def _put(self, count: int, when: RetryWindow, after_s: float) -> None:
        """Make `count` devices due at uniform times within a window."""
        step_s, slots = self.scene.step_s, len(self.due)
        first, last = (1 + int((after_s + edge) / step_s) for edge in (when.min_s, when.max_s))
        width = last - first + 1
        each, rest = divmod(count, width)
        counts = np.full(width, each, np.int64)
        if rest:
            counts += np.bincount(self.chance.integers(0, width, rest), minlength=width)
        steps = np.arange(first, last + 1)
        at = (self.index + steps) % slots
        self.due[at] += counts
        self.still[at] += counts * np.exp(-steps * step_s / STRETCH_S)


def draw(result: PacingCourses) -> Picture:
    """The arrivals of every scene, hour by hour."""
    curves = {}
    for week in result.courses:
        name = f"{week.population:,} devices, {'paced' if week.paced else 'a fixed window'}"
        # A logarithm has no place for an hour without arrivals.
        curves[name] = [(hour / 24, rate) for hour, rate in enumerate(week.arrivals_per_s) if rate > 0]
    return draw_curves(curves, Axes(x="day", y="check-ins per second", log_y=True))
