"""The assignment that a device works on, and its finished report until the coordinator's receipt is in.

A device that is stopped at any point finds here what it may still do: nothing, give the assignment up, or send the very
same report again. It never trains twice for one assignment.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from device_runtime.clock import Clock, Moment
from device_runtime.errors import ReportLost, StateDamaged
from device_runtime.state.database import StateDatabase
from device_runtime.state.folder import write_whole
from fedcore.decoding import decoder
from fedcore.wire.messages import Assignment

SUFFIX = ".report"


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """An assignment and how far it came.

    assigned: work began. trained: the report lies in a file, by `sha256`. masked: `sha256` is of the masked report,
    which may have left; `keep` is what secure aggregation must not lose, secrets of others among it. uploaded: its
    receipt is in, the file is gone. `due` is the reporting deadline; `collection`, `examples` and `steps` are what
    the report was made of.
    """

    given: Assignment
    due: Moment
    phase: Literal["assigned", "trained", "masked", "uploaded"] = "assigned"
    sha256: str = ""
    collection: str = ""
    examples: int = 0
    steps: int = 0
    keep: bytes = b""


_KEPT = decoder(Kept)


class KeptAssignment:
    """The last assignment from one population of one coordinator. Every method raises StateError."""

    def __init__(self, database: StateDatabase, folder: Path, coordinator: str, population: str) -> None:
        self._database = database
        self._folder = folder
        self._key = coordinator, population

    def get(self) -> Kept | None:
        """The last assignment, unless it was dropped."""
        query = "SELECT kept FROM assignment WHERE coordinator = ? AND population = ?"
        for (kept,) in self._database.execute(query, *self._key):
            return _decode(kept)
        return None

    def assigned(self, given: Assignment, due: Moment) -> Kept:
        """Work on an assignment begins."""
        return self._put(Kept(given=given, due=due))

    def carried_over(self, kept: Kept, clock: Clock) -> Kept:
        """What an earlier process left, with its deadline on the clock of this boot."""
        return self._put(replace(kept, due=kept.due.carried_over(clock)))

    def trained(self, kept: Kept, report: bytes) -> Kept:
        """The report is finished: it is in a file before the database names it."""
        sha256 = hashlib.sha256(report).hexdigest()
        write_whole(self._file(sha256), report)
        return self._put(replace(kept, phase="trained", sha256=sha256))

    def report(self, kept: Kept) -> bytes:
        """The bytes of a trained report. Raises ReportLost when they are gone or were changed."""
        try:
            data = self._file(kept.sha256).read_bytes()
        except OSError as error:
            raise ReportLost("the kept report is gone", str(error)) from error
        if hashlib.sha256(data).hexdigest() != kept.sha256:
            raise ReportLost("the kept report is damaged")
        return data

    def size(self, kept: Kept) -> int:
        """Bytes of a trained report; 0 when there is none, or it is gone."""
        try:
            return self._file(kept.sha256).stat().st_size
        except OSError:
            return 0

    def masked(self, kept: Kept, sha256: str, keep: bytes) -> Kept:
        """The report is masked. The report in clear is not needed any more."""
        return self._put(replace(kept, phase="masked", sha256=sha256, keep=keep))

    def stepped(self, kept: Kept, keep: bytes) -> Kept:
        """Secure aggregation came a step further: its state replaces the one before."""
        return self._put(replace(kept, keep=keep))

    def uploaded(self, kept: Kept) -> None:
        """The receipt is in."""
        self._put(replace(kept, phase="uploaded", keep=b""))

    def drop(self) -> None:
        """Forget the assignment: it was given up, or nobody waits for its report any more."""
        self._database.execute("DELETE FROM assignment WHERE coordinator = ? AND population = ?", *self._key)
        self.sweep()

    def sweep(self) -> None:
        """Remove report files that no assignment of this state folder still needs, as far as they can be."""
        rows = (_decode(kept) for (kept,) in self._database.execute("SELECT kept FROM assignment"))
        needed = {f"{kept.sha256}{SUFFIX}" for kept in rows if kept.phase == "trained"}
        for path in self._folder.glob(f"*{SUFFIX}"):
            if path.name not in needed:
                with contextlib.suppress(OSError):
                    path.unlink()

    def _put(self, kept: Kept) -> Kept:
        text = msgspec.json.encode(kept).decode()
        self._database.execute("INSERT OR REPLACE INTO assignment VALUES (?, ?, ?)", *self._key, text)
        return kept

    def _file(self, sha256: str) -> Path:
        return self._folder / f"{sha256}{SUFFIX}"


def _decode(kept: str) -> Kept:
    try:
        return _KEPT.decode(kept)
    except msgspec.MsgspecError as error:
        raise StateDamaged("an assignment in the state database cannot be read", str(error)) from error
