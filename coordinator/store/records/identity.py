"""Rows of the store's identity, within one transaction: what must match the files that belong to a database."""

from __future__ import annotations

from sqlalchemy import bindparam, insert, select, update

from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.tables import BLOBS, IDENTITY

_VALUE = select(IDENTITY.c.value).where(IDENTITY.c.name == bindparam("key"))


class IdentityRecords(WithinTransaction):
    """The values by their names.

    What is read in a `writing` transaction does not change until its end. Processes that start together on a new
    database decide one after the other: the first one writes, and the others find its value.
    """

    def get(self, name: str) -> str | None:
        """A value; None before there is one."""
        if self._writing:
            self._lock_writers(IDENTITY)
        value: str | None = self._connection.scalar(_VALUE, {"key": name})
        return value

    def names_blobs(self) -> bool:
        """Whether the database names any blob."""
        return self._connection.scalar(select(BLOBS.c.sha256).limit(1)) is not None

    def put(self, name: str, value: str) -> None:
        """Write a value in place of the one before."""
        self._lock_writers(IDENTITY)
        if self._connection.execute(update(IDENTITY).where(IDENTITY.c.name == name).values(value=value)).rowcount == 0:
            self._connection.execute(insert(IDENTITY).values(name=name, value=value))
