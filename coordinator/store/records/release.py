"""Rows of the log of releases, within one transaction. They are only ever added. Spec: docs/spec/plan.md §10."""

from __future__ import annotations

import msgspec
from sqlalchemy import func, insert, select

from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.tables import RELEASES
from fedcore.decoding import converter
from fedcore.release import Signed

_signed = converter(Signed)


class ReleaseRecords(WithinTransaction):
    """The operations on the log of releases."""

    def append(self, release: Signed) -> None:
        """Add a release at the end, unless the log has it. Other writers of the log wait for the transaction's end."""
        self._lock_writers(RELEASES)
        if release not in self.log():
            position = self._connection.scalar(select(func.count()).select_from(RELEASES))
            values = {"release": msgspec.to_builtins(release), "logged_at": self.at}
            self._connection.execute(insert(RELEASES).values(position=position, **values))

    def log(self) -> list[Signed]:
        """Every release that devices were ever shown, in the order in which they were added."""
        query = select(RELEASES.c.release).order_by(RELEASES.c.position)
        return [_signed(row) for row in self._connection.scalars(query)]
