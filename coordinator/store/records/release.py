"""Rows of the log of releases, within one transaction. They are only ever added. Spec: docs/spec/plan.md §10."""

from __future__ import annotations

import msgspec
from sqlalchemy import func, insert, select
from sqlalchemy.engine import Connection

from coordinator.store.table_lock import lock_writers
from coordinator.store.tables import RELEASES
from fedcore.decoding import converter
from fedcore.release import Signed

_signed = converter(Signed)


class ReleaseRecords:
    """The operations on the log of releases. `at` is the time of the transaction, in seconds since 1970."""

    def __init__(self, connection: Connection, at: float) -> None:
        self._connection = connection
        self._at = at

    def append(self, release: Signed) -> None:
        """Add a release at the end, unless the log has it. Other writers of the log wait for the transaction's end."""
        lock_writers(self._connection, RELEASES)
        if release not in self.log():
            position = self._connection.scalar(select(func.count()).select_from(RELEASES))
            values = {"release": msgspec.to_builtins(release), "logged_at": self._at}
            self._connection.execute(insert(RELEASES).values(position=position, **values))

    def log(self) -> list[Signed]:
        """Every release that devices were ever shown, in the order in which they were added."""
        return [
            _signed(row) for row in self._connection.scalars(select(RELEASES.c.release).order_by(RELEASES.c.position))
        ]
