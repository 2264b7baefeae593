"""Rounds in virtual time: the coordinator's own rules, step by step of a second, on arrays of devices.

Devices that nobody needs cost a row of an array each time that they come. With `bulk` those that are sent away within
a second get one window, which counts all of them; without, each gets its own.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from coordinator.rules.pacing import HOUR_S, Demand, Pace, drawn, idle_window, observe, window
from coordinator.rules.rounds import (
    Aggregated,
    Configured,
    Event,
    Lost,
    Reported,
    Select,
    Tick,
    TurnAway,
    Waiting,
    back_off_s,
    open_round,
    step,
)
from coordinator.rules.selection import draw
from coordinator.rules.states import RoundState
from fedcore.wire.messages import RetryWindow
from simulator.forecast.configuration import ForecastConfig
from simulator.forecast.devices import DAY_S, Devices, Rows, Times

WAIT_S, GATHER_S, SILENCE_S = 30.0, 20.0, 60.0
"""How long a device waits for a round; within which devices come together; after which a silent one is lost."""
BOUNDS = RetryWindow(5.0, DAY_S)
_CHUNK_S, _WEIGHT = 60, 0.3


@dataclass(slots=True)
class Course:
    """What happened. times: (opened, drawn, ended) of committed rounds. took_part: reports of each device (N,)."""

    took_part: Rows
    arrivals: Rows
    reports: Rows
    times: list[tuple[float, float, float]] = field(default_factory=list)
    turned_away: Counter[str] = field(default_factory=Counter)
    abandoned: Counter[str] = field(default_factory=Counter)
    assigned: int = 0
    wasted: int = 0
    cpu_phone_s: float = 0.0
    bytes_moved: float = 0.0
    wasted_s: float = 0.0


class Twin:
    """A population and its one task."""

    def __init__(self, config: ForecastConfig, *, bulk: bool = True) -> None:
        self.devices, self._config, self._bulk = Devices.drawn(config), config, bulk
        self._chance = np.random.default_rng((config.seed, 1))
        self._source = random.Random(config.seed)
        count, seconds = config.devices, int(config.days * DAY_S)
        # The application is released: every device looks in within the first hour, or when it can.
        self._due = self._chance.uniform(0.0, HOUR_S, count)
        self._pace = Pace(0.0)
        self._waiting: deque[tuple[float, int]] = deque()
        self._open: dict[int, tuple[float, float]] = {}
        self._events: list[tuple[float, int, int, bool]] = []
        self._free: list[int] = []
        self._number, self._failures, self._takes_s = 0, 0, config.reporting_deadline_s
        self._round = open_round(config.policy, 0.0)
        self._opened = self._drawn_at = self._not_before = 0.0
        self.course = Course(np.zeros(count, np.int64), np.zeros(seconds, np.int64), np.zeros(seconds, np.int64))

    def run(self, on_hour: Callable[[int], None] = lambda hour: None) -> Course:
        """Simulate all of the days."""
        for start in range(0, len(self.course.arrivals), _CHUNK_S):
            if start % int(HOUR_S) == 0:
                on_hour(start // int(HOUR_S))
            for second in range(start, start + _CHUNK_S):
                if second == start:
                    soon = np.flatnonzero(self._due < start + _CHUNK_S)
                    self._soon = {start: soon} if not len(soon) else self._by_second(soon, start)
                self._second(second)
        return self.course

    def _by_second(self, rows: Rows, least: int) -> dict[int, Rows]:
        seconds = np.maximum(self._due[rows].astype(np.int64), least)
        order = np.argsort(seconds, kind="stable")
        values, first = np.unique(seconds[order], return_index=True)
        return dict(zip(values.tolist(), np.split(rows[order], first[1:]), strict=True))

    def _second(self, second: int) -> None:
        now = float(second)
        while self._events and self._events[0][0] <= now:
            _, number, device, reports = heapq.heappop(self._events)
            self._ended_work(number, device, reports, now)
        rows = self._soon.pop(second, None)
        if rows is not None and len(rows):
            self._arrive(rows, now)
        self._tick(now)
        self._return(now)
        late = []
        while self._waiting and self._waiting[0][0] <= now:
            late.append(self._waiting.popleft()[1])
        self._send_away(np.array(late, np.int64), now, "no-place")

    def _arrive(self, rows: Rows, now: float) -> None:
        until = self.devices.can_until(rows, now)
        away = rows[until == 0.0]
        if len(away):
            self._come(away, self.devices.next_stretch(away, now), now)
        rows = rows[until > 0.0]
        self.course.arrivals[int(now)] += len(rows)
        self._pace = observe(self._pace, float(len(rows)), now, self._demand(now))
        self._due[rows] = np.inf
        unfit = self.devices.obstacle[rows] > 0
        for row in rows[~unfit].tolist():
            self._waiting.append((now + WAIT_S, row))
        self._send_idle(rows[unfit], now)

    def _tick(self, now: float) -> None:
        if self._round.state.ended:
            if now < self._not_before:
                return
            self._number, self._opened = self._number + 1, now
            self._round = open_round(self._config.policy, now)
        collects = self._round.state is RoundState.SELECTING or self._round.missing(now)
        self._step(Waiting(len(self._waiting)) if collects else Tick(), now)

    def _step(self, event: Event, now: float) -> None:
        self._round, effects = step(self._round, event, now)
        for effect in effects:
            if isinstance(effect, Select):
                self._assign(effect.count, now)
            elif isinstance(effect, TurnAway):
                rows = np.array([row for _, row in self._waiting], np.int64)
                self._waiting.clear()
                self._send_away(rows, now, "too-few-devices")
        if self._round.state is RoundState.AGGREGATING:
            self._round, _ = step(self._round, Aggregated(), now)
        if self._round.state.ended:
            self._close(now)

    def _assign(self, count: int, now: float) -> None:
        chosen = {row for _, row in draw(self._waiting, count, self._source)}
        self._waiting = deque(pair for pair in self._waiting if pair[1] not in chosen)
        rows = np.array(sorted(chosen), np.int64)
        config, devices = self._config, self.devices
        down_s = config.bytes_down / devices.bandwidth[rows]
        cpu_s = config.example_s * devices.examples[rows] * devices.slow[rows]
        takes_s = (down_s + cpu_s + config.bytes_up / devices.bandwidth[rows]).astype(np.float64)
        vanishes = self._chance.random(count) < config.drop_out
        ends = np.where(vanishes, now + takes_s * self._chance.random(count), now + takes_s)
        until = devices.can_until(rows, now)
        vanishes |= until < ends
        ends = np.where(until > 0, np.minimum(ends, until), now)
        for row, end, gone, cpu in zip(rows.tolist(), ends.tolist(), vanishes.tolist(), cpu_s.tolist(), strict=True):
            self._open[row] = (now, cpu)
            heapq.heappush(self._events, (end + SILENCE_S * gone, self._number, row, not gone))
        if self._round.state is RoundState.CONFIGURING:
            self._drawn_at = now
        self._pace = drawn(self._pace)
        self.course.assigned += count
        self._step(Configured(count), now)

    def _ended_work(self, number: int, device: int, reports: bool, now: float) -> None:
        if number != self._number or device not in self._open:
            return
        begun, cpu_s = self._open.pop(device)
        self._count(begun, cpu_s, now, wasted=not reports)
        if reports:
            self.course.took_part[device] += 1
            self.course.reports[int(now)] += 1
        self._free.append(device)
        self._step(Reported() if reports else Lost(1), now)

    def _close(self, now: float) -> None:
        """Count a round that ended, and let devices go whose work nobody needs."""
        committed = self._round.state is RoundState.COMMITTED
        if committed:
            self.course.times.append((self._opened, self._drawn_at, now))
        else:
            self.course.abandoned[self._round.reason] += 1
        if self._round.assigned:
            self._takes_s += _WEIGHT * (now - self._drawn_at - self._takes_s)
        self._failures = 0 if committed else self._failures + 1
        self._not_before = now + back_off_s(self._failures)
        for begun, cpu_s in self._open.values():
            self._count(begun, cpu_s, now, wasted=True)
        self._free += self._open
        self._open.clear()

    def _count(self, begun: float, cpu_s: float, now: float, *, wasted: bool) -> None:
        spent_s = min(cpu_s, now - begun)
        self.course.cpu_phone_s += spent_s
        self.course.bytes_moved += self._config.bytes_down + (0 if wasted else self._config.bytes_up)
        if wasted:
            self.course.wasted += 1
            self.course.wasted_s += spent_s

    def _demand(self, now: float) -> Demand:
        if self._round.state.ended:
            opens_in_s = max(0.0, self._not_before - now)
        elif self._round.state is RoundState.SELECTING:
            opens_in_s = 0.0
        else:
            opens_in_s = max(0.0, self._drawn_at + self._takes_s - now)
        return Demand(self._config.policy.cohort, opens_in_s, self._takes_s + GATHER_S, GATHER_S)

    def _return(self, now: float) -> None:
        """Devices that took part come back; it takes no place."""
        rows = np.array(self._free, np.int64)
        self._free.clear()
        if len(rows):
            _, usual = window(self._pace, self._demand(now), BOUNDS)
            self._come(rows, now + self._chance.uniform(usual.min_s, usual.max_s, len(rows)), now)

    def _send_away(self, rows: Rows, now: float, why: str) -> None:
        for part in self._parts(rows):
            self._pace = observe(self._pace, 0.0, now, self._demand(now))
            self._pace, when = window(self._pace, self._demand(now), BOUNDS, float(len(part)))
            self._sent(part, when, now, why)

    def _send_idle(self, rows: Rows, now: float) -> None:
        for row in rows.tolist():
            self._pace, when = idle_window(self._pace, BOUNDS)
            self._sent(np.array([row]), when, now, self.devices.obstacles[self.devices.obstacle[row]])

    def _sent(self, rows: Rows, when: RetryWindow, now: float, why: str) -> None:
        self.course.turned_away[why] += len(rows)
        self._come(rows, now + self._chance.uniform(when.min_s, when.max_s, len(rows)), now)

    def _parts(self, rows: Rows) -> list[Rows]:
        """Rows that get one window together: a few parts of many, as the queue grows while they are sent away."""
        parts = min(len(rows), 8) if self._bulk else len(rows)
        return np.array_split(rows, parts) if parts else []

    def _come(self, rows: Rows, at: Times, now: float) -> None:
        """Make devices due; those of this minute are put into it."""
        self._due[rows] = at
        chunk_ends = int(now) // _CHUNK_S * _CHUNK_S + _CHUNK_S
        early = rows[at < chunk_ends]
        if len(early):
            for second, more in self._by_second(early, int(now) + 1).items():
                had = self._soon.get(second)
                self._soon[second] = more if had is None else np.concatenate((had, more))
