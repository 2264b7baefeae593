"""Effects of a transaction on memory, and the reports that it counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coordinator.commands import CountReport
from coordinator.driver.memory.open_rounds import OpenRound
from coordinator.driver.memory.sessions import Session
from coordinator.rules.aggregation import bounded_report
from coordinator.rules.buffers import staleness_weight
from coordinator.rules.entities import AssignmentRecord
from coordinator.rules.replicas import Counted, SharedRound
from coordinator.rules.rounds import Round
from coordinator.rules.states import AssignmentState
from coordinator.store.records.records import Records
from fedcore.wire.messages import Assignment


@dataclass(frozen=True, slots=True)
class RoundMoved:
    """A round went from `before` to `after`. Several reports of one turn may be one such effect."""

    before: OpenRound
    after: Round


@dataclass(frozen=True, slots=True)
class ReportsCounted:
    """Reports (L,), or the sum of many, that belong into the sum of a round."""

    round: OpenRound
    vectors: list[NDArray[np.floating[Any]]]


@dataclass(frozen=True, slots=True)
class SharedReportsCounted:
    """Reports (L,) that belong into the sum of a round of another replica, and which they are."""

    round: SharedRound
    counted: list[Counted]
    vectors: list[NDArray[np.floating[Any]]]


@dataclass(frozen=True, slots=True)
class SumHandedOver:
    """The sum (L,) of all `count` reports of a round that came to another replica."""

    round: OpenRound
    replica: str
    count: int
    total: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AssignmentEnded:
    """An assignment that ended before its round did, or apart from it. reason: of the device, when it gave up."""

    assignment: str
    device: str
    population: str
    task: str
    state: AssignmentState
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DevicesDrawn:
    """Sessions that were given an assignment each, until when on the driver's clock. round: as it is after the draw."""

    round: OpenRound
    assignments: Sequence[tuple[Session, Assignment]]
    until: float


@dataclass(frozen=True, slots=True)
class DevicesTurnedAway:
    """Sessions for which a round has no assignment. Another round may have drawn some of them since."""

    sessions: Sequence[Session]


Effect: TypeAlias = (
    RoundMoved
    | ReportsCounted
    | SharedReportsCounted
    | SumHandedOver
    | AssignmentEnded
    | DevicesDrawn
    | DevicesTurnedAway
)


class Deferred(Enum):
    """An answer that is still to come: the next transaction will have it."""

    DEFERRED = "deferred"


DEFERRED = Deferred.DEFERRED


class CountedReports:
    """Reports that are counted and not written yet, and the rounds as they were before."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._digests: dict[str, tuple[int, str]] = {}
        """By assignment: the round's row id, and the digest."""
        self._here: dict[int, ReportsCounted] = {}
        self._shared: dict[int, SharedReportsCounted] = {}
        self._before: dict[int, OpenRound] = {}

    def add(self, round_: OpenRound, record: AssignmentRecord, command: CountReport) -> int:
        """Count a report to a round that this process drives, within its bounds; answers its staleness."""
        self._digests[record.id] = round_.id, command.sha256
        bounded = bounded_report(round_.task.settings.clear, command.vector, round_.plan.report, round_.codec_key)
        staleness = round_.number - record.number
        self._here.setdefault(round_.id, ReportsCounted(round_, [])).vectors.append(_weighed(bounded, staleness))
        return staleness

    def add_shared(
        self, shared: SharedRound, record: AssignmentRecord, command: CountReport, staleness: int = 0
    ) -> None:
        """Count a report to a round that another replica drives."""
        self._digests[record.id] = shared.id, command.sha256
        effect = self._shared.setdefault(shared.id, SharedReportsCounted(shared, [], []))
        bounded = bounded_report(shared.clear, command.vector, shared.layout, shared.codec_key)
        effect.counted.append(Counted(record.id, record.device, staleness))
        effect.vectors.append(_weighed(bounded, staleness))

    def move(self, before: OpenRound) -> None:
        """A report moves a round, which is as it was before its first one in this turn."""
        self._before.setdefault(before.id, before)

    def write(self, rounds: Iterable[OpenRound]) -> list[Effect]:
        """Write them, and how many these rounds have; answers what memory must take over."""
        self._records.add_reports(self._digests)
        effects: list[Effect] = []
        for after in rounds:
            if (before := self._before.get(after.id)) is not None:
                self._records.move_round(after.id, before.value, after.value, "reported")
                effects.append(RoundMoved(before, after.value))
        effects += [*self._here.values(), *self._shared.values()]
        self._digests, self._here, self._shared, self._before = {}, {}, {}, {}
        return effects


def _weighed(report_L: NDArray[np.floating[Any]], staleness: int) -> NDArray[np.floating[Any]]:
    """A report as it counts from a model that is so many versions old."""
    return staleness_weight(staleness) * report_L.astype(np.float64) if staleness else report_L
