"""State machine of a buffered round: pure functions on the values of rounds.py. Spec: docs/spec/rounds.md §10.

    REPORTING ─▶ AGGREGATING ─▶ COMMITTED
        └─────────────┴──────▶ ABANDONED(reason)

Devices come and report at their own speed (Nguyen et al. 2022, FedBuff). A buffered round is the time between two
versions of the model: it draws whoever comes, counts reports of its own assignments and of those that rounds before it
left open, and ends at its goal. Assignments that are open then go on in the next round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from coordinator.errors import NoLongerNeeded, TooStale, UnexpectedEvent
from coordinator.rules import rounds
from coordinator.rules.states import AssignmentState, RoundState

_OPEN = (RoundState.REPORTING, RoundState.AGGREGATING)


def open_buffer(policy: rounds.RoundPolicy, taken_over: int = 0) -> rounds.Round:
    """A buffered round that collects from now on, including the reports of `taken_over` assignments that are open."""
    return rounds.Round(policy, deadline=math.inf, state=RoundState.REPORTING, taken_over=taken_over)


def places(round_: rounds.Round) -> int:
    """How many more devices may be at work."""
    return max(0, round_.policy.concurrency - round_.outstanding) if round_.state is RoundState.REPORTING else 0


def step(round_: rounds.Round, event: rounds.Event) -> rounds.Stepped:  # noqa: C901, PLR0911 - one return per row of the table
    """The round after `event`, and what the caller must do about it: `rounds.step` for a buffered round.

    No row depends on the time: every assignment has a deadline of its own. Raises UnexpectedEvent for an event that the
    state cannot take: a report beyond the goal, say, which the caller must keep for the next round.
    """
    match round_.state, event:
        case _, rounds.Tick():
            return round_, ()
        case _, rounds.Abandon(reason, None):
            return _abandon(round_, reason)
        case state, rounds.Abandon(reason, int(handed_on)) if state in _OPEN and handed_on <= round_.outstanding:
            # Whoever does not go on has reported to a replica that did not tell of it.
            reported = round_.reported + round_.outstanding - handed_on
            ended = replace(round_, state=RoundState.ABANDONED, reason=reason)
            return replace(ended, reported=reported, handed_on=handed_on), ()
        case RoundState.REPORTING, rounds.Waiting(eligible):
            count = min(eligible, places(round_))
            return round_, (rounds.Select(count),) if count else ()
        case RoundState.REPORTING, rounds.Configured(assigned) if 1 <= assigned <= places(round_):
            return replace(round_, assigned=round_.assigned + assigned), ()
        case RoundState.REPORTING, rounds.Reported(staleness) if round_.outstanding > 0:
            return _collect(_count(round_, (staleness,)))
        case state, rounds.ReportsElsewhere(staleness) if state in _OPEN and len(staleness) <= round_.outstanding:
            return _collect(_count(round_, staleness))
        case state, rounds.Aborted(again) if state in _OPEN and round_.outstanding > 0:
            return _collect(replace(round_, aborted=round_.aborted + 1, failed=round_.failed + (not again)))
        case state, rounds.Lost(devices, _, again) if state in _OPEN and devices <= round_.outstanding:
            vanished = round_.vanished + devices - again
            return _collect(replace(round_, lost=round_.lost + devices, vanished=vanished))
        case state, rounds.Expired(devices, again) if state in _OPEN and devices <= round_.outstanding:
            failed = round_.failed + devices - again
            return _collect(replace(round_, expired=round_.expired + devices, failed=failed))
        case RoundState.AGGREGATING, rounds.Aggregated(stale, handed_on) if stale + handed_on <= round_.outstanding:
            return replace(round_, state=RoundState.COMMITTED, stale=stale, handed_on=handed_on), ()
    raise UnexpectedEvent(f"a buffered round that is {round_.state} cannot take {event}")


def _count(round_: rounds.Round, staleness: Sequence[int]) -> rounds.Round:
    counts = [*round_.staleness, *[0] * (max(staleness) + 1 - len(round_.staleness))]
    for one in staleness:
        counts[one] += 1
    return replace(round_, reported=round_.reported + len(staleness), proven=True, staleness=tuple(counts))


def _collect(round_: rounds.Round) -> rounds.Stepped:
    if round_.state is RoundState.AGGREGATING:
        return round_, ()
    if round_.reported >= round_.policy.goal:
        return replace(round_, state=RoundState.AGGREGATING), ()
    # A plan that no device can run must not go through a whole population. Vanished devices say nothing about a plan
    # that another one could run. A device counts once, so that none can end a round alone.
    failed = round_.failed + (0 if round_.proven else round_.vanished)
    if failed >= max(round_.policy.concurrency, round_.policy.goal):
        return _abandon(round_, "too-few-reports")
    return round_, ()


def _abandon(round_: rounds.Round, reason: str) -> rounds.Stepped:
    if round_.state.ended:
        return round_, ()
    ended = replace(round_, state=RoundState.ABANDONED, reason=reason)
    return ended, (rounds.EndAssignments(AssignmentState.NOT_NEEDED),)


def staleness_weight(staleness: int) -> float:
    """The factor on a report that starts from a model s versions old: (1 + s)^−½."""
    return float((1 + staleness) ** -0.5)


def discount(counts: Sequence[int]) -> float:
    """The mean staleness weight of the reports with these counts by staleness, from 0; 1 without any."""
    total = sum(counts)
    return sum(count * staleness_weight(s) for s, count in enumerate(counts)) / total if total else 1.0


def mean_staleness(counts: Sequence[int]) -> float:
    """The mean staleness of the reports with these counts; 0 without any."""
    return sum(s * count for s, count in enumerate(counts)) / max(1, sum(counts))


def drawn_in(number: int, max_staleness: int) -> range:
    """The rounds whose assignments may report to round `number`, by number. Without buffers, only the round itself."""
    return range(max(1, number - max_staleness), number + 1)


def refusal(state: AssignmentState) -> NoLongerNeeded:
    """The refusal of a report for an assignment in this state."""
    if state is AssignmentState.TOO_STALE:
        return TooStale("more versions of the model came since this assignment's than the task allows; check in again")
    return NoLongerNeeded(f"the assignment is {state} and its round needs no report of it")
