"""Comparison of a coordinator's rows with the journals of its devices and the sessions of the fleet that ran them.

No report may be counted twice, every receipt must be for a counted report, and no session may be missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.rules.entities import AssignmentRecord, RoundRecord
from coordinator.rules.states import AssignmentState
from coordinator.store.tasks import CoordinatorStore
from device_runtime.state.journal import RUNNING, Entry, read_journal
from simulator.fleet.fleet import FleetSummary, state_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """The result of a comparison.

    assignments, accepted: rows of the coordinator, and reports among them. sessions: those of the fleet. journalled:
    sessions in the devices' journals; interrupted: killed ones. receipts: reports that devices know to be counted.
    discrepancies: sentences; empty when everything agrees.
    """

    assignments: int
    accepted: int
    sessions: int
    journalled: int
    interrupted: int
    receipts: int
    discrepancies: tuple[str, ...]


def reconcile(store: CoordinatorStore, task: str, folder: Path, summary: FleetSummary) -> Reconciliation:
    """Compare the rows of `task`, the only one that the devices served, with the journals under a fleet's `folder`."""
    with store.database.reading() as records:
        attempts = [(row, (task, row.number, row.attempt)) for row in records.rounds(task)]
        seats = [seat for _, which in attempts for seat in records.cohorts.drawn(*which)]
        sums = [(row, records.cohorts.counted(*which)) for row, which in attempts]
    journals = {client: read_journal(state_folder(folder, client)) for client in summary.sessions}
    sessions = {client: [entry for entry in entries if entry.coordinator] for client, entries in journals.items()}
    everything = [entry for entries in sessions.values() for entry in entries]
    return Reconciliation(
        assignments=len(seats),
        accepted=sum(seat.report_sha256 is not None for seat in seats),
        sessions=summary.sessions.total(),
        journalled=sum(entry.times for entry in everything),
        interrupted=sum(entry.outcome == "interrupted" for entry in everything),
        receipts=sum(bool(entry.receipt) for entry in everything),
        discrepancies=(
            *_in_rows(seats, sums),
            *_in_journals(sessions, summary),
            *_in_receipts(sessions, seats, summary),
        ),
    )


def _in_rows(
    seats: Sequence[AssignmentRecord], sums: Sequence[tuple[RoundRecord, Sequence[AssignmentRecord]]]
) -> list[str]:
    """Check that every sum has as many reports as were accepted for it, and none of a device twice."""
    discrepancies = []
    having = {seat.id for seat in seats if seat.report_sha256 is not None}
    if having != {seat.id for seat in seats if seat.state is AssignmentState.REPORTED}:
        discrepancies.append("other assignments are reported than have a report")
    for row, accepted in sums:
        place = f"round {row.number}, attempt {row.attempt}"
        if len(accepted) != row.reported:
            discrepancies.append(f"{place}: {row.reported} reports in the sum, {len(accepted)} accepted")
        devices = Counter(seat.device for seat in accepted)
        discrepancies += [f"{place}: {count} reports of device {name}" for name, count in devices.items() if count > 1]
    return discrepancies


def _in_journals(sessions: Mapping[str, Sequence[Entry]], summary: FleetSummary) -> list[str]:
    """Check that every session of the fleet is in its device's journal, and has an end there."""
    discrepancies = []
    for client, entries in sessions.items():
        count = sum(entry.times for entry in entries)
        if count != summary.sessions[client]:
            discrepancies.append(f"{client}: {summary.sessions[client]} sessions, {count} in its journal")
        discrepancies += [f"{client}: a session without an end" for entry in entries if entry.outcome == RUNNING]
    return discrepancies


def _in_receipts(
    sessions: Mapping[str, Sequence[Entry]], seats: Sequence[AssignmentRecord], summary: FleetSummary
) -> list[str]:
    """Check that every receipt is for a report accepted from the same device, and no report has two."""
    accepted = {(seat.id, summary.clients.get(seat.device), seat.report_sha256) for seat in seats}
    claimed = Counter(
        (entry.assignment, client, entry.receipt) for client, entries in sessions.items() for entry in entries
    )
    return [
        f"{client}: {count} receipts for assignment {assignment}, which the coordinator does not bear out"
        for (assignment, client, receipt), count in claimed.items()
        if receipt and (count > 1 or (assignment, client, receipt) not in accepted)
    ]
