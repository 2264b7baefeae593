"""What is collected and what is not; a row never points at a missing blob."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import sqlalchemy

from coordinator.errors import StoreConflict, UnknownRound
from coordinator.rules.states import TaskState
from coordinator.rules.task_settings import TaskSettings
from coordinator.settings import Settings
from coordinator.store.blobs import StoredName
from coordinator.store.garbage_collection import Collected, Retention, collect, collect_forever, superseded, unknown
from coordinator.store.tables import ASSIGNMENTS, BLOBS, REPORTS, TRANSITIONS
from fedcore.plan import BlobRef
from tests.coordinator.bundles import START, make_bundle, report_body
from tests.coordinator.conftest import committed
from tests.coordinator.devices import speaking_to
from tests.coordinator.test_api import assign, put
from tests.servers import serving

pytestmark = pytest.mark.every_engine
NOW = Retention(models=2, grace_s=-10)
NOTHING = Collected(models=0, rows=0, objects=0, assignments=0)


def known(store):
    with store.database.engine.connect() as connection:
        return set(connection.scalars(sqlalchemy.select(BLOBS.c.sha256)))


def files(tmp_path):
    return {path.name for path in (tmp_path / "blobs").iterdir()} - {"muster-store"}


def train(desk, rounds):
    for number in range(rounds):
        desk.report(*desk.assign("a"), delta=[number + 1, 0, 0, 0])


def test_only_the_last_models_stay_and_one_in_any_case():
    assert superseded([3, 1, 2, 4], 2) == [1, 2]
    assert superseded([1, 2], 5) == []
    assert superseded([1, 2], 0) == [1]


def test_only_what_no_row_knows_and_is_old_is_deleted():
    stored = [StoredName("known", 1.0), StoredName("old", 1.0), StoredName("new", 9.0)]
    assert unknown(stored, {"known"}, before=5.0) == ["old"]


def test_superseded_models_go_with_rows_and_bytes_and_training_goes_on(store, register, desk, tmp_path):
    task = register(goal=1, rounds=5)
    train(desk, 4)
    before = {number: store.checkpoint(task, number)["params"] for number in (0, 3, 4)}
    assert collect(store, NOW) == Collected(models=2, rows=2, objects=2, assignments=0)
    for number, params in before.items():
        np.testing.assert_array_equal(store.checkpoint(task, number)["params"], params)
    for number in (1, 2):
        with pytest.raises(UnknownRound, match="no longer kept"):
            store.checkpoint(task, number)
    assert files(tmp_path) == known(store)
    train(desk, 1)
    assert store.task(task).state is TaskState.COMPLETED
    assert len(store.rounds(task)) == 5
    assert collect(store, NOW).models == 1
    assert collect(store, NOW) == NOTHING


def left(store, table):
    """The ids in a table that name assignments."""
    query = {
        "assignments": sqlalchemy.select(ASSIGNMENTS.c.id),
        "reports": sqlalchemy.select(REPORTS.c.assignment),
        "transitions": sqlalchemy.select(TRANSITIONS.c.entity_id).where(TRANSITIONS.c.entity == "assignment"),
    }[table]
    with store.database.engine.connect() as connection:
        return set(connection.scalars(query))


def test_who_took_part_long_ago_goes_and_counts_stay(store, register, desk, new_desk):
    task = register(goal=1, rounds=5)
    for device in ("a", "b"):
        desk.report(*desk.assign(device))
    (running,) = desk.assign("c")
    before = store.rounds(task)
    assert collect(store, Retention(assignments_s=3600)).assignments == 0
    assert collect(store, Retention(assignments_s=-10)).assignments == 2
    assert left(store, "assignments") == left(store, "transitions") == {running.assignment}
    assert left(store, "reports") == set()
    assert store.rounds(task) == before
    desk.report(running)
    assert [one.reported for one in store.rounds(task)] == [1, 1, 1]
    assert len(store.history(task)) == 1
    assert collect(store, Retention(assignments_s=-10)).assignments == 1


def test_who_rests_is_not_forgotten(store, register, desk, new_desk):
    by_rounds = register(goal=1, rounds=9, min_separation_rounds=3)
    for device in "abcd":
        desk.report(*desk.assign(device))
    assert collect(store, Retention(assignments_s=-10)).assignments == 2
    assert [one.device for number in (1, 2, 3, 4) for one in store.cohort(by_rounds, number)] == ["c", "d"]
    store.cancel(by_rounds)
    by_time = register(goal=1, rounds=9, min_separation_s=1000)
    desk.pass_time(1)
    desk.report(*desk.assign("a"))
    collect(store, Retention(assignments_s=-10))
    assert [one.device for one in store.cohort(by_time, 1)] == ["a"]
    assert new_desk().arrive("a").reason == "resting"


def test_a_coordinator_collects_by_itself(store, register, database, tmp_path):
    task = register(goal=1, rounds=2)
    place = {"database": database, "blobs": tmp_path / "blobs", "keys": tmp_path / "keys", "accept_unattested": True}
    settings = Settings(**place, port=0, admin_port=0, collect_every_h=0.3 / 3600, keep_models=1)
    with serving(settings) as url, speaking_to(url) as client:
        for _ in range(2):
            put(client, assign(client, "a")[0].assignment, report_body([1, 0, 0, 0], 1))
        committed(store, task, 2)
        until = time.monotonic() + 20
        while {one.checkpoint_sha256 for one in store.rounds(task) if one.number == 1} != {None}:
            assert time.monotonic() < until
            time.sleep(0.02)
    assert store.checkpoint(task, 2)["params"][0] == START[0] + 2


def test_what_is_new_stays_and_what_a_killed_write_left_goes(store, register, tmp_path):
    register()
    store.blobs.put(b"uploaded, and no task names it yet")
    left = tmp_path / "blobs" / ".0123456789abcdef.tmp"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    assert collect(store, Retention()) == replace(NOTHING, objects=1)
    assert not left.exists()
    assert collect(store, NOW) == replace(NOTHING, objects=1)
    assert files(tmp_path) == known(store)


@pytest.mark.promise("No row points at a missing blob, during garbage collection and in a backup too")
def test_model_keeps_its_bytes_for_the_grace_after_its_row(store, register, desk, tmp_path):
    """A backup takes the rows first: whatever they point at is still there when the bytes are copied."""
    task = register(goal=1, rounds=5)
    train(desk, 4)
    for path in (tmp_path / "blobs").iterdir():
        os.utime(path, (0, 0))
    in_backup = known(store)
    assert collect(store, Retention(models=2)) == replace(NOTHING, models=2)
    assert collect(store, Retention(models=2)) == NOTHING
    assert in_backup <= files(tmp_path)
    with pytest.raises(UnknownRound, match="no longer kept"):
        store.checkpoint(task, 1)
    assert collect(store, NOW) == replace(NOTHING, rows=2, objects=2)


def test_a_blob_that_is_needed_again_stays(store, register, desk, tmp_path):
    register(goal=1, rounds=5)
    train(desk, 4)
    before = {one.name for one in store.blobs.stored()}
    collect(store, Retention(models=2))
    with store.database.engine.connect() as connection:
        (again, *_) = connection.scalars(sqlalchemy.select(BLOBS.c.sha256).where(BLOBS.c.unneeded_at.is_not(None)))
    with store.database.writing() as records:
        store.add_blobs(records, {BlobRef(again, 1): True})
    collect(store, NOW)
    assert again in known(store) == files(tmp_path)
    assert len(before - files(tmp_path)) == 1


def register_while_bytes_go(store, bundle, monkeypatch, times):
    """Register a task, whose bytes are deleted that often between being stored and being known."""
    add_blobs, left = store.add_blobs, [None] * times

    def slowly(records, refs):
        if left:
            left.pop()
            store.blobs.delete([ref.sha256 for ref in refs])
        add_blobs(records, refs)

    monkeypatch.setattr(store, "add_blobs", slowly)
    return store.register_task(bundle, TaskSettings(population="phones", goal=1, rounds=1))


def test_bytes_collected_before_their_row_is_committed_are_stored_again(store, bundle, monkeypatch):
    task = register_while_bytes_go(store, bundle, monkeypatch, 1)
    assert [one.id for one in store.tasks()] == [task.id]
    assert all(map(store.blobs.has, known(store)))


def test_bytes_collected_time_and_again_are_missed(store, bundle, monkeypatch):
    with pytest.raises(StoreConflict, match="try again"):
        register_while_bytes_go(store, bundle, monkeypatch, 2)
    assert known(store) == set()


def test_slow_store_deletes_in_more_than_one_transaction(store, monkeypatch, tmp_path):
    monkeypatch.setattr("coordinator.store.blobs._DELETING_S", 0)
    for number in range(5):
        store.blobs.put(bytes([number]))
    assert collect(store, NOW).objects == 5
    assert files(tmp_path) == set()


def test_a_collection_ends_soon_when_told_to(store, register, desk, tmp_path):
    register(goal=1, rounds=5)
    train(desk, 4)
    answers = iter([False])  # so that it is told within the first task
    done = collect(store, NOW, lambda: next(answers, True))
    assert (done.models, done.objects) == (2, 0)
    assert len(files(tmp_path)) > len(known(store))


def test_stopping_waits_for_the_collection_in_its_thread(store, monkeypatch):
    began, ended = threading.Event(), threading.Event()

    def slowly(store, retention, stopped):
        began.set()
        while not stopped():
            time.sleep(0.001)
        ended.set()
        return NOTHING

    monkeypatch.setattr("coordinator.store.garbage_collection.collect", slowly)

    async def stop():
        collecting = asyncio.create_task(collect_forever(store, NOW, 0.0))
        await asyncio.to_thread(began.wait, 10)
        collecting.cancel()
        await asyncio.wait([collecting])
        return ended.is_set()

    assert asyncio.run(stop())


@pytest.mark.promise("No row points at a missing blob, during garbage collection and in a backup too")
def test_no_row_points_at_a_missing_blob_while_tasks_are_registered(store, tmp_path):
    """Bytes go as soon as they are there, or even while they are written: most registrations have to try again."""
    done, sweeping, failures, tries = threading.Event(), threading.Event(), [], 0

    def sweep():
        try:
            while not done.is_set():
                if sweeping.wait(0.01):
                    collect(store, NOW)
        except Exception as error:
            failures.append(error)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    for number in range(6):
        bundle = make_bundle(tmp_path / f"bundle{number}", start=np.full(4, number, np.float32))
        sweeping.set()
        while len(store.tasks()) == number:
            if (tries := tries + 1) % 4 == 0:
                sweeping.clear()  # or a slow disk would never win
            with suppress(StoreConflict, FileNotFoundError):
                store.register_task(bundle, TaskSettings(population="phones", goal=1, rounds=1))
            assert all(map(store.blobs.has, known(store)))
            assert tries < 100
    done.set()
    sweeper.join()
    assert failures == []
    assert len(store.tasks()) == 6
    assert all(map(store.blobs.has, known(store)))
