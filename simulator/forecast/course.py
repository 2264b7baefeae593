"""A modelled population as arrays, when its devices can come, and the course of a forecast as it happens."""

from __future__ import annotations

import csv
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.rounds import REPLACING_S, RoundPolicy
from coordinator.rules.selection import Capabilities, Needs
from coordinator.rules.task_settings import PHASES_AFTER_TRAINING, Secagg
from fedcore.conditions import StatedConditions, rounded_down
from fedcore.errors import why
from fedcore.targets import parse
from fedcore.wire.messages import RetryWindow
from secagg.parameters import find
from secagg.session import SessionPhase
from simulator.errors import ForecastError
from simulator.forecast.configuration import ForecastConfig
from simulator.labels import Shares

if TYPE_CHECKING:
    from _csv import Reader


# A modelled population as arrays, and the stretches of time in which its devices can come.


DAY_S = 86_400.0

Rows = NDArray[np.int64]
Times = NDArray[np.float64]


class Stretches(Protocol):
    """When each of N devices can come."""

    def can_until(self, rows: Rows, now: float) -> Times:
        """The end of the stretch in which each of `rows` can come now; 0 where it cannot."""

    def next_stretch(self, rows: Rows, now: float) -> Times:
        """The start of the next stretch of each of `rows`, after now."""

    def longest_s(self) -> Times:
        """The longest stretch of each device (N,), in seconds."""


@dataclass(frozen=True, slots=True)
class Nightly:
    """A stretch on most days, at the same time of the day.

    begins_s: its start (N,), in seconds of a UTC day; lasts_s: its length (N,). chance: that there is one on a day.
    """

    begins_s: NDArray[np.float32]
    lasts_s: NDArray[np.float32]
    chance: float
    seed: int

    def can_until(self, rows: Rows, now: float) -> Times:
        """The end of the stretch in which each of `rows` can come now; 0 where it cannot."""
        day, into = self._last(rows, now)
        inside = (into < self.lasts_s[rows]) & self._is_there(rows, day)
        return np.where(inside, now - into + self.lasts_s[rows], 0.0)

    def next_stretch(self, rows: Rows, now: float) -> Times:
        """The start of the next stretch of each of `rows`, after now."""
        day, into = self._last(rows, now)
        start = now - into
        left = np.arange(len(rows))
        while len(left):
            day[left] += 1
            start[left] += DAY_S
            left = left[~self._is_there(rows[left], day[left])]
        return start

    def longest_s(self) -> Times:
        """The longest stretch of each device (N,), in seconds."""
        return self.lasts_s.astype(np.float64)

    def _last(self, rows: Rows, now: float) -> tuple[Rows, Times]:
        """The number of the stretch that would have begun last, and the seconds since."""
        since = now - self.begins_s[rows].astype(np.float64)
        day = np.floor(since / DAY_S)
        return day.astype(np.int64), since - day * DAY_S

    def _is_there(self, rows: Rows, day: Rows) -> NDArray[np.bool_]:
        """Whether a device has its stretch on that day: by a hash, so that days need no memory."""
        mixed = (rows * 0x9E3779B1 + (day + self.seed + 7) * 0x85EBCA77).astype(np.uint64)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.chance


COLUMNS = ["device", "start_s", "end_s"]


@dataclass(frozen=True, slots=True)
class Traced:
    """The stretches of M traced devices, which begin anew after `period_s`; each of N devices goes by one of them.

    starts, ends: of all stretches, device by device, in order. lines: the starts, each device's a period after those of
    the one before. first: where those of each traced device begin, and their number (M + 1,). of: the traced device of
    each device (N,).
    """

    starts: Times
    ends: Times
    lines: Times
    first: Rows
    of: Rows
    period_s: float

    def can_until(self, rows: Rows, now: float) -> Times:
        """The end of the stretch in which each of `rows` can come now; 0 where it cannot."""
        into = now % self.period_s
        last = self._last(rows, into)
        begun = last >= self.first[self.of[rows]]
        inside = begun & (into < self.ends[last])
        return np.where(inside, now - into + self.ends[last], 0.0)

    def next_stretch(self, rows: Rows, now: float) -> Times:
        """The start of the next stretch of each of `rows`, after now."""
        into, traced = now % self.period_s, self.of[rows]
        following = self._last(rows, into) + 1
        again = following >= self.first[traced + 1]
        following = np.where(again, self.first[traced], following)
        starts: Times = now - into + self.starts[following] + self.period_s * again
        return starts

    def longest_s(self) -> Times:
        """The longest stretch of each device (N,), in seconds."""
        longest: Times = np.maximum.reduceat(self.ends - self.starts, self.first[:-1])[self.of]
        return longest

    def _last(self, rows: Rows, into: float) -> Rows:
        """The stretch of each device that began last; that of another device where none has begun."""
        found: NDArray[np.int64] = np.searchsorted(self.lines, self.of[rows] * self.period_s + into, side="right") - 1
        return found


def read_trace(path: Path, devices: int, seed: int) -> Traced:
    """The stretches of a file with a line of `device,start_s,end_s` for each, for so many devices.

    Raises ForecastError with the number of the first line that cannot be.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            found = _stretches(path, csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ForecastError(f"trace {path}: {why(error)}") from error
    counts = [len(stretches) for stretches in found]
    starts, ends = np.array([(start, end) for stretches in found for start, end, _ in stretches], np.float64).T
    period_s = DAY_S * math.ceil(ends.max() / DAY_S)
    lines = np.repeat(np.arange(len(counts)), counts) * period_s + starts
    of = np.random.default_rng((seed, 3)).permutation(devices) % len(counts)
    return Traced(starts, ends, lines, np.concatenate(([0], np.cumsum(counts))), of, period_s)


def _stretches(path: Path, lines: Reader) -> list[list[tuple[float, float, int]]]:
    """The stretches of each device in order, with their lines in the file."""
    if next(lines, None) != COLUMNS:
        raise ForecastError(f"trace {path}, line 1: the columns are {','.join(COLUMNS)}")
    found: defaultdict[str, list[tuple[float, float, int]]] = defaultdict(list)
    for cells in lines:
        try:
            device, (start, end) = cells[0], map(float, cells[1:])
        except (ValueError, IndexError):
            words = f"{','.join(cells)!r} is not a device and two times in seconds"
            raise _impossible(path, lines.line_num, words) from None
        if not 0 <= start < end < math.inf:
            words = f"a stretch from {start:g} to {end:g}: it must begin at 0 or later, and end after that"
            raise _impossible(path, lines.line_num, words)
        found[device].append((start, end, lines.line_num))
    if not found:
        raise ForecastError(f"trace {path} has no stretch: add lines of {','.join(COLUMNS)}")
    for stretches in found.values():
        stretches.sort()
        for (_, end, line), (start, _, other) in itertools.pairwise(stretches):
            if start < end:
                words = f"it overlaps the stretch of line {min(line, other)} of the same device"
                raise _impossible(path, max(line, other), words)
    return list(found.values())


def _impossible(path: Path, line: int, words: str) -> ForecastError:
    return ForecastError(f"trace {path}, line {line}: {words}")


WAIT_S = 30.0
"""How long a device waits for a round."""
_FORMAT, _COLLECTION = "onnx", "examples"
_EVENING_S, _EVENING_SPREAD_S = 22.5 * 3600.0, 2 * 3600.0
_STRETCH_SPREAD, _BANDWIDTH_SPREAD, _EXAMPLES_SPREAD = 0.4, 0.8, 1.0


@dataclass(frozen=True, slots=True)
class Devices:
    """The properties of N devices, each an array (N,).

    stretches: when they can come. zone: hours ahead of UTC. slow: CPU time over that of the median device. work_s:
    seconds from an assignment to the report, of which cpu_s compute and up_s send it. obstacle: index into `obstacles`,
    0 for none. matching, untold: how many match the task's target, and how many tell no labels.
    """

    stretches: Stretches
    zone: NDArray[np.int8]
    slow: NDArray[np.float32]
    cpu_s: NDArray[np.float32]
    work_s: NDArray[np.float32]
    up_s: NDArray[np.float32]
    obstacle: NDArray[np.int8]
    obstacles: tuple[str, ...]
    matching: int
    untold: int

    def __len__(self) -> int:
        return len(self.zone)

    @classmethod
    def drawn(cls, config: ForecastConfig) -> Devices:
        """The population of a configuration."""
        chance, count = np.random.default_rng(config.seed), config.devices
        zone = chance.integers(0, config.time_zones, count).astype(np.int8)
        begins = (chance.normal(_EVENING_S, _EVENING_SPREAD_S, count) - 3600.0 * zone) % DAY_S
        lasts = np.minimum(config.charging_s * np.exp(chance.normal(0, _STRETCH_SPREAD, count)), DAY_S)
        slow = np.exp(chance.normal(0, config.speed_spread, count))
        bandwidth = config.bandwidth * np.exp(chance.normal(0, _BANDWIDTH_SPREAD, count))
        examples = np.clip(config.median_examples * np.exp(chance.normal(0, _EXAMPLES_SPREAD, count)), 1, 2**31 - 1)
        held = examples.astype(np.int32)
        sets, own = draw_label_sets(config.shares, count, config.seed)
        obstacle, obstacles = _judged(config, held, chance.random(count) < config.unmetered, sets, own)
        matches, in_sets = parse(config.where).matches if config.where else bool, np.bincount(own, minlength=len(sets))
        cpu_s = config.example_s * held * slow
        work_s = cpu_s + (config.bytes_down + config.bytes_up) / bandwidth
        nights = Nightly(begins.astype(np.float32), lasts.astype(np.float32), config.charges, config.seed)
        return cls(
            nights if config.trace is None else read_trace(config.trace, count, config.seed),
            zone,
            slow.astype(np.float32),
            cpu_s.astype(np.float32),
            work_s.astype(np.float32),
            (config.bytes_up / bandwidth).astype(np.float32),
            obstacle,
            obstacles,
            int(sum(in_sets[[bool(matches(one)) for one in sets]])),
            int(sum(in_sets[[not one for one in sets]])),
        )


def _judged(
    config: ForecastConfig,
    examples: NDArray[np.int32],
    unmetered: NDArray[np.bool_],
    sets: Sequence[Mapping[str, str]],
    own: Rows,
) -> tuple[NDArray[np.int8], tuple[str, ...]]:
    """What keeps each device out. The rule judges each kind once: devices that state the same are judged alike.

    sets, own: sets of labels, and the index of each device's.
    """
    powers = np.floor(np.log2(examples)).astype(np.int64)
    kinds, kind = np.unique((powers * 2 + unmetered) * len(sets) + own, return_inverse=True)
    task = config.task
    needs = Needs(frozenset({_FORMAT}), _COLLECTION, config.min_examples, task.requires, target=task.where)
    names, judged = [""], []
    for one, labels in ((code // len(sets), sets[code % len(sets)]) for code in kinds.tolist()):
        conditions = StatedConditions(charging=True, idle=True, unmetered=bool(one % 2))
        held = {_COLLECTION: rounded_down(2 ** (one // 2))}
        able = Capabilities(frozenset({_FORMAT}), held, conditions=conditions, labels=labels)
        obstacle = needs.unmet_by("", able)
        names += [] if obstacle in names else [obstacle]
        judged.append(names.index(obstacle))
    return np.array(judged, np.int8)[kind], tuple(names)


def draw_label_sets(shares: Shares, count: int, seed: int) -> tuple[list[dict[str, str]], Rows]:
    """The labels of `count` devices: the different sets, and of each device the index of its own (count,)."""
    sets: list[dict[str, str]] = [{}]
    own = np.zeros(count, np.int64)
    for place, (name, values) in enumerate(shares.items()):
        chance = np.random.default_rng((seed, 4, place)).random(count)
        value = np.searchsorted(np.cumsum(list(values.values())), chance, side="right")
        told = [*({name: value} for value in values), {}]
        found, own = np.unique(own * len(told) + value, return_inverse=True)
        sets = [sets[code // len(told)] | told[code % len(told)] for code in found.tolist()]
    return sets, own


# The course of a forecast, as it happens: devices drawn, exchanges of secure rounds, counts.


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
