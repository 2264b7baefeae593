"""The answers of the last week to questions, for a policy's limit. The journal is no substitute, as it is bounded."""

from __future__ import annotations

import msgspec

from device_runtime.clock import MOMENT, Clock, Moment
from device_runtime.state.database import StateDatabase, read_json

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


def _encode(moment: Moment) -> str:
    return msgspec.json.encode(moment).decode()
