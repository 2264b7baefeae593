"""The use of the last day, for a policy's limits. The journal is no substitute, as it limits its number of entries."""

from __future__ import annotations

import msgspec

from device_runtime.clock import MOMENT, Clock, Moment
from device_runtime.state.database import StateDatabase, read_json

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
                moment = _decode(until).carried_over(self._clock)
                if moment.remaining_s(self._clock):
                    self._database.execute("UPDATE spent SET until = ? WHERE id = ?", _encode(moment), number)
                    sums = Spent(sums.seconds + seconds, sums.bytes + size, sums.sessions + sessions)
                else:
                    self._database.execute("DELETE FROM spent WHERE id = ?", number)
        return sums

    def add(self, more: Spent) -> None:
        """Count further use."""
        for number, until in self._database.execute("SELECT id, until FROM spent ORDER BY id DESC LIMIT 1"):
            if _decode(until).remaining_s(self._clock) > DAY_S:
                sums = "UPDATE spent SET seconds = seconds + ?, bytes = bytes + ?, sessions = sessions + ? WHERE id = ?"
                self._database.execute(sums, more.seconds, more.bytes, more.sessions, number)
                return
        until = _encode(Moment.after(DAY_S + PART_S, self._clock))
        row = "INSERT INTO spent (until, seconds, bytes, sessions) VALUES (?, ?, ?, ?)"
        self._database.execute(row, until, more.seconds, more.bytes, more.sessions)


def _decode(until: str) -> Moment:
    return read_json(MOMENT, until, "a day's spending in the state database")


def _encode(moment: Moment) -> str:
    return msgspec.json.encode(moment).decode()
