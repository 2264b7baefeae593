"""Records of a device: when it may return, what it spent and holds; and the journal for its owner."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import structs
from msgspec.structs import replace

from device_runtime.conditions import MOMENT, Clock, Moment
from device_runtime.errors import SessionFacts
from device_runtime.state.database import StateDatabase, read_database, read_json
from device_runtime.state.folder import is_held
from fedcore.errors import BadRelease
from fedcore.release import Signed
from fedcore.signing import decode_model_release
from fedcore.validation import decoder
from fedcore.wire.messages import MOST_NAMES

_KEEP = """
INSERT INTO retry (coordinator, population, {0}) VALUES (?, ?, ?)
ON CONFLICT (coordinator, population) DO UPDATE SET {0} = excluded.{0}
"""


class Retry:
    """The time before which a device stays away from one population of one coordinator, and the token that it shows."""

    def __init__(self, database: StateDatabase, coordinator: str, population: str) -> None:
        self._database = database
        self._key = coordinator, population

    def not_before(self) -> Moment | None:
        """The time, or None when the device may return at once. Raises StateError."""
        query = "SELECT due FROM retry WHERE coordinator = ? AND population = ? AND due IS NOT NULL"
        for (due,) in self._database.execute(query, *self._key):
            return read_json(MOMENT, due, "a retry time in the state database")
        return None

    def stay_away_until(self, due: Moment) -> None:
        """Remember the time. Raises StateError."""
        text = msgspec.json.encode(due).decode()
        self._database.execute(_KEEP.format("due"), *self._key, text)

    def token(self) -> str:
        """The token of the last rejection; "" without one. Raises StateError."""
        query = "SELECT token FROM retry WHERE coordinator = ? AND population = ?"
        return next((token for (token,) in self._database.execute(query, *self._key)), "")

    def keep_token(self, token: str) -> None:
        """Remember the token of a rejection, in place of the one before. Raises StateError."""
        self._database.execute(_KEEP.format("token"), *self._key, token)


DAY_S = 86_400.0
# Sums of this length expire together, so use counts for a day, and at most this much longer.
PART_S = 3_600.0


class Spent(msgspec.Struct, frozen=True):
    """The use of sessions: `seconds` of work on plans, `bytes` down and up, number of `sessions` with an assignment.

    An assignment that a killed session left and another finished counts once.
    """

    seconds: float = 0.0
    bytes: int = 0
    sessions: int = 0


class Spending:
    """The spending of the state folder that this process holds. Every method raises StateError.

    The expiry of a sum is measured from boot, so setting the clock neither renews a day's budget nor uses it up.
    """

    def __init__(self, database: StateDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def spent(self) -> Spent:
        """The use of the last day."""
        sums = Spent()
        with self._database.transaction():
            for number, until, seconds, size, sessions in self._database.execute("SELECT * FROM spent"):
                moment = _moment(until).carried_over(self._clock)
                if moment.remaining_s(self._clock):
                    self._database.execute("UPDATE spent SET until = ? WHERE id = ?", _encode(moment), number)
                    sums = Spent(sums.seconds + seconds, sums.bytes + size, sums.sessions + sessions)
                else:
                    self._database.execute("DELETE FROM spent WHERE id = ?", number)
        return sums

    def add(self, more: Spent) -> None:
        """Count further use."""
        for number, until in self._database.execute("SELECT id, until FROM spent ORDER BY id DESC LIMIT 1"):
            if _moment(until).remaining_s(self._clock) > DAY_S:
                sums = "UPDATE spent SET seconds = seconds + ?, bytes = bytes + ?, sessions = sessions + ? WHERE id = ?"
                self._database.execute(sums, more.seconds, more.bytes, more.sessions, number)
                return
        until = _encode(Moment.after(DAY_S + PART_S, self._clock))
        row = "INSERT INTO spent (until, seconds, bytes, sessions) VALUES (?, ?, ?, ?)"
        self._database.execute(row, until, more.seconds, more.bytes, more.sessions)


def _moment(until: str) -> Moment:
    return read_json(MOMENT, until, "a day's spending in the state database")


def _encode(value: msgspec.Struct) -> str:
    return msgspec.json.encode(value).decode()


WEEK_S = 7 * 86_400.0


class AnsweredQuestions:
    """The answers that the device of the state folder made, to whomever. Every method raises StateError.

    An answer's week is measured from boot, so setting the clock does not give it back.
    """

    def __init__(self, database: StateDatabase, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    def within_a_week(self) -> int:
        """How many answers were made in the last seven days."""
        count = 0
        with self._database.transaction():
            for number, text in self._database.execute("SELECT id, until FROM answer"):
                until = read_json(MOMENT, text, "an answer in the state database").carried_over(self._clock)
                if until.remaining_s(self._clock):
                    self._database.execute("UPDATE answer SET until = ? WHERE id = ?", _encode(until), number)
                    count += 1
                else:
                    self._database.execute("DELETE FROM answer WHERE id = ?", number)
        return count

    def count(self) -> None:
        """Count one more answer, before anything of it is sent."""
        until = _encode(Moment.after(WEEK_S, self._clock))
        self._database.execute("INSERT INTO answer (until) VALUES (?)", until)


# The versions of models that this device has: the one in use, and the one that is being fetched and tried.
#
# A killed process leaves either the old version or the new one. The blobs of both stay in the cache.

_MOST_TRIED = 16


class KeptVersion(msgspec.Struct, frozen=True):
    """A version's release, and the digests of the blobs that it needs here, as far as known."""

    release: Signed
    blobs: tuple[str, ...] = ()


class Refusal(msgspec.Struct, frozen=True):
    """A release that was refused: its key, and why.

    final: because of what it names, so that nothing is fetched for it again. number: of the version that it says it is,
    0 when it says none.
    """

    key: str
    detail: str
    final: bool
    number: int = 0


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model: the version in use, the one that is to replace it, and the release that was refused last.

    tried: how often trials of a version began that did not end, as they may have ended the process; by what it consists
    of, the last one last.
    """

    current: KeptVersion | None = None
    pending: KeptVersion | None = None
    tried: dict[str, int] = {}
    refused: Refusal | None = None

    def counted(self, what: str, trials: int) -> StoredModel:
        """The same with so many trials of a version that did not end; the oldest of many others are forgotten."""
        others = [(key, count) for key, count in self.tried.items() if key != what]
        return structs.replace(self, tried=dict([*others, *([(what, trials)] if trials else [])][-_MOST_TRIED:]))


_STORED = decoder(StoredModel)


class ModelStore:
    """One model of one population in the state database. Every method raises StateError."""

    def __init__(self, database: StateDatabase, population: str, name: str) -> None:
        self._database = database
        self._key = population, name

    def get(self) -> StoredModel:
        """What is stored; an empty one at first."""
        query = "SELECT stored FROM model WHERE population = ? AND name = ?"
        for (stored,) in self._database.execute(query, *self._key):
            return _decode(stored)
        return StoredModel()

    def put(self, stored: StoredModel) -> StoredModel:
        """Replace what is stored."""
        text = msgspec.json.encode(stored).decode()
        self._database.execute("INSERT OR REPLACE INTO model VALUES (?, ?, ?)", *self._key, text)
        return stored

    def highest(self, signer: str) -> int:
        """The highest counter of this signer's releases that this device has seen; 0 at first."""
        query = "SELECT counter FROM model_counter WHERE signer = ? AND population = ? AND name = ?"
        return max((int(counter) for (counter,) in self._database.execute(query, signer, *self._key)), default=0)

    def see(self, signer: str, counter: int) -> None:
        """Remember a counter that is not lower than the highest."""
        row = "INSERT OR REPLACE INTO model_counter VALUES (?, ?, ?, ?)"
        self._database.execute(row, signer, *self._key, counter)


def kept_blobs(database: StateDatabase) -> frozenset[str]:
    """The digests of the blobs that the models of a state folder need."""
    rows = [_decode(stored) for (stored,) in database.execute("SELECT stored FROM model")]
    versions = [version for row in rows for version in (row.current, row.pending) if version is not None]
    return frozenset(digest for version in versions for digest in version.blobs)


def stated_versions(database: StateDatabase, population: str) -> tuple[dict[str, int], dict[str, int]]:
    """The numbers of the versions of a population's models that this device has, and of those that it refused last.

    Of the first models by name, as many as a check-in may state.
    """
    query = "SELECT name, stored FROM model WHERE population = ? ORDER BY name"
    rows = [(name, _decode(stored)) for name, stored in database.execute(query, population)][:MOST_NAMES]
    used = {name: number_of(row.current.release) for name, row in rows if row.current is not None}
    return used, {name: row.refused.number for name, row in rows if row.refused is not None and row.refused.number}


def number_of(signed: Signed) -> int:
    """The number of the version that a release says it is, whoever signed it; 0 when it says none."""
    try:
        return decode_model_release(signed.text).number
    except BadRelease:
        return 0


def _decode(stored: str) -> StoredModel:
    return read_json(_STORED, stored, "a model in the state database")


# The journal, for the device's owner: what was trained, when, for which task, and the outcome. It holds no examples.
#
# An entry is written before its session does anything, and again as the session proceeds. So the journal shows a
# session's progress even if the device was stopped.


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
