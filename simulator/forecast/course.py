"""The course of a forecast, as it happens: devices drawn, exchanges of secure rounds, counts."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.rounds import REPLACING_S, RoundPolicy
from coordinator.rules.task_settings import PHASES_AFTER_TRAINING, Secagg
from fedcore.wire.messages import RetryWindow
from secagg.parameters import find
from secagg.session import SessionPhase
from simulator.forecast.devices import DAY_S, Rows

BINS_PER_OCTAVE = 4


class CommittedRound(NamedTuple):
    """When a round that counted could draw devices, drew them and ended, in seconds from the start.

    devices: the rows of those whose reports it counted. behind: how many versions the model of each was behind.
    """

    opened: float
    drawn: float
    ended: float
    devices: tuple[int, ...]
    behind: tuple[int, ...]


@dataclass(slots=True)
class Rate:
    """How many things happened, by hour (hours,), and in the busiest second."""

    by_hour: NDArray[np.int64]
    peak_per_s: int = 0
    _second: int = -1
    _in_second: int = 0

    def add(self, count: int, now: float) -> None:
        """Count things that happen now; time never goes back by more than the present second."""
        self.by_hour[min(int(now // 3600), len(self.by_hour) - 1)] += count
        self._in_second = count + (self._in_second if int(now) == self._second else 0)
        self._second = int(now)
        self.peak_per_s = max(self.peak_per_s, self._in_second)


@dataclass(slots=True)
class Course:
    """What happened in all. took_part, spent_s, moved: reports, CPU seconds and bytes of each device (N,).

    stays: told windows by log₂ of their middle. wasted_s: CPU seconds of work that no round counted. paused: when and
    why the task stopped for an operator.
    """

    took_part: NDArray[np.int32]
    spent_s: NDArray[np.float32]
    moved: NDArray[np.float64]
    check_ins: Rate
    reports: Rate
    stays: Counter[int] = field(default_factory=Counter)
    rounds: list[CommittedRound] = field(default_factory=list)
    turned_away: Counter[str] = field(default_factory=Counter)
    abandoned: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    assigned: int = 0
    wasted_s: float = 0.0
    paused: tuple[float, str] | None = None

    @classmethod
    def of(cls, devices: int, days: int) -> Course:
        """A course in which nothing has happened yet."""
        by_hour = [np.zeros(int(days * DAY_S) // 3600, np.int64) for _ in range(2)]
        of_devices = np.zeros(devices, np.int32), np.zeros(devices, np.float32), np.zeros(devices)
        return cls(*of_devices, Rate(by_hour[0]), Rate(by_hour[1]))

    def beside(self) -> Course:
        """The course of another task of the population: visits and windows are those of both."""
        devices, days = len(self.took_part), len(self.check_ins.by_hour) // 24
        return replace(
            Course.of(devices, days), check_ins=self.check_ins, turned_away=self.turned_away, stays=self.stays
        )

    def sent_away(self, rows: Rows, when: RetryWindow, why: str) -> None:
        """Count devices that were told to come back within a window."""
        self.turned_away[why] += len(rows)
        self.stays[int(BINS_PER_OCTAVE * np.log2(max(1.0, (when.min_s + when.max_s) / 2)))] += len(rows)


@dataclass(slots=True)
class Drawing:
    """Where devices come from and go to. waiting: rows that wait, each until when, the first first.

    shared: whether several tasks draw from them. drawn, free, turned_away: how many were drawn, whose work is over, and
    who is sent away, since the last look.
    """

    shared: bool = False
    waiting: dict[int, float] = field(default_factory=dict)
    drawn: int = 0
    free: list[int] = field(default_factory=list)
    turned_away: list[int] = field(default_factory=list)

    def turn_away(self, rows: Sequence[int]) -> None:
        """Send devices away that wait."""
        self.turned_away += rows
        for row in rows:
            del self.waiting[row]


# The exchanges of a secure round in virtual time: who takes part in each, and when it ends.
#
# Spec: docs/spec/wire.md §8. A secure round of the coordinator folds in messages; here they are only counted. Its
# groups stand and fall together.

_PHASES: list[SessionPhase] = [phase for phase in SessionPhase if phase is not SessionPhase.DRAWING]
_AFTER = dict(itertools.pairwise(_PHASES))


@dataclass(slots=True)
class Exchanges:
    """The exchanges of one attempt at a round that must be over at `deadline`.

    due: rows of the devices that are waited for; sent: of those that have answered; late: of those that held up an
    exchange. masked: rows of those whose masked reports came, once that exchange is over.
    """

    policy: RoundPolicy
    secagg: Secagg
    deadline: float
    phase: SessionPhase = SessionPhase.ADVERTISING
    due: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)
    masked: frozenset[int] = frozenset()
    late: set[int] = field(default_factory=set)
    _until: float = math.inf
    _not_before: float = -math.inf
    _least: int = 0

    def __post_init__(self) -> None:
        self._until = self.deadline - PHASES_AFTER_TRAINING * self.secagg.phase_s

    @property
    def advertising(self) -> bool:
        """Whether devices may still join."""
        return self.phase is SessionPhase.ADVERTISING

    @property
    def short(self) -> bool:
        """Whether too few are left for a sum: fewer than count, or than must reveal the secrets of the others."""
        if self.advertising:
            return False
        left = len(self.due | self.sent)
        return left < self._least or (not self.masked and left < self.policy.minimum)

    def join(self, rows: list[int]) -> None:
        """Wait for devices that were drawn."""
        self.due.update(rows)
        self._not_before = -math.inf

    def leave(self, row: int, now: float, *, lost: bool) -> None:
        """Go on without a device, or wait a little for another in the place of one that was lost."""
        self.due.discard(row)
        if lost and self.advertising and len(self.due) < self.policy.minimum:
            self._not_before = now + REPLACING_S

    def take(self, row: int, now: float) -> None:
        """Take the message of a device that is waited for."""
        self.sent.add(row)
        if self.advertising and len(self.sent) == self.policy.goal:
            self._until = min(self._until, now + self.secagg.phase_s)

    def ends(self, now: float) -> bool:
        """Whether the exchange ends now: everybody answered, or the time is up."""
        if self.phase is SessionPhase.OVER or now < self._not_before:
            return False
        return self.due <= self.sent or now >= self._until

    def go_on(self, now: float) -> list[int]:
        """End the exchange. Gives the rows that take part in the next one."""
        going = self.due & self.sent
        if not self.advertising or len(self.sent) < self.policy.goal:
            self.late |= self.due - self.sent
        if self.phase is SessionPhase.UPLOADING:
            self.masked = frozenset(going)
        if self.advertising and going:
            parameters = find(max(8, -(-len(going) // -(-len(going) // self.secagg.group_size))))
            self._least = math.ceil(len(going) * parameters.t / parameters.n)
        self.phase, self.due, self.sent = _AFTER[self.phase], going, set()
        self._until = now + self.secagg.phase_s
        return sorted(going)
