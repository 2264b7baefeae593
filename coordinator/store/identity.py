"""The tie between a database and its blobs: an id in both, so that neither is ever used with another one's."""

from __future__ import annotations

import secrets

from sqlalchemy.exc import IntegrityError

from coordinator.errors import WrongBlobs
from coordinator.store.blobs import Blobs
from coordinator.store.database import Database

_ID_BYTES = 16


def tie(database: Database, blobs: Blobs) -> None:
    """Check that database and blobs belong together; at their first use they are tied. Raises WrongBlobs."""
    with database.reading() as records:
        known, names_blobs = records.identity.get("blobs"), records.identity.names_blobs()
    if known is None:
        known = _begin(database, blobs)
    owner = blobs.owner
    if owner is None and not names_blobs:
        blobs.belong_to(known)
    elif owner is None:
        raise WrongBlobs(
            f"the blobs of this database are not at {blobs.address}: mount their folder, or name their place (--blobs, "
            "MUSTER_BLOBS). A copy of them needs the file muster-store too"
        )
    elif owner != known:
        raise _foreign(blobs)


def _begin(database: Database, blobs: Blobs) -> str:
    """The id of a database that had none. It is committed before the blobs have it: they are never tied to nothing."""
    try:
        with database.writing() as records:
            if (known := records.identity.get("blobs")) is None:
                if blobs.owner is not None:
                    raise _foreign(blobs)
                known = secrets.token_hex(_ID_BYTES)
                records.identity.put("blobs", known)
            return known
    except IntegrityError:  # another process was the first
        return _begin(database, blobs)


def _foreign(blobs: Blobs) -> WrongBlobs:
    return WrongBlobs(
        f"the blobs at {blobs.address} belong to another database: name that one (--db, MUSTER_DATABASE), or the blobs "
        "of this one (--blobs, MUSTER_BLOBS); for a new database, an empty place"
    )
