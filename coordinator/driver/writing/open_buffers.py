"""Buffers of tasks that other replicas drive: which one a report goes into. Spec: docs/spec/rounds.md §5."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from coordinator.rules.entities import AssignmentRecord
from coordinator.rules.shared_sums import SharedRound
from coordinator.store.records.records import Records


@dataclass(frozen=True, slots=True)
class OpenBuffers:
    """The buffers that are open, as one transaction finds them."""

    records: Records
    _found: dict[str, tuple[int, int] | None] = field(default_factory=dict)

    def of(self, shared: SharedRound, record: AssignmentRecord) -> tuple[SharedRound, int] | None:
        """The round whose buffer takes the report of an assignment, and the report's staleness; None while none does.

        shared: the round that drew the device. The assignment must be held by this transaction: a driver that closes
        its buffer takes hold of all open assignments. So the buffer that is found here takes this report.
        """
        if record.task not in self._found:
            self._found[record.task] = self.records.attempts.reporting(record.task)
        found = self._found[record.task]
        return None if found is None else (replace(shared, id=found[0]), found[1] - record.number)
