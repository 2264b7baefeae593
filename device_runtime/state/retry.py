"""The time at which this device may return, per coordinator and population, kept across restarts."""

from __future__ import annotations

import msgspec

from device_runtime.clock import MOMENT, Moment
from device_runtime.state.database import StateDatabase, read_json


class Retry:
    """The time before which a device stays away from one population of one coordinator."""

    def __init__(self, database: StateDatabase, coordinator: str, population: str) -> None:
        self._database = database
        self._key = coordinator, population

    def not_before(self) -> Moment | None:
        """The time, or None when the device may return at once. Raises StateError."""
        query = "SELECT due FROM retry WHERE coordinator = ? AND population = ?"
        for (due,) in self._database.execute(query, *self._key):
            return read_json(MOMENT, due, "a retry time in the state database")
        return None

    def stay_away_until(self, due: Moment) -> None:
        """Remember the time. Raises StateError."""
        text = msgspec.json.encode(due).decode()
        self._database.execute("INSERT OR REPLACE INTO retry VALUES (?, ?, ?)", *self._key, text)
