"""The last assignment in the state folder, and its finished report until the coordinator's receipt has arrived.

A device that was stopped at any point learns here how to continue: do nothing, give the assignment up, or send exactly
the same report again. It never trains twice for one assignment.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from device_runtime.clock import Clock, Moment
from device_runtime.errors import ReportLost, SealBroken
from device_runtime.state.database import StateDatabase, read_json
from device_runtime.state.folder import write_whole
from device_runtime.state.sealing import OVERHEAD_BYTES, Sealer
from fedcore.decoding import decoder
from fedcore.wire.messages import Assignment

SUFFIX = ".report"


class StoredAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """An assignment and its progress.

    assigned: work began. trained: the report is in the file `sha256`: weighted, for the upload, or in a secure round
    unweighted, for masking. masked: `sha256` is of the masked report, which may have left; `secagg` is the sealed state
    of secure aggregation, with secrets of other devices. uploaded: the receipt has arrived, the file is gone. `due` is
    the reporting deadline. `examples`, `collection` and `steps` describe the training of the report; `question` is what
    its plan asked, visible, and `numbers` how many the report has.
    """

    given: Assignment
    due: Moment
    phase: Literal["assigned", "trained", "masked", "uploaded"] = "assigned"
    sha256: str = ""
    collection: str = ""
    examples: int = 0
    steps: int = 0
    question: str | None = None
    numbers: int = 0
    secagg: bytes = b""


_STORED = decoder(StoredAssignment)


class AssignmentStore:
    """The last assignment from one population of one coordinator. Every method raises StateError or KeyUnavailable.

    Reports and the state of secure aggregation are kept sealed.
    """

    def __init__(
        self, database: StateDatabase, folder: Path, sealer: Sealer, coordinator: str, population: str
    ) -> None:
        self._database = database
        self._folder = folder
        self._sealer = sealer
        self._key = coordinator, population
        # The report that this process finished, so that it is neither read nor hashed again.
        self._finished: bytes | None = None

    def get(self) -> StoredAssignment | None:
        """The last assignment, unless it was dropped."""
        query = "SELECT stored FROM assignment WHERE coordinator = ? AND population = ?"
        for (stored,) in self._database.execute(query, *self._key):
            return _decode(stored)
        return None

    def assigned(self, assignment: Assignment, due: Moment) -> StoredAssignment:
        """Store an assignment whose work begins."""
        return self._put(StoredAssignment(given=assignment, due=due))

    def carried_over(self, stored: StoredAssignment, clock: Clock) -> StoredAssignment:
        """The assignment that an earlier process left, with its deadline on the clock of this boot."""
        return self._put(replace(stored, due=stored.due.carried_over(clock)))

    def trained(self, stored: StoredAssignment, report: bytes) -> StoredAssignment:
        """Store the finished report: first in a file, then in the database."""
        sha256 = hashlib.sha256(report).hexdigest()
        write_whole(self._file(sha256), self._sealer.seal(_report_of(stored), report))
        self._finished = report
        return self._put(replace(stored, phase="trained", sha256=sha256))

    def report(self, stored: StoredAssignment) -> bytes:
        """The bytes of a trained report. Raises ReportLost when an earlier process left none, or they were changed."""
        finished, self._finished = self._finished, None
        if finished is not None:
            return finished
        try:
            data = self._sealer.open(_report_of(stored), self._file(stored.sha256).read_bytes())
        except OSError as error:
            raise ReportLost("the kept report is gone", str(error)) from error
        except SealBroken as error:
            raise ReportLost("the kept report is damaged") from error
        if hashlib.sha256(data).hexdigest() != stored.sha256:
            raise ReportLost("the kept report is damaged")
        return data

    def size(self, stored: StoredAssignment) -> int:
        """Bytes of a trained report; 0 when there is none, or it is gone."""
        try:
            return self._file(stored.sha256).stat().st_size - OVERHEAD_BYTES
        except OSError:
            return 0

    def masked(self, stored: StoredAssignment, sha256: str, secagg: bytes) -> StoredAssignment:
        """Store that the report is masked. The unmasked report is no longer needed."""
        return self.stepped(replace(stored, phase="masked", sha256=sha256), secagg)

    def stepped(self, stored: StoredAssignment, secagg: bytes) -> StoredAssignment:
        """Store the state of secure aggregation after a further step, replacing the one before."""
        return self._put(replace(stored, secagg=self._sealer.seal(_state_of(stored), secagg)))

    def state(self, stored: StoredAssignment) -> bytes:
        """The state of secure aggregation. Raises ReportLost when it does not open: the report cannot be counted."""
        try:
            return self._sealer.open(_state_of(stored), stored.secagg)
        except SealBroken as error:
            raise ReportLost("the kept state of a secure aggregation is damaged") from error

    def uploaded(self, stored: StoredAssignment) -> None:
        """Store that the receipt has arrived."""
        self._put(replace(stored, phase="uploaded", secagg=b""))

    def drop(self) -> None:
        """Forget the assignment: it was given up, or its report is no longer needed."""
        self._database.execute("DELETE FROM assignment WHERE coordinator = ? AND population = ?", *self._key)
        self.sweep()

    def sweep(self) -> None:
        """Remove report files that no assignment of this state folder needs; ignore files that cannot be removed."""
        rows = (_decode(stored) for (stored,) in self._database.execute("SELECT stored FROM assignment"))
        needed = {f"{stored.sha256}{SUFFIX}" for stored in rows if stored.phase == "trained"}
        for path in self._folder.glob(f"*{SUFFIX}"):
            if path.name not in needed:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _put(self, stored: StoredAssignment) -> StoredAssignment:
        text = msgspec.json.encode(stored).decode()
        self._database.execute("INSERT OR REPLACE INTO assignment VALUES (?, ?, ?)", *self._key, text)
        return stored

    def _file(self, sha256: str) -> Path:
        return self._folder / f"{sha256}{SUFFIX}"


def _report_of(stored: StoredAssignment) -> str:
    return f"report of assignment {stored.given.assignment}"


def _state_of(stored: StoredAssignment) -> str:
    return f"state of the secure aggregation of assignment {stored.given.assignment}"


def _decode(stored: str) -> StoredAssignment:
    return read_json(_STORED, stored, "an assignment in the state database")
