"""Garbage collection: models that newer rounds superseded, who took part long ago, and bytes that no row knows.

A row never points at a missing blob, whoever writes meanwhile. Bytes are deleted in a transaction that no transaction
which adds a blob overlaps with, after a look at the rows; and whoever adds a blob looks at its bytes before it commits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice

from coordinator.blobs import StoredName
from coordinator.store.rows import Task
from coordinator.tasks import CoordinatorStore

_LOG = logging.getLogger(__name__)
_BATCH = 100
"""Bytes of so many blobs are deleted in one transaction: other writers wait for its end."""
_FIRST = 0.1
"""The first collection comes after this part of the time between two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What is kept of every task: the models of the last `models` committed rounds; assignments for `assignments_s`.

    Assignments are kept for longer where a separation of participations still asks for them. grace_s: how old bytes are
    that are deleted because no row knows them.
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


def collect(store: CoordinatorStore, retention: Retention) -> Collected:
    """Remove what nobody needs any more. Safe while coordinators run, and beside another collection."""
    models = rows = assignments = 0
    for task in store.tasks():
        with store.database.writing() as records:
            gone = superseded(records.garbage.rounds_with_models(task.id), retention.models)
            models += len(gone)
            rows += records.garbage.forget_models(task.id, gone)
        assignments += _forget_cohorts(store, task, retention.assignments_s)
    objects = _delete_unknown(store, retention.grace_s)
    return Collected(models=models, rows=rows, objects=objects, assignments=assignments)


async def collect_forever(store: CoordinatorStore, retention: Retention, every_s: float) -> None:
    """Collect at such intervals, in a thread. What fails is logged, and tried again at the next time."""
    await asyncio.sleep(_FIRST * every_s)
    while True:
        try:
            done = await asyncio.to_thread(collect, store, retention)
            _LOG.info(
                "collected %d models, %d stored objects, %d assignments", done.models, done.objects, done.assignments
            )
        except Exception as error:
            _LOG.error("garbage could not be collected: %s", error)
        await asyncio.sleep(every_s)


def _forget_cohorts(store: CoordinatorStore, task: Task, age_s: float) -> int:
    """One round a transaction: other writers wait for its end."""
    apart = task.settings.separation
    within = apart.rounds - 1 if apart else 0
    with store.database.reading() as records:
        old = records.garbage.rounds_with_cohorts(task.id, max(age_s, apart.seconds if apart else 0.0), within)
    forgotten = 0
    for round_id in old:
        with store.database.writing() as records:
            forgotten += records.garbage.forget_cohort(round_id)
    return forgotten


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
            going = unknown(batch, records.garbage.known_blobs(names), before)
            store.blobs.delete(going)
        deleted += len(going)
    return deleted
