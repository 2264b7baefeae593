"""Garbage collection: models that newer rounds superseded, who took part long ago, and bytes that no row knows.

A row never points at a missing blob, whoever writes meanwhile. Bytes are deleted in a transaction that no transaction
which adds a blob overlaps with, after a look at the rows; and whoever adds a blob looks at its bytes before it commits.

So it is in a backup, rows first and bytes after them: what nothing points at any more keeps its row and its bytes for
the grace.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from coordinator.rules.state import Task
from coordinator.store.blobs import StoredName
from coordinator.store.tasks import CoordinatorStore

Stopped: TypeAlias = Callable[[], bool]
_LOG = logging.getLogger(__name__)
_BATCH = 100
"""Bytes of so many blobs are deleted in one transaction: other writers wait for its end."""
_FIRST = 0.1
"""The first collection comes after this part of the time between two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What is kept of every task: the models of the last `models` committed rounds; assignments for `assignments_s`.

    Assignments are kept for longer where a separation of participations still asks for them. grace_s: for how long
    bytes are kept that nothing points at, or no row knows yet: while a backup is made, or a bundle is uploaded.
    """

    models: int = 5
    assignments_s: float = 30 * 86400.0
    grace_s: float = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection removed: models of rounds, rows of blobs, stored objects, and assignments of devices."""

    models: int
    rows: int
    objects: int
    assignments: int


def superseded(committed: Iterable[int], keep: int) -> list[int]:
    """The round numbers whose models go; the last `keep` of those `committed` stay, and one in any case."""
    return sorted(committed)[: -max(keep, 1)]


def unknown(stored: Iterable[StoredName], known: Collection[str], before: float) -> list[str]:
    """The names to delete: what no row knows and was written before that time, half-written bytes among them."""
    return [one.name for one in stored if one.name not in known and one.written_at < before]


def collect(store: CoordinatorStore, retention: Retention, stopped: Stopped = lambda: False) -> Collected:
    """Remove what nobody needs any more. Safe while coordinators run, and beside another collection.

    Once `stopped` says so it ends soon, and the next collection goes on.
    """
    models = assignments = 0
    for task in store.tasks():
        if stopped():
            break
        with store.database.writing() as records:
            gone = superseded(records.garbage.rounds_with_models(task.id), retention.models)
            if gone:
                records.garbage.forget_models(task.id, gone)
        models += len(gone)
        assignments += _forget_cohorts(store, task, retention.assignments_s, stopped)
    with store.database.writing() as records:
        rows = records.garbage.forget_blobs(retention.grace_s)
    objects = _delete_unknown(store, retention.grace_s, stopped)
    return Collected(models=models, rows=rows, objects=objects, assignments=assignments)


async def collect_forever(store: CoordinatorStore, retention: Retention, every_s: float) -> None:
    """Collect at such intervals, in a thread, which has ended when this has been cancelled.

    What fails is logged, and tried again at the next time.
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
    old = (one for one in store.blobs.stored() if one.written_at < before)
    while not stopped() and (batch := list(islice(old, _BATCH))):
        while batch and not stopped():
            with store.database.writing() as records:
                going = unknown(batch, records.garbage.known_blobs([one.name for one in batch]), before)
                done = store.blobs.delete(going)
            deleted += done
            batch = [one for one in batch if one.name in going[done:]]
    return deleted
