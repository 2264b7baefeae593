"""Progress of a task: a reason from a closed list with a sentence, and whether its loss diverges. Pure.

What makes a task stalled, and what to do about each reason: docs/operations.md, "Progress".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.entities import LiveRound, Task
from coordinator.rules.rounds import RoundPolicy
from coordinator.rules.states import RoundState, TaskState
from fedcore.report import LEVELS, levels

DIVERGED = "diverged"
"""The cause of the pause in a task's history, and the first word of its reason."""
IN_A_ROW = 3
"""Rounds in a row with too large a loss: a single one may have had odd devices, or a device that lies."""
MOST_ROUNDS = 2 * IN_A_ROW
"""Rounds to look at: with two trips, every other round has a loss of the same name."""
FIRST_VALUES = 2 * IN_A_ROW - 1
"""Values of a loss whose median it is measured by: IN_A_ROW false ones move the median, fewer do not."""
FIRST_ROUNDS = 2 * FIRST_VALUES
"""Rounds that have them, with two trips."""
START = "start.loss"
"""The metric of a task's first round that says how large losses were before training."""
LIARS = 2
"""Devices of a round that may lie about their losses and pause nothing."""
_LOSS = ".loss"
Metrics: TypeAlias = Mapping[str, float]


def divergence(first: Sequence[Metrics], latest: Sequence[Metrics], most_growth: float) -> str:
    """Why a task counts as diverged, in words for its operator; "" while it does not.

    Both since the task was last made active. first: metrics of its first rounds, FIRST_ROUNDS at most. latest: those of
    its last rounds, the newest last; MOST_ROUNDS are enough. most_growth: how many times the median of its first
    FIRST_VALUES values a loss may be; 0 looks at no loss.
    """
    if not most_growth:
        return ""
    for name in sorted(name for metrics in latest for name in metrics if name.endswith(_LOSS)):
        values = [metrics[name] for metrics in latest if name in metrics]
        if not math.isfinite(values[-1]):
            return f"{name} is {values[-1]}"
        measures = [abs(metrics[name]) for metrics in first if name in metrics][:FIRST_VALUES]
        if len(measures) < FIRST_VALUES or len(values) < IN_A_ROW:
            continue
        most = most_growth * statistics.median(measures)
        if most and min(values[-IN_A_ROW:]) > most:
            times = f"{most_growth:g} times the median of its first {FIRST_VALUES} values"
            return f"{name} was above {most:.4g}, {times}, in {IN_A_ROW} rounds in a row"
    return ""


class LossCounts(NamedTuple):
    """How many of a round's devices reached each level of loss (2 LEVELS,): before training, and in training."""

    reached: NDArray[np.float64]
    devices: int

    def start(self) -> dict[str, float]:
        """The least level that the losses of at most LIARS devices reached before training, as a metric.

        Empty where too few devices reported, or where losses reach all levels.
        """
        above = levels()[self.reached[:LEVELS] <= LIARS]
        return {START: float(above[0])} if above.size and self.devices > 2 * LIARS else {}

    def explosion(self, start: float | None, most_growth: float) -> str:
        """Why training exploded in this round, in words; "" if it did not, or if the loss before it is not known.

        start: START of the task's first round. It exploded where the losses of LIARS devices more than half of all are
        `most_growth` times as large.
        """
        if start is None or not most_growth:
            return ""
        large = np.flatnonzero(levels() >= most_growth * start)
        if not large.size or self.reached[LEVELS + large[0]] <= self.devices / 2 + LIARS:
            return ""
        count, level = round(self.reached[LEVELS + large[0]]), float(levels()[large[0]])
        return f"{count} of {self.devices} devices had a loss of {level:g} or more, after less than {start:g} at first"


NO_DEVICES_AFTER_H = 12.0
"""How many hours without an accepted check-in make a stall, unless a setting says otherwise: phones come at night."""
GRACE_S = 10.0
"""How long nothing may happen, where something should, before a task counts as stalled."""
DRIVER_SILENT_S = 30.0
"""After so long without a beat a driver is taken for gone: it beats three times per lease time, 15 s by default."""
UNMASKING = "unmasking"
"""The phase of a secure round in which its sum is made, and no device is waited for."""


class Reason(StrEnum):
    """Why a task is where it is."""

    STARTING = "starting"
    SCHEDULED = "scheduled"
    SELECTING = "selecting"
    WAITING = "waiting-for-devices"
    REPORTING = "reporting"
    AGGREGATING = "aggregating"
    COMPLETED = "completed"
    PRIVACY_BUDGET_SPENT = "privacy-budget-spent"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    PAUSED_AFTER_FAILURES = "paused-after-failures"
    DIVERGED = "diverged"
    NO_DRIVER = "no-driver"
    DRIVER_SILENT = "driver-silent"
    BACK_OFF = "back-off"
    NO_DEVICES = "no-devices"
    NONE_ELIGIBLE = "none-eligible"
    TOO_FEW_DEVICES = "too-few-devices"
    DEVICES_SILENT = "devices-silent"
    CANNOT_WRITE = "cannot-write"

    @property
    def stalled(self) -> bool:
        """Whether the task should go on and does not."""
        return self not in _MOVES and self not in _OVER


_MOVES = {Reason.STARTING, Reason.SCHEDULED, Reason.SELECTING, Reason.WAITING, Reason.REPORTING, Reason.AGGREGATING}
_OVER = {Reason.COMPLETED, Reason.PRIVACY_BUDGET_SPENT, Reason.CANCELLED}
OBSTACLES = {
    "busy": "with an assignment",
    "examples": "with too few examples",
    "version": "with too old a runtime",
    "memory": "with too little memory",
    "conditions": "whose conditions do not hold",
    "keeps-nothing": "whose runtime keeps no vectors between rounds",
    "labels": "whose labels do not match",
    "held-out": "held out of training",
    "not-held-out": "not held out, where the task runs on held-out devices",
    "format": "without a format of the plan",
    "again": "that this round drew before",
    "left-out": "left out after an earlier attempt at this round",
    "unreliable": "that held up a round and are drawn last",
    "other-cohort": "not counted in the first trip of this pair",
    "resting": "resting after taking part",
    "unwilling": "willing only for other tasks",
}
"""Obstacles between a device and a task, in words that follow a number of devices."""
_UNITS = (("days", 86_400.0), ("h", 3600.0), ("min", 60.0))
_WATCHED_S = 900.0
"""Durations below this are given in seconds: somebody may be watching."""
_PHASES = {
    "advertising": "have trained",
    "drawing": "have trained",
    "sharing": "have sent their shares",
    "opening": "have opened the boxes of shares",
    "uploading": "have sent their masked reports",
    "confirming": "have confirmed the survivors",
    "revealing": "have revealed their shares",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The state of a task that only its driver's memory has. Times in seconds, on the driver's clock or since 1970.

    since: when the driver took up the task, or found it resumed. begins_at: the end of a pause after failed attempts.
    eligible: waiting devices that could be drawn. ineligible, rejected: waiting devices that could not, and check-ins
    of the last minute or two that were rejected, by obstacle. accepted_at: the last accepted check-in.
    silent: devices of the round that were not heard of lately, the first of them since `silent_since`.
    phase: of a secure round, in which `answered` of `asked` devices have sent what it waits for.
    members: how many devices the round may draw from, as the second trip of the same cohort. quiet_s: how long no
    check-in may be accepted before the task counts as stalled.
    """

    since: float
    begins_at: float | None = None
    eligible: int = 0
    ineligible: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    accepted_at: float | None = None
    silent: int = 0
    silent_since: float | None = None
    phase: str = ""
    answered: int = 0
    asked: int = 0
    members: int | None = None
    quiet_s: float = NO_DEVICES_AFTER_H * 3600

    def later(self, seconds: float) -> Observation:
        """The same on a clock that is ahead by so much."""
        times = {name: getattr(self, name) for name in ("since", "begins_at", "accepted_at", "silent_since")}
        return replace(self, **{name: at + seconds for name, at in times.items() if at is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class LastAttempt:
    """The last attempt of a task that ended: its number, why it was abandoned if it was, when (seconds since 1970)."""

    number: int
    reason: str
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatus:
    """A task with all that its progress follows from. Times in seconds since 1970.

    committed: rounds. round: the one that runs, or is held and none runs. driver_seen_at: the last beat of the replica
    that drives the population; None when nobody does. observed: its observation; None when there is none yet.
    starts_at: before which it draws no device.
    """

    task: Task
    committed: int
    round: LiveRound | None = None
    last: LastAttempt | None = None
    driver_seen_at: float | None = None
    observed: Observation | None = None
    starts_at: float = 0.0

    @property
    def label(self) -> str:
        """The name of the round that runs, or comes next."""
        return f"round {self.number}"

    @property
    def number(self) -> int:
        """The number of the round that runs, or comes next."""
        return self.round.number if self.round else self.committed + 1

    @property
    def policy(self) -> RoundPolicy:
        """The policy of that round."""
        return self.task.settings.in_round(self.number).policy.among(self.observed.members if self.observed else None)


@dataclass(frozen=True, slots=True)
class Progress:
    """Why a task is where it is, in a word and in a sentence. stalled: it should go on and does not."""

    task: str
    reason: Reason
    sentence: str
    stalled: bool


Explanation: TypeAlias = tuple[Reason, str]


def explain(status: TaskStatus, now: float) -> Progress:
    """Why a task is where it is at `now`, in seconds since 1970."""
    reason, sentence = _explain(status, now)
    return Progress(status.task.id, reason, sentence, reason.stalled)


def _explain(status: TaskStatus, now: float) -> Explanation:
    if status.task.state.ended:
        return _ended(status)
    if status.task.state is TaskState.PAUSED and status.round is None:
        return _paused(status)
    undriven = _undriven(status, now)
    if undriven is not None:
        return undriven
    if now < status.starts_at:
        left = _format_duration(status.starts_at - now)
        return Reason.SCHEDULED, f"starts at {status.task.settings.starts_at}, in {left}"
    if status.observed is None:
        return Reason.STARTING, "the coordinator takes the task up"
    if status.round is not None and status.round.state is not RoundState.SELECTING:
        reason, sentence = _running(status, status.round, status.observed, now)
    else:
        reason, sentence = _selecting(status, status.observed, now)
    return reason, sentence if status.task.state is TaskState.ACTIVE else f"{sentence}; paused: no round follows it"


def _ended(status: TaskStatus) -> Explanation:
    task = status.task
    committed = f"{status.committed} of {task.settings.rounds} rounds are committed"
    if task.state is TaskState.COMPLETED and task.reason:
        return Reason.PRIVACY_BUDGET_SPENT, f"{committed}: {task.reason}"
    if task.state is TaskState.COMPLETED:
        return Reason.COMPLETED, committed
    return Reason.CANCELLED, "; ".join(filter(None, ["cancelled", task.reason, committed]))


def _paused(status: TaskStatus) -> Explanation:
    if status.task.reason.startswith(DIVERGED):
        return Reason.DIVERGED, f"paused: {status.task.reason}"
    if status.task.reason:
        return Reason.PAUSED_AFTER_FAILURES, f"paused: {status.task.reason}"
    committed = f"{status.committed} of {status.task.settings.rounds} rounds are committed"
    return Reason.PAUSED, f"paused by an operator; {committed}"


def _undriven(status: TaskStatus, now: float) -> Explanation | None:
    population = status.task.settings.population
    if status.driver_seen_at is None:
        words = f"no coordinator drives population {population} yet: one that runs takes it up in seconds"
        return Reason.NO_DRIVER, words
    silent_s = now - status.driver_seen_at
    if silent_s > DRIVER_SILENT_S:
        last = f"last heard of {_format_duration(silent_s)} ago"
        return Reason.DRIVER_SILENT, f"the coordinator that drives population {population} was {last}"
    return None


def _running(status: TaskStatus, round_: LiveRound, seen: Observation, now: float) -> Explanation:
    policy, entered_s = status.policy, now - round_.entered_at
    if round_.state is not RoundState.REPORTING:
        return _aggregating(status, round_, entered_s)
    if policy.buffered:
        return _buffering(status, round_, seen, now)
    if seen.phase == UNMASKING:
        words = f"{status.label}: the masks are taken off the sum of {_counted(seen.answered, 'report')}"
        return Reason.AGGREGATING, words
    left_s = policy.reporting_deadline_s - entered_s
    if left_s < -GRACE_S:
        words = (
            f"{status.label} should have ended {_format_duration(-left_s)} ago and the coordinator could not write it"
        )
        return Reason.CANNOT_WRITE, f"{words}; its log says why"
    state = f"{round_.reported} of {policy.goal} reports"
    if seen.phase:
        state = f"{seen.answered} of {seen.asked} devices {_PHASES[seen.phase]}"
    state = f"{state}, {_format_duration(max(0.0, left_s))} left"
    lost = [f"{_devices(round_.lost)} lost"] if round_.lost else []
    if seen.silent_since is None or _without_silent(round_, seen) >= _wanted(policy, seen):
        return Reason.REPORTING, "; ".join([f"{status.label}: {state}", *lost, *_obstacles(seen)])
    unheard = f"{_devices(seen.silent)} not heard of for {_format_duration(now - seen.silent_since)}"
    return Reason.DEVICES_SILENT, "; ".join([f"{status.label} waits for {unheard}: {state}", *lost, *_obstacles(seen)])


def _buffering(status: TaskStatus, round_: LiveRound, seen: Observation, now: float) -> Explanation:
    policy = status.policy
    state = f"{status.label}: {round_.reported} of {policy.goal} reports in the buffer"
    since = max(round_.entered_at, seen.since, seen.accepted_at or 0.0)
    if round_.at_work == 0 and not seen.eligible and now - since > GRACE_S:
        return _nobody(f"{state}, and no device is at work", seen, now)
    work = f"{state}, {round_.at_work} of {_devices(policy.concurrency)} at work"
    return Reason.REPORTING, "; ".join([work, *_obstacles(seen)])


def _without_silent(round_: LiveRound, seen: Observation) -> int:
    """Reports that the round can have without the devices that are silent."""
    return (seen.asked if seen.phase else round_.assigned - round_.aborted - round_.lost) - seen.silent


def _wanted(policy: RoundPolicy, seen: Observation) -> int:
    """Reports without which the round goes on waiting: phases that follow the training end by themselves."""
    return policy.goal if seen.phase in ("", "advertising") else policy.minimum


def _aggregating(status: TaskStatus, round_: LiveRound, entered_s: float) -> Explanation:
    if entered_s <= GRACE_S:
        return Reason.AGGREGATING, f"{status.label}: the next model is made of {_counted(round_.reported, 'report')}"
    duration = _format_duration(entered_s)
    words = f"{status.label} has {_counted(round_.reported, 'report')}, and for {duration} its model could not"
    return Reason.CANNOT_WRITE, f"{words} be written; the coordinator's log says why"


def _selecting(status: TaskStatus, seen: Observation, now: float) -> Explanation:
    if seen.begins_at is not None and seen.begins_at > now:
        why = f", the last with {status.last.reason}" if status.last and status.last.reason else ""
        words = f"{status.label} begins in {_format_duration(seen.begins_at - now)}, because attempts at it failed{why}"
        return Reason.BACK_OFF, words
    policy = status.policy
    left_s = None if status.round is None else status.round.entered_at + policy.selection_timeout_s - now
    if left_s is not None and left_s < -GRACE_S:
        words = f"{status.label} should have drawn its devices {_format_duration(-left_s)} ago"
        return Reason.CANNOT_WRITE, f"{words} and the coordinator could not write it; its log says why"
    left = "" if left_s is None else f", {_format_duration(max(0.0, left_s))} left"
    if _is_expected(status, seen, now):
        asked = "" if policy.buffered else f" of {_devices(policy.cohort)}"
        words = f"{status.label}: {seen.eligible}{asked} {_wait(seen.eligible)}{left}"
        return Reason.SELECTING, "; ".join([words, *_obstacles(seen)])
    needs = f"{status.label} needs {_devices(policy.cohort)}, {policy.minimum} at least"
    if policy.buffered:
        needs = f"{status.label} takes whoever comes"
    if seen.eligible:
        words = f"{needs}: {seen.eligible} {_wait(seen.eligible)}{left}; the attempt before had too few"
        return Reason.TOO_FEW_DEVICES, "; ".join([words, *_obstacles(seen)])
    return _nobody(needs, seen, now)


def _nobody(needs: str, seen: Observation, now: float) -> Explanation:
    """Why no eligible device waits."""
    if seen.ineligible or seen.rejected:
        return Reason.NONE_ELIGIBLE, "; ".join([f"{needs}, and none that is eligible waits", *_obstacles(seen)])
    last_at = seen.since if seen.accepted_at is None else seen.accepted_at
    reason = Reason.WAITING if now - last_at <= seen.quiet_s else Reason.NO_DEVICES
    if seen.accepted_at is None:
        since = f"since the coordinator took the task up {_format_duration(now - seen.since)} ago"
        return reason, f"{needs}: no check-in was accepted {since}"
    last = f"the last check-in that was accepted came {_format_duration(now - seen.accepted_at)} ago"
    return reason, f"{needs}: none waits, {last}"


def _is_expected(status: TaskStatus, seen: Observation, now: float) -> bool:
    """Whether it is too early to wonder that no cohort has been drawn."""
    if status.last is not None and status.last.reason == "too-few-devices":
        return False
    if status.round is not None or seen.eligible:
        return True
    return now - max(seen.since, status.last.ended_at if status.last else 0.0) <= GRACE_S


def _obstacles(seen: Observation) -> list[str]:
    waiting, rejected = sum(seen.ineligible.values()), sum(seen.rejected.values())
    sentences = []
    if waiting:
        are = "is" if waiting == 1 else "are"
        sentences.append(f"{waiting} {_wait(waiting)} and {are} not eligible: {_listed(seen.ineligible)}")
    if rejected:
        were = "was" if rejected == 1 else "were"
        sentences.append(f"{_counted(rejected, 'check-in')} {were} rejected lately: {_listed(seen.rejected)}")
    return sentences


def _listed(counts: Mapping[str, int]) -> str:
    most_first = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{count} {OBSTACLES[name]}" for name, count in most_first)


def _devices(count: int) -> str:
    return _counted(count, "device")


def _counted(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count} {what}s"


def _wait(count: int) -> str:
    return "waits" if count == 1 else "wait"


def _format_duration(seconds: float) -> str:
    if seconds < _WATCHED_S:
        return f"{seconds:.0f} s"
    unit, length = next(pair for pair in _UNITS if seconds >= 2 * pair[1])
    return f"{seconds / length:.0f} {unit}"
