"""An open database with its blobs, and how blobs become known there."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.errors import StoreConflict
from coordinator.store.blobs import Blobs
from coordinator.store.database import Database
from coordinator.store.records.records import Records
from fedcore.plan import BlobRef


class OpenedStore:
    """Rows and files that belong together."""

    def __init__(self, database: Database, blobs: Blobs) -> None:
        self.database = database
        self.blobs = blobs

    def close(self) -> None:
        """Close the database."""
        self.database.close()

    def add_blobs(self, records: Records, refs: Mapping[BlobRef, bool]) -> None:
        """Make stored blobs known; the values say whether devices may have them. Raises StoreConflict.

        Bytes that no row named may have been collected since they were stored. From the row on they are safe, so they
        are looked for after it.
        """
        for ref, public in refs.items():
            records.add_blob(ref, public=public)
            if not self.blobs.has(ref.sha256):
                raise StoreConflict(f"blob {ref.sha256[:12]}… was collected before a row knew it; try again")
