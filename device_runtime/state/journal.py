"""The journal, for the device's owner: what was trained, when, for which task, and the outcome. It holds no examples.

An entry is written before its session does anything, and again as the session proceeds. So the journal shows a
session's progress even if the device was stopped.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace

from device_runtime.clock import Clock
from device_runtime.outcome import SessionFacts
from device_runtime.state.database import StateDatabase, read_database, read_json
from device_runtime.state.folder import is_held
from fedcore.validation import decoder

# Entries with and without work have separate limits, so that a year of "no work now" does not displace trainings.
MOST_WITH_WORK = 1000
MOST_WITHOUT = 200
RUNNING = "running"


class Entry(SessionFacts, frozen=True, kw_only=True):
    """One session. Times are in seconds since 1970, by the wall clock.

    outcome: one of Outcome's, or "stopped" (told to end), "interrupted" (killed), "running"; "personalised" where a
    model was trained for this device alone. Some entries belong to no session: "state-replaced" (a damaged state
    database was set aside), "kept" and "dropped" (a report, or work), "model-refused" (a release of a model, or what it
    names), and "personal-dropped" (the personal parameters of a model).
    plan and plan_sha256 name what was executed, and `purpose` is the operator's sentence on the task; `receipt` is the
    digest of the report that was counted, masked or not; `result` the signed message, in hex, with which a secure
    aggregation ended.
    `question`: what the plan asked, if it did; `numbers`: how many the report has, 0 before it is made; `masked`:
    whether reports of the round are. `told` says in words what became of a question.
    `times`: so many equal sessions in a row without work share one entry, with the bytes of all, and `closed` and
    `detail` of the last.
    """

    opened: float
    closed: float | None = None
    coordinator: str = ""
    population: str = ""
    outcome: str = RUNNING
    assignment: str = ""
    plan: str = ""
    plan_sha256: str = ""
    purpose: str = ""
    compute_s: float = 0.0
    receipt: str = ""
    result: str = ""
    question: str | None = None
    numbers: int = 0
    masked: bool = False
    times: int = 1

    @property
    def told(self) -> str:
        """What became of a question, in words for the owner; empty where none was asked."""
        asked = f"{self.question}, by {self.coordinator}"
        why = f"it is {self.detail}" if self.detail.startswith("against ") else self.detail or self.reason
        if self.question is None:
            return ""
        if self.outcome == "reported":
            how = "masked" if self.masked else "in the clear"
            return f"answered a question: {self.question}; sent {self.numbers:,} numbers, {how}"
        if not self.numbers:
            ended = "refused" if self.reason == "plan-refused" else "not answered"
            return f"was asked: {asked}; {ended} because {why}" if why else f"was asked: {asked}"
        return f"made an answer to: {asked}; not counted" + (f" because {why}" if why else " so far")

    @property
    def kind(self) -> tuple[str, ...]:
        """The values that sessions without work must have in common to share an entry."""
        return self.coordinator, self.population, self.outcome, self.reason


_ENTRY = decoder(Entry)


class Journal:
    """The journal of the state folder that this process holds. Every method raises StateError."""

    def __init__(self, database: StateDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def open(self, coordinator: str, population: str) -> tuple[int, Entry]:
        """A new entry and its number. Entries that a killed process left open are closed first."""
        with self._database.transaction():
            for number, entry in _entries(self._database, "WHERE json_extract(entry, '$.outcome') = 'running'"):
                self.write(number, _interrupted(entry))
            entry = Entry(opened=self._clock.wall(), coordinator=coordinator, population=population)
            return self._add(entry), entry

    def write(self, number: int, entry: Entry) -> None:
        """Replace an entry."""
        self._database.execute("UPDATE journal SET entry = ? WHERE id = ?", _encode(entry), number)

    def close(self, number: int, entry: Entry) -> None:
        """Replace an entry for the last time. Without work, and with the same end, it joins the entry before."""
        entry = replace(entry, closed=self._clock.wall())
        with self._database.transaction():
            before = _entries(self._database, f"WHERE id < {number} ORDER BY id DESC LIMIT 1")
            if before and not entry.task and not before[0][1].task and before[0][1].kind == entry.kind:
                self._database.execute("DELETE FROM journal WHERE id = ?", number)
                number, entry = before[0][0], _joined(before[0][1], entry)
            self.write(number, entry)
            self._prune()

    def remark(self, outcome: str, detail: str) -> None:
        """Add an entry that belongs to no session."""
        now = self._clock.wall()
        self._add(Entry(opened=now, closed=now, outcome=outcome, detail=detail))
        self._prune()

    def _add(self, entry: Entry) -> int:
        rows = self._database.execute("INSERT INTO journal (entry) VALUES (?) RETURNING id", _encode(entry))
        return int(rows[0][0])

    def _prune(self) -> None:
        # By number and not by age: a clock that jumps must not empty the journal.
        old = (
            "SELECT id FROM journal WHERE (json_extract(entry, '$.task') <> '') = ? ORDER BY id DESC LIMIT -1 OFFSET ?"
        )
        for worked, most in ((True, MOST_WITH_WORK), (False, MOST_WITHOUT)):
            self._database.execute(f"DELETE FROM journal WHERE id IN ({old})", worked, most)  # noqa: S608


def read_journal(folder: Path) -> list[Entry]:
    """All entries of a state folder, the oldest first. A device may be running meanwhile.

    Raises StateError when there is no journal, or it cannot be read.
    """
    with read_database(folder) as database:
        entries = [entry for _, entry in _entries(database, "ORDER BY id")]
    at_work = any(entry.outcome == RUNNING for entry in entries) and is_held(folder)
    return [entry if at_work or entry.outcome != RUNNING else _interrupted(entry) for entry in entries]


def _interrupted(entry: Entry) -> Entry:
    """The entry of a killed session. The time is unknown, so it has no end."""
    return replace(entry, outcome="reported" if entry.receipt else "interrupted")


def _joined(before: Entry, entry: Entry) -> Entry:
    return replace(
        before,
        closed=entry.closed,
        detail=entry.detail,
        times=before.times + entry.times,
        bytes_up=before.bytes_up + entry.bytes_up,
        bytes_down=before.bytes_down + entry.bytes_down,
    )


def _entries(database: StateDatabase, where: str) -> list[tuple[int, Entry]]:
    rows = database.execute(f"SELECT id, entry FROM journal {where}")  # noqa: S608
    return [(number, read_json(_ENTRY, entry, "an entry of the journal")) for number, entry in rows]


def _encode(entry: Entry) -> str:
    return msgspec.json.encode(entry).decode()
