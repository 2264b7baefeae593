"""The versions of models that this device has: the one in use, and the one that is being fetched and tried.

A killed process leaves either the old version or the new one. The blobs of both stay in the cache.
"""

from __future__ import annotations

import msgspec
from msgspec import structs

from device_runtime.state.database import StateDatabase, read_json
from fedcore.decoding import decoder
from fedcore.errors import BadRelease
from fedcore.model_release import decode_model_release
from fedcore.release import Signed
from fedcore.wire.messages import MOST_NAMES

_MOST_TRIED = 16


class KeptVersion(msgspec.Struct, frozen=True):
    """A version's release, and the digests of the blobs that it needs here, as far as known."""

    release: Signed
    blobs: tuple[str, ...] = ()


class Refusal(msgspec.Struct, frozen=True):
    """A release that was refused: its key, and why.

    final: because of what it names, so that nothing is fetched for it again. number: of the version that it says it is,
    0 when it says none.
    """

    key: str
    detail: str
    final: bool
    number: int = 0


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model: the version in use, the one that is to replace it, and the release that was refused last.

    tried: how often trials of a version began that did not end, as they may have ended the process; by what it consists
    of, the last one last.
    """

    current: KeptVersion | None = None
    pending: KeptVersion | None = None
    tried: dict[str, int] = {}
    refused: Refusal | None = None

    def counted(self, what: str, trials: int) -> StoredModel:
        """The same with so many trials of a version that did not end; the oldest of many others are forgotten."""
        others = [(key, count) for key, count in self.tried.items() if key != what]
        return structs.replace(self, tried=dict([*others, *([(what, trials)] if trials else [])][-_MOST_TRIED:]))


_STORED = decoder(StoredModel)


class ModelStore:
    """One model of one population in the state database. Every method raises StateError."""

    def __init__(self, database: StateDatabase, population: str, name: str) -> None:
        self._database = database
        self._key = population, name

    def get(self) -> StoredModel:
        """What is stored; an empty one at first."""
        query = "SELECT stored FROM model WHERE population = ? AND name = ?"
        for (stored,) in self._database.execute(query, *self._key):
            return _decode(stored)
        return StoredModel()

    def put(self, stored: StoredModel) -> StoredModel:
        """Replace what is stored."""
        text = msgspec.json.encode(stored).decode()
        self._database.execute("INSERT OR REPLACE INTO model VALUES (?, ?, ?)", *self._key, text)
        return stored

    def highest(self, signer: str) -> int:
        """The highest counter of this signer's releases that this device has seen; 0 at first."""
        query = "SELECT counter FROM model_counter WHERE signer = ? AND population = ? AND name = ?"
        return max((int(counter) for (counter,) in self._database.execute(query, signer, *self._key)), default=0)

    def see(self, signer: str, counter: int) -> None:
        """Remember a counter that is not lower than the highest."""
        row = "INSERT OR REPLACE INTO model_counter VALUES (?, ?, ?, ?)"
        self._database.execute(row, signer, *self._key, counter)


def kept_blobs(database: StateDatabase) -> frozenset[str]:
    """The digests of the blobs that the models of a state folder need."""
    rows = [_decode(stored) for (stored,) in database.execute("SELECT stored FROM model")]
    versions = [version for row in rows for version in (row.current, row.pending) if version is not None]
    return frozenset(digest for version in versions for digest in version.blobs)


def stated_versions(database: StateDatabase, population: str) -> tuple[dict[str, int], dict[str, int]]:
    """The numbers of the versions of a population's models that this device has, and of those that it refused last.

    Of the first models by name, as many as a check-in may state.
    """
    query = "SELECT name, stored FROM model WHERE population = ? ORDER BY name"
    rows = [(name, _decode(stored)) for name, stored in database.execute(query, population)][:MOST_NAMES]
    used = {name: number_of(row.current.release) for name, row in rows if row.current is not None}
    return used, {name: row.refused.number for name, row in rows if row.refused is not None and row.refused.number}


def number_of(signed: Signed) -> int:
    """The number of the version that a release says it is, whoever signed it; 0 when it says none."""
    try:
        return decode_model_release(signed.text).number
    except BadRelease:
        return 0


def _decode(stored: str) -> StoredModel:
    return read_json(_STORED, stored, "a model in the state database")
