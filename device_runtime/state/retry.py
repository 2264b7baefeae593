"""The time at which this device may return, and the token that shows it, per coordinator and population."""

from __future__ import annotations

import msgspec

from device_runtime.clock import MOMENT, Moment
from device_runtime.state.database import StateDatabase, read_json

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
