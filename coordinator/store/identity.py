"""The tie between a database and its blobs: an id in both, so that neither is ever used with another one's."""

from __future__ import annotations

import secrets

from coordinator.errors import WrongBlobs
from coordinator.store.blobs import Blobs
from coordinator.store.database import Database

_ID_BYTES = 16


def check_same_store(database: Database, blobs: Blobs) -> None:
    """Check that database and blobs belong together; at their first use they are tied. Raises WrongBlobs."""
    with database.reading() as records:
        store_id, names_blobs = records.identity.get("blobs"), records.identity.names_blobs()
    if store_id is None:
        store_id = _begin(database, blobs)
    owner = blobs.owner
    if owner is None and not names_blobs:
        owner = blobs.claim(store_id)
    if owner is None:
        raise WrongBlobs(
            f"the blobs of this database are not at {blobs.address}: mount their folder, or name their place (--blobs, "
            "MUSTER_BLOBS). A copy of them needs the file muster-store too"
        )
    if owner != store_id:
        raise _foreign(blobs)


def _begin(database: Database, blobs: Blobs) -> str:
    """The id of a database that had none. It is committed before the blobs have it: they are never tied to nothing."""
    with database.writing() as records:
        store_id = records.identity.get("blobs")
        if store_id is None:
            if blobs.owner is not None:
                raise _foreign(blobs)
            store_id = secrets.token_hex(_ID_BYTES)
            records.identity.put("blobs", store_id)
        return store_id


def _foreign(blobs: Blobs) -> WrongBlobs:
    return WrongBlobs(
        f"the blobs at {blobs.address} belong to another database: name that one (--db, MUSTER_DATABASE), or the blobs "
        "of this one (--blobs, MUSTER_BLOBS); for a new database, an empty place"
    )
