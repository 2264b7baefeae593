"""Effects of a transaction: the changes that memory takes over once it is committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coordinator.driver.memory.open_rounds import OpenRound
from coordinator.driver.memory.sessions import Session
from coordinator.rules.rounds import Round
from coordinator.rules.shared_sums import Counted, SharedRound
from coordinator.rules.states import AssignmentState
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
