"""Rows of the store's identity, within one transaction: what must match the files that belong to a database."""

from __future__ import annotations

from sqlalchemy import insert, select, update
from sqlalchemy.engine import Connection

from coordinator.store.tables import BLOBS, IDENTITY


class IdentityRecords:
    """The values by their names."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self, name: str) -> str | None:
        """A value; None before there is one."""
        found: str | None = self._connection.scalar(select(IDENTITY.c.value).where(IDENTITY.c.name == name))
        return found

    def names_blobs(self) -> bool:
        """Whether the database names any blob."""
        return self._connection.scalar(select(BLOBS.c.sha256).limit(1)) is not None

    def put(self, name: str, value: str) -> None:
        """Write a value in the place of the one before. Raises IntegrityError when another process was the first."""
        if self._connection.execute(update(IDENTITY).where(IDENTITY.c.name == name).values(value=value)).rowcount == 0:
            self._connection.execute(insert(IDENTITY).values(name=name, value=value))
