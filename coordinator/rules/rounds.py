"""The state machine of a round: a pure function on frozen values.

Spec: docs/spec/rounds.md. A round:

    SELECTING ─▶ CONFIGURING ─▶ REPORTING ─▶ AGGREGATING ─▶ COMMITTED
        └─────────────┴─────────────┴──────────────┴──────▶ ABANDONED(reason)

A round keeps counts, never its cohort, so a step costs the same for ten devices and for ten million.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from coordinator.errors import UnexpectedEvent
from coordinator.rules.states import AssignmentState, RoundState

FAILURES = frozenset({"too-few-reports", "no-beacon", "secagg-failed", "sum-out-of-range", "invalid-aggregate"})
"""Reasons to abandon a round for which devices or the plan are to blame: another attempt may well end the same way."""
HELD_UP = frozenset({"too-few-reports", "devices-lost", "aborted", "lost", "tick"})
"""Causes of an end of REPORTING by devices that brought no report, whatever became of the round."""
_FIRST_BACK_OFF_S, _LONGEST_BACK_OFF_S = 15.0, 900.0
REPLACING_S = 3.0
"""How long a round that lost too many devices waits for replacements before it is tried again as a whole."""


class RoundPolicy(msgspec.Struct, frozen=True):
    """When a round starts, ends and counts. Checked by `TaskSettings`.

    members: how many devices the round may draw from, as the second trip of the same cohort; None when from all.
    concurrency: devices at work at once in a buffered round (buffers.py); 0 for a round that draws a cohort.
    """

    goal: int
    minimum: int
    over_selection: float
    selection_timeout_s: float
    reporting_deadline_s: float
    members: int | None = None
    concurrency: int = 0

    def among(self, members: int | None) -> RoundPolicy:
        """The policy of a round that draws all of `members` devices, if they come; the same policy for None."""
        return self if members is None else replace(self, members=members, goal=min(self.goal, members))

    @property
    def buffered(self) -> bool:
        """Whether devices come and report at their own speed."""
        return self.concurrency > 0

    @property
    def cohort(self) -> int:
        """Devices that have an assignment at once: enough for `goal` reports although some drop out."""
        if self.members is not None:
            return self.members
        if self.buffered:
            return self.concurrency
        # Rounded first: 100 × 1.1 is a hair above 110 in binary, and must not select 111.
        return math.ceil(round(self.goal * self.over_selection, 6))


class Round(msgspec.Struct, frozen=True):
    """A round's whole state. `deadline` ends SELECTING or REPORTING, on the clock that `step` is given.

    held: it collects devices, but may not draw them yet: the checkpoint that it starts from is not committed, or failed
    attempts before it ask for a pause. A deadline does not end SELECTING as long as that is so.
    lost: lost devices; replaced: how many were drawn in their place. expired: devices that the deadline cut off.
    failed, vanished: devices that gave up or were late, and that were lost, without those that failed before. proven: a
    device has carried the plan out. short_until: how long a round that cannot come to its minimum now waits for others.

    Of a buffered round alone: taken_over, handed_on: open assignments that it took over from the round before, and
    handed on to the next one. stale: assignments that ended because too many versions came after theirs. staleness:
    counts of its reports by staleness, from 0.
    """

    policy: RoundPolicy
    deadline: float
    held: bool = False
    state: RoundState = RoundState.SELECTING
    reason: str = ""
    assigned: int = 0
    reported: int = 0
    aborted: int = 0
    lost: int = 0
    expired: int = 0
    replaced: int = 0
    failed: int = 0
    vanished: int = 0
    proven: bool = False
    short_until: float = math.inf
    taken_over: int = 0
    handed_on: int = 0
    stale: int = 0
    staleness: tuple[int, ...] = ()

    @property
    def outstanding(self) -> int:
        """Devices that could still report; after the round's reporting, those that it did not need."""
        begun = self.taken_over + self.assigned
        return begun - self.reported - self.aborted - self.lost - self.expired - self.stale - self.handed_on

    @property
    def closed(self) -> bool:
        """Whether its devices cannot report any more. Those of a buffered round can as long as it has not ended."""
        return self.state.ended or (self.state is RoundState.AGGREGATING and not self.policy.buffered)

    @property
    def revealed(self) -> bool:
        """Whether devices have done their part, and the sum of a secure aggregation is being made."""
        return self.state is RoundState.REPORTING and self.deadline == math.inf and not self.policy.buffered

    @property
    def attainable(self) -> int:
        """Reports that it may still come to."""
        return self.reported + self.outstanding

    @property
    def timed_out(self) -> bool:
        """Whether a deadline cut off all who could still report."""
        return self.expired > 0 and not self.outstanding

    @property
    def excused(self) -> bool:
        """Whether it fell short of its minimum only by devices that vanished, or failed before: not by the plan.

        Not if all gave up or were late.
        """
        return self.assigned - self.failed >= self.policy.minimum and self.aborted + self.expired < self.assigned

    @property
    def unclear(self) -> bool:
        """Whether only further devices show if the plan can be run, as some of those that failed did so before."""
        again = self.aborted + self.lost + self.expired > self.failed + self.vanished
        return again and self.excused and not self.proven and self.outstanding > 0

    def missing(self, now: float) -> int:
        """Devices to draw in place of lost ones: what the goal lacks, while half of the time to report is left.

        Devices that gave up are not replaced, and no more than a cohort is: a plan that no device can run must not go
        through a whole population.
        """
        policy = self.policy
        if self.state is not RoundState.REPORTING or self.deadline - now < policy.reporting_deadline_s / 2:
            return 0
        return max(0, min(policy.goal - self.attainable, min(self.lost, policy.cohort) - self.replaced))


@dataclass(frozen=True, slots=True)
class Waiting:
    """The number of eligible devices that wait: the Tick of a round that draws devices. held: whether it is held."""

    eligible: int
    held: bool = False


@dataclass(frozen=True, slots=True)
class Configured:
    """The number of devices that were given an assignment."""

    assigned: int


@dataclass(frozen=True, slots=True)
class Reported:
    """One assignment's report was taken. staleness: versions that were committed since the one that it starts from."""

    staleness: int = 0


@dataclass(frozen=True, slots=True)
class ReportsElsewhere:
    """Another replica took reports of the round's devices. It may be heard when the round takes none any more.

    staleness: of each report, as that of `Reported`.
    """

    staleness: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Revealed:
    """The devices of a secure aggregation have done their part: its sum is being made, and no deadline ends that."""


@dataclass(frozen=True, slots=True)
class Summed:
    """A secure aggregation came out over `devices`: all reports of the round at once; 0 where too few were left.

    proven: as of `Lost`.
    """

    devices: int
    proven: bool = True


@dataclass(frozen=True, slots=True)
class Aborted:
    """One device gave up. again: whether it failed before, in a buffered round in this very one."""

    again: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The number of lost devices. proven: devices of a secure aggregation have shown that the plan can be run.

    again: how many of them failed before, as of `Aborted`.
    """

    devices: int
    proven: bool = False
    again: int = 0


@dataclass(frozen=True, slots=True)
class Expired:
    """The deadlines of `devices` assignments passed: in a buffered round, or in the phases of a secure aggregation.

    again: how many of them failed before, in a buffered round in this very one.
    """

    devices: int
    again: int = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed, and the round draws no devices. again: at its deadline, how many that are late failed before."""

    again: int = 0


@dataclass(frozen=True, slots=True)
class Aggregated:
    """The next checkpoint is durable. stale, handed_on: a buffered round's assignments that are too stale, or go on."""

    stale: int = 0
    handed_on: int = 0


@dataclass(frozen=True, slots=True)
class Abandon:
    """Give the round up, from any state. handed_on: as of `Aggregated`, if the devices of a buffered round go on."""

    reason: str
    handed_on: int | None = None


Event: TypeAlias = (
    Waiting
    | Configured
    | Reported
    | ReportsElsewhere
    | Revealed
    | Summed
    | Aborted
    | Lost
    | Expired
    | Tick
    | Aggregated
    | Abandon
)


@dataclass(frozen=True, slots=True)
class Release:
    """The round is held no longer: number it, and give it the checkpoint that was committed last. Before the rest."""


@dataclass(frozen=True, slots=True)
class Select:
    """Draw `count` of the waiting devices, assign them, then step with `Configured`."""

    count: int


@dataclass(frozen=True, slots=True)
class TurnAway:
    """Tell the waiting devices to come back later."""


@dataclass(frozen=True, slots=True)
class EndAssignments:
    """End the assignments without a report: their devices are no longer needed, or were cut off by the deadline."""

    state: AssignmentState


@dataclass(frozen=True, slots=True)
class BeginPairAgain:
    """Go back to the model before the first trip: too few devices of its cohort came back for the second."""


Effect: TypeAlias = Release | Select | TurnAway | EndAssignments | BeginPairAgain
Stepped: TypeAlias = tuple[Round, tuple[Effect, ...]]


def back_off_s(failures: int) -> float:
    """How long a task pauses after failed attempts in a row: not at all after one, then twice as long each time."""
    return 0.0 if failures < 2 else min(_FIRST_BACK_OFF_S * 2.0 ** min(failures - 2, 32), _LONGEST_BACK_OFF_S)


def open_round(policy: RoundPolicy, now: float, *, held: bool = False) -> Round:
    """A round that starts selecting now."""
    return Round(policy, deadline=now + policy.selection_timeout_s, held=held)


def step(round_: Round, event: Event, now: float) -> Stepped:  # noqa: C901, PLR0911, PLR0912 - one return per row of the table
    """The round after `event`, and what the caller must do about it.

    Time and abandonment pass an ended round by. Raises UnexpectedEvent for an event that the state cannot take: a
    report after the deadline, say, which the caller must have refused.
    """
    match round_.state, event:
        case _, Tick() | Abandon() if round_.state.ended:
            return round_, ()
        case _, Abandon(reason):
            return _abandon(round_, reason)
        case RoundState.SELECTING, Waiting(_, held) if round_.held and held:
            return round_, ()
        case RoundState.SELECTING, Waiting(eligible) if round_.held:
            return _release(round_, eligible, now)
        case RoundState.SELECTING, Waiting(eligible):
            return _select(round_, eligible, now)
        case RoundState.CONFIGURING, Configured(assigned) if assigned >= 1:
            deadline = now + round_.policy.reporting_deadline_s
            return _collect(replace(round_, state=RoundState.REPORTING, assigned=assigned, deadline=deadline), now)
        case RoundState.REPORTING, Waiting(eligible):
            return _replace_lost(round_, eligible, now)
        case RoundState.REPORTING, Configured(assigned) if 1 <= assigned <= round_.missing(now):
            assigned, replaced = round_.assigned + assigned, round_.replaced + assigned
            return _collect(replace(round_, assigned=assigned, replaced=replaced, short_until=math.inf), now)
        case RoundState.REPORTING, Reported() if now < round_.deadline and round_.outstanding > 0:
            return _collect(replace(round_, reported=round_.reported + 1, proven=True), now)
        case RoundState.REPORTING, ReportsElsewhere(reports) if len(reports) <= round_.outstanding:
            return _collect(replace(round_, reported=round_.reported + len(reports), proven=True), now)
        case RoundState.AGGREGATING, ReportsElsewhere(reports):
            expired = max(0, round_.expired - len(reports))
            return replace(round_, reported=round_.reported + len(reports), expired=expired), ()
        case RoundState.REPORTING, Revealed():
            return replace(round_, deadline=math.inf), ()
        case RoundState.REPORTING, Summed(devices, proven) if devices <= round_.outstanding:
            return _end_reporting(replace(round_, reported=devices, proven=round_.proven or proven))
        case RoundState.REPORTING, Expired(devices, again) if devices <= round_.outstanding:
            # The aggregation knows whether enough are left.
            expired, failed = round_.expired + devices, round_.failed + devices - again
            return replace(round_, expired=expired, failed=failed), ()
        case RoundState.REPORTING, Aborted(again) if round_.outstanding > 0:
            return _collect(replace(round_, aborted=round_.aborted + 1, failed=round_.failed + (not again)), now)
        case RoundState.REPORTING, Lost(devices, proven, again) if devices <= round_.outstanding:
            lost, vanished = round_.lost + devices, round_.vanished + devices - again
            return _collect(replace(round_, lost=lost, vanished=vanished, proven=round_.proven or proven), now)
        case RoundState.REPORTING, Tick(again):
            return _collect(round_, now, draws=False, again=again)
        case _, Tick():
            return round_, ()
        case RoundState.AGGREGATING, Aggregated():
            return replace(round_, state=RoundState.COMMITTED), ()
    raise UnexpectedEvent(f"a {round_.state} round cannot take {event} at {now} (deadline {round_.deadline})")


def _release(round_: Round, eligible: int, now: float) -> Stepped:
    # Time during which nobody could be drawn is time enough to have waited for a whole cohort, but not for too few.
    short = eligible < round_.policy.minimum
    deadline = max(round_.deadline, now + round_.policy.selection_timeout_s) if short else round_.deadline
    selected, effects = _select(replace(round_, held=False, deadline=deadline), eligible, now)
    return selected, (Release(), *effects)


def _select(round_: Round, eligible: int, now: float) -> Stepped:
    policy = round_.policy
    if eligible < policy.cohort and now < round_.deadline:
        return round_, ()
    if eligible < policy.minimum and policy.members is not None:
        # Devices that wait stay: they may be drawn for the first trip.
        return _abandon(round_, "cohort-gone")[0], (BeginPairAgain(),)
    if eligible < policy.minimum:
        abandoned, effects = _abandon(round_, "too-few-devices")
        return abandoned, (*effects, TurnAway())
    return replace(round_, state=RoundState.CONFIGURING), (Select(min(eligible, policy.cohort)),)


def _replace_lost(round_: Round, eligible: int, now: float) -> Stepped:
    count = min(eligible, round_.missing(now))
    if count > 0 and round_.attainable + count >= round_.policy.minimum:
        return round_, (Select(count),)
    return _collect(round_, now)


def _collect(round_: Round, now: float, *, draws: bool = True, again: int = 0) -> Stepped:
    policy = round_.policy
    if round_.reported >= policy.goal:
        return _end_reporting(round_)
    if now >= round_.deadline:
        late = round_.outstanding
        return _end_reporting(replace(round_, expired=late, failed=round_.failed + late - again))
    if round_.attainable < policy.minimum:
        until = min(round_.short_until, now + REPLACING_S) if draws and round_.missing(now) else now
        if now < until:
            return replace(round_, short_until=until), ()
        return (round_, ()) if round_.unclear else _end_reporting(round_)
    return (round_, ()) if round_.outstanding > 0 else _end_reporting(round_)


def _end_reporting(round_: Round) -> Stepped:
    if round_.reported >= round_.policy.minimum:
        return replace(round_, state=RoundState.AGGREGATING), _end_assignments(round_)
    if round_.proven and round_.excused:
        return _abandon(round_, "devices-lost")
    return _abandon(round_, "too-few-reports")


def _abandon(round_: Round, reason: str) -> Stepped:
    return replace(round_, state=RoundState.ABANDONED, reason=reason), _end_assignments(round_)


def _end_assignments(round_: Round) -> tuple[Effect, ...]:
    if round_.state is not RoundState.REPORTING:
        return ()
    return (EndAssignments(AssignmentState.EXPIRED if round_.timed_out else AssignmentState.NOT_NEEDED),)
