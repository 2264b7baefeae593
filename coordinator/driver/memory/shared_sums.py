"""Sums of the reports that came here, of rounds that other replicas drive. Spec: docs/spec/rounds.md §5.

Only in memory: they go to the driver of their round over the replicas' channel, and never into the database. The
driver's thread adds to them; any thread may read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.aggregation import ReportSum
from coordinator.rules.leases import maker_of
from coordinator.rules.shared_sums import Counted, Share, SharedRound, Shares
from coordinator.rules.states import RoundState


@dataclass(slots=True)
class SharedSum:
    """The sum of the reports of a round that came here, and which they are.

    closed: nothing is added any more. told: how many the driver has heard of; handed: whether it has the sum.
    """

    driver: str
    reports: ReportSum
    counted: list[Counted] = field(default_factory=list)
    closed: bool = False
    told: int = 0
    handed: bool = False


class SharedSums:
    """The sums of this replica, by the row id of their round, and the uploads that are on their way."""

    def __init__(self) -> None:
        self._sums: dict[int, SharedSum] = {}
        self._present: Counter[tuple[str, int]] = Counter()
        self.leaving = False
        """Set when the process is about to stop: it hands over what it has, and takes no more."""

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._sums))

    def takes(self, round_id: int) -> bool:
        """Whether reports of a round came here, and more may."""
        found = self._sums.get(round_id)
        return found is not None and not found.closed

    def closed(self, round_id: int) -> bool:
        """Whether the sum of a round is being handed over, so that no other report may be taken."""
        return self.leaving or (round_id in self._sums and not self.takes(round_id))

    @property
    def wait(self) -> bool:
        """Whether there are sums that drivers do not have."""
        return bool(self._unhanded())

    @property
    def closing(self) -> set[str]:
        """The drivers that can have sums now, and do not have them."""
        return {one.driver for one in self._unhanded().values() if one.closed}

    def add(self, round_: SharedRound, counted: list[Counted], vectors: list[NDArray[np.floating[Any]]]) -> None:
        """Add reports (L,) whose receipts are committed, and which they are."""
        mine = self._sums.get(round_.id)
        if mine is None:
            mine = self._sums[round_.id] = SharedSum(maker_of(counted[0].assignment), ReportSum(round_.layout.size))
        mine.reports.add(*vectors)
        mine.counted += counted

    def follow(self, states: Mapping[int, RoundState]) -> None:
        """Take note of how far the rounds are, by the store: one that takes no more reports, or has ended."""
        for round_id in self:
            state = states.get(round_id)
            if state is None or state.ended:
                del self._sums[round_id]
            elif state is not RoundState.REPORTING or self.leaving:
                self._sums[round_id].closed = True

    @contextmanager
    def expecting(self, assignment: str, round_id: int) -> Iterator[None]:
        """While a report of a round is on its way here, its driver is told that the device is there."""
        one = assignment, round_id
        self._present[one] += 1
        try:
            yield
        finally:
            self._present[one] -= 1
            if not self._present[one]:
                del self._present[one]

    def awaits(self) -> frozenset[str]:
        """The assignments whose reports are on their way here, of rounds that take them."""
        return frozenset(assignment for assignment, round_id in self._present if self.takes(round_id))

    @property
    def drivers(self) -> set[str]:
        """The drivers that are told of reports: those of uploads that are on their way, or of sums they do not have."""
        return {maker_of(one) for one, _ in self._present} | {one.driver for one in self._unhanded().values()}

    def news(self, replica: str, driver: str) -> tuple[Shares, list[NDArray[np.float64]]]:
        """What a driver has not been told yet: a message of this `replica`, and the sums (L,) that go with it."""
        mine = [(one, _share(id_, one)) for id_, one in self._unhanded().items() if one.driver == driver]
        due = [(one, share) for one, share in mine if share.counted or share.size]
        here = [assignment for assignment, _ in self._present if maker_of(assignment) == driver]
        message = Shares(replica=replica, present=here, shares=[share for _, share in due])
        return message, [one.reports.total() for one, share in due if share.size]

    def heard(self, message: Shares) -> None:
        """The driver has a message of `news`."""
        for share in message.shares:
            mine = self._sums.get(share.round)
            if mine is not None:
                mine.told = share.before + len(share.counted)
                mine.handed |= share.size > 0

    def _unhanded(self) -> dict[int, SharedSum]:
        return {id_: one for id_, one in tuple(self._sums.items()) if not one.handed}


def _share(round_id: int, mine: SharedSum) -> Share:
    size = mine.reports.total_L.size if mine.closed else 0  # read first: what is closed does not grow
    return Share(round=round_id, before=mine.told, counted=mine.counted[mine.told :], size=size)
