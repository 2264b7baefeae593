"""Rows of blobs that are stored sealed, within one transaction. What they are for: sealed_blobs.py."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import delete, insert, select, update

from coordinator.rules.entities import SealedBlob
from coordinator.store.records.within_transaction import WithinTransaction
from coordinator.store.tables import BLOBS, SEALED_BLOBS
from fedcore.plan import BlobRef


class SealedRecords(WithinTransaction):
    """The operations on these rows."""

    def add(self, blob: SealedBlob) -> None:
        """Add the key of a blob; both blobs have their rows. Equal bytes need one only."""
        if self.find(blob.ref.sha256) is None:
            values = {"sha256": blob.ref.sha256, "sealed_sha256": blob.sealed.sha256, "key": blob.key.hex()}
            self._connection.execute(insert(SEALED_BLOBS).values(**values))

    def find(self, sha256: str) -> SealedBlob | None:
        """The sealed form of a blob, if it has one."""
        query = select(SEALED_BLOBS.c.key, BLOBS.c.sha256, BLOBS.c.size)
        query = query.join(BLOBS, SEALED_BLOBS.c.sealed_sha256 == BLOBS.c.sha256)
        row = self._connection.execute(query.where(SEALED_BLOBS.c.sha256 == sha256)).one_or_none()
        if row is None:
            return None
        size = self._connection.scalar(select(BLOBS.c.size).where(BLOBS.c.sha256 == sha256)) or 0
        return SealedBlob(BlobRef(sha256, size), BlobRef(row.sha256, row.size), bytes.fromhex(row.key))

    def names(self) -> list[str]:
        """The digests of all blobs that have a sealed form."""
        return list(self._connection.scalars(select(SEALED_BLOBS.c.sha256)))

    def forget(self, names: Collection[str]) -> None:
        """Remove the keys of blobs that are stored in plain; note the time at the sealed ones."""
        these = SEALED_BLOBS.c.sha256.in_(names)
        sealed = select(SEALED_BLOBS.c.sealed_sha256).where(these)
        self._connection.execute(update(BLOBS).where(BLOBS.c.sha256.in_(sealed)).values(unneeded_at=self.at))
        self._connection.execute(delete(SEALED_BLOBS).where(these))
