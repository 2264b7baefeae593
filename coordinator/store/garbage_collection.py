"""Garbage collection: the rule for models, assignments and bytes that go, and the process that removes them.

Models go that newer rounds superseded, assignments of rounds that ended long ago, and bytes that no row names.
`GarbageRecords` reads and deletes the rows.

A row never points at a missing blob, also while others write. Bytes are deleted in a transaction that no transaction
which adds a blob overlaps with, after a look at the rows; and a transaction that adds a blob looks for its bytes before
it commits. The same holds in a backup, rows first and bytes after them: a blob that no row points at any more keeps its
row and its bytes for the grace.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from coordinator.rules.entities import Task
from coordinator.store.blobs import StoredName
from coordinator.store.tasks import CoordinatorStore

Stopped: TypeAlias = Callable[[], bool]
_LOG = logging.getLogger(__name__)
_BATCH = 100
"""Blobs whose bytes are deleted in one transaction: other writers wait for its end."""
_FIRST = 0.1
"""The first collection comes after this fraction of the interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The retention of every task: the models of its last `models` committed rounds; assignments for `assignments_s`.

    Of a task with `same_cohort` two models are kept at least, as a pair of its rounds may begin again. Models are kept
    for longer where an open assignment starts from them, assignments where a separation of participations still needs
    them. grace_s: how long bytes are kept that no row points at or names yet: while a backup is made, or a bundle is
    uploaded.
    """

    models: int = 5
    assignments_s: float = 30 * 86400.0
    grace_s: float = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The counts of a collection: models of rounds, rows of blobs, stored objects and assignments removed."""

    models: int
    rows: int
    objects: int
    assignments: int


def superseded(committed: Iterable[int], keep: int, in_use: Collection[int] = ()) -> list[int]:
    """The round numbers whose models go; the last `keep` of those `committed` stay, one at least, and those in use."""
    return [number for number in sorted(committed)[: -max(keep, 1)] if number not in in_use]


def unknown(stored: Iterable[StoredName], known_names: Collection[str], before: float) -> list[str]:
    """The names to delete: those that no row has and that were written before that time, partial writes too."""
    return [blob.name for blob in stored if blob.name not in known_names and blob.written_at < before]


def collect(store: CoordinatorStore, retention: Retention, stopped: Stopped = lambda: False) -> Collected:
    """Collect garbage once. Safe while coordinators run, and beside another collection.

    When `stopped` answers true it ends soon, and the next collection continues.
    """
    models = assignments = 0
    store.sealed.settle(stopped)
    for task in store.tasks():
        if stopped():
            break
        with store.database.writing() as records:
            # A pair of rounds that begins again goes back by two.
            keep, garbage = max(retention.models, 2 if task.settings.same_cohort else 1), records.garbage
            gone = superseded(garbage.rounds_with_models(task.id), keep, garbage.models_in_use(task.id))
            if gone:
                records.garbage.forget_models(task.id, gone)
        models += len(gone)
        assignments += _forget_cohorts(store, task, retention.assignments_s, stopped)
    with store.database.writing() as records:
        rows = records.garbage.forget_blobs(retention.grace_s)
    objects = _delete_unknown(store, retention.grace_s, stopped)
    return Collected(models=models, rows=rows, objects=objects, assignments=assignments)


async def collect_forever(store: CoordinatorStore, retention: Retention, every_s: float) -> None:
    """Collect every `every_s` seconds in a thread, which has ended once this has been cancelled.

    A failure is logged, and the collection is tried again at the next time.
    """
    await asyncio.sleep(_FIRST * every_s)
    while True:
        try:
            done = await _collect_in_thread(store, retention)
            _LOG.info(
                "collected %d models, %d stored objects, %d assignments", done.models, done.objects, done.assignments
            )
        except Exception as error:
            _LOG.error("garbage could not be collected: %s", error)
        await asyncio.sleep(every_s)


async def _collect_in_thread(store: CoordinatorStore, retention: Retention) -> Collected:
    stop = threading.Event()
    collecting = asyncio.create_task(asyncio.to_thread(collect, store, retention, stop.is_set))
    try:
        return await asyncio.shield(collecting)
    finally:
        stop.set()
        await asyncio.wait([collecting])


def _forget_cohorts(store: CoordinatorStore, task: Task, age_s: float, stopped: Stopped) -> int:
    """One round a transaction: other writers wait for its end."""
    apart = task.settings.separation
    within = apart.rounds - 1 if apart else 0
    with store.database.reading() as records:
        old = records.garbage.rounds_with_cohorts(task.id, max(age_s, apart.seconds if apart else 0.0), within)
    forgotten = 0
    for round_id in old:
        if stopped():
            break
        with store.database.writing() as records:
            forgotten += records.garbage.forget_cohort(round_id)
    return forgotten


def _delete_unknown(store: CoordinatorStore, grace_s: float, stopped: Stopped) -> int:
    with store.database.reading() as records:
        before = records.at - grace_s
    deleted = 0
    old = (blob for blob in store.blobs.stored() if blob.written_at < before)
    while not stopped() and (batch := list(islice(old, _BATCH))):
        while batch and not stopped():
            with store.database.writing() as records:
                going = unknown(batch, records.garbage.known_blobs([blob.name for blob in batch]), before)
                done = store.blobs.delete(going)
            deleted += done
            batch = [blob for blob in batch if blob.name in going[done:]]
    return deleted
