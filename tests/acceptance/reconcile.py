"""Comparison of a coordinator's rows with the journals of its devices and the sessions of the fleet that ran them.

No report may be counted twice, every receipt must be for a counted report, and no session may be missing.
"""

from collections import Counter
from typing import NamedTuple

from coordinator.rules.states import AssignmentState
from device_runtime.state.records import RUNNING, read_journal
from simulator.fleet.fleet import state_folder


class Accounts(NamedTuple):
    """accepted: reports in the coordinator's rows. journalled: sessions in the journals. receipts: reports that devices
    know to be counted. discrepancies: sentences; empty when everything agrees.
    """

    accepted: int
    journalled: int
    receipts: int
    discrepancies: tuple[str, ...]


def reconcile(store, task, folder, summary):
    """Compare the rows of `task`, the only one that the devices served, with the journals under a fleet's `folder`."""
    with store.database.reading() as records:
        attempts = [(row, (task, row.number, row.attempt)) for row in records.rounds(task)]
        seats = [seat for _, which in attempts for seat in records.cohorts.drawn(*which)]
        sums = [(row, records.cohorts.counted(*which)) for row, which in attempts]
    journals = {client: read_journal(state_folder(folder, client)) for client in summary.sessions}
    sessions = {client: [entry for entry in entries if entry.coordinator] for client, entries in journals.items()}
    everything = [entry for entries in sessions.values() for entry in entries]
    return Accounts(
        sum(seat.report_sha256 is not None for seat in seats),
        sum(entry.times for entry in everything),
        sum(bool(entry.receipt) for entry in everything),
        (*in_rows(seats, sums), *in_journals(sessions, summary), *in_receipts(sessions, seats, summary)),
    )


def in_rows(seats, sums):
    """Every sum has as many reports as were accepted for it, and none of a device twice."""
    having = {seat.id for seat in seats if seat.report_sha256 is not None}
    if having != {seat.id for seat in seats if seat.state is AssignmentState.REPORTED}:
        yield "other assignments are reported than have a report"
    for row, accepted in sums:
        place = f"round {row.number}, attempt {row.attempt}"
        if len(accepted) != row.reported:
            yield f"{place}: {row.reported} reports in the sum, {len(accepted)} accepted"
        for name, count in Counter(seat.device for seat in accepted).items():
            if count > 1:
                yield f"{place}: {count} reports of device {name}"


def in_journals(sessions, summary):
    """Every session of the fleet is in its device's journal, and has an end there."""
    for client, entries in sessions.items():
        count = sum(entry.times for entry in entries)
        if count != summary.sessions[client]:
            yield f"{client}: {summary.sessions[client]} sessions, {count} in its journal"
        if any(entry.outcome == RUNNING for entry in entries):
            yield f"{client}: a session without an end"


def in_receipts(sessions, seats, summary):
    """Every receipt is for a report accepted from the same device, and no report has two."""
    accepted = {(seat.id, summary.clients.get(seat.device), seat.report_sha256) for seat in seats}
    claimed = Counter(
        (entry.assignment, client, entry.receipt) for client, entries in sessions.items() for entry in entries
    )
    for (assignment, client, receipt), count in claimed.items():
        if receipt and (count > 1 or (assignment, client, receipt) not in accepted):
            yield f"{client}: {count} receipts for assignment {assignment}, which the coordinator does not bear out"
