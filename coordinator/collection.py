"""Garbage collection: models that newer rounds superseded, and stored bytes that no row knows.

A row never points at a missing blob, whoever writes meanwhile. Bytes are deleted in a transaction that no transaction
which adds a blob overlaps with, after a look at the rows; and whoever adds a blob looks at its bytes before it commits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice

from coordinator.blobs import StoredName
from coordinator.tasks import CoordinatorStore

_BATCH = 100
"""Bytes of so many blobs are deleted in one transaction: other writers wait for its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What is kept: the models of the last `models` committed rounds of each task, unknown bytes for `grace_s`."""

    models: int = 5
    grace_s: float = 86400.0


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection removed: models of rounds, rows of blobs, and stored objects."""

    models: int
    rows: int
    objects: int


def superseded(committed: Iterable[int], keep: int) -> list[int]:
    """The round numbers whose models go; the last `keep` of those `committed` stay, and one in any case."""
    return sorted(committed)[: -max(keep, 1)]


def unknown(stored: Iterable[StoredName], known: Collection[str], before: float) -> list[str]:
    """The names to delete: what no row knows and was written before that time, half-written bytes among them."""
    return [one.name for one in stored if one.name not in known and one.written_at < before]


def collect(store: CoordinatorStore, retention: Retention) -> Collected:
    """Remove what nobody needs any more. Safe while coordinators run, and beside another collection."""
    models = rows = 0
    for task in store.tasks():
        with store.database.writing() as records:
            gone = superseded(records.rounds_with_models(task.id), retention.models)
            models += len(gone)
            rows += records.forget_models(task.id, gone)
    return Collected(models, rows, _delete_unknown(store, retention.grace_s))


def _delete_unknown(store: CoordinatorStore, grace_s: float) -> int:
    deleted = 0
    with store.database.reading() as records:
        before = records.at - grace_s
    found = iter(store.blobs.stored())
    while batch := list(islice(found, _BATCH)):
        names = {one.name for one in batch if one.written_at < before}
        if not names:
            continue
        with store.database.writing() as records:
            going = unknown(batch, records.known_blobs(names), before)
            store.blobs.delete(going)
        deleted += len(going)
    return deleted
