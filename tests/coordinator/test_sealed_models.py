"""Models of private rounds: nobody can read one that has no row in the ledger, among the blobs or in a backup."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import sqlalchemy

from benchmarks.postgresql import binaries
from coordinator.commands import CountReport
from coordinator.driver.writing import commit_round
from coordinator.errors import Unavailable, UnknownBlob
from coordinator.failpoints import VARIABLE
from coordinator.rules.aggregation import aggregate
from coordinator.rules.task_settings import PrivacyBudget
from coordinator.settings import Settings
from coordinator.store.blobs import Blobs
from coordinator.store.garbage_collection import Retention, collect
from coordinator.store.tables import BLOBS, SEALED_BLOBS
from coordinator.store.tasks import open_coordinator_store
from fedcore.plan import BlobRef
from tests.coordinator.bundles import make_private_bundle
from tests.coordinator.conftest import Desk, states
from tests.coordinator.devices import speaking_to
from tests.coordinator.test_api import blob
from tests.coordinator.test_backup import commands, run
from tests.coordinator.test_failpoints import (
    GOAL,
    PrivateLearners,
    replicas as replicas,  # noqa: PLC0414 - a fixture
)
from tests.coordinator.test_privacy import fail, ledger
from tests.servers import serving

pytestmark = [
    pytest.mark.promise("Every readable noisy sum has one row in the ledger, and tasks keep their budget"),
    pytest.mark.every_engine,
]
PRIVACY = PrivacyBudget(epsilon=8, delta=1e-6, users=1000, noise_multiplier=2, mechanism="gaussian")
KILLS = 3


def models(folder: Path) -> set[str]:
    """The names of the files in a folder that anybody can read a model from."""
    return {path.name for path in folder.iterdir() if "params" in tensors(path.read_bytes())}


def tensors(data: bytes) -> dict[str, np.ndarray]:
    try:
        return safetensors.numpy.load(data)
    except safetensors.SafetensorError:
        return {}


def counted(store, task) -> set[str]:
    """The names of the models that a task began from, and of those that its ledger counts."""
    with store.database.reading() as records:
        record, rows = records.task(task), records.ledger.entries(task)
        made = [record.initial, *(records.snapshot(record, row.round) for row in rows)]
    return {digest for one in made for digest in (one.state_sha256, one.checkpoint_sha256)}


@pytest.fixture
def task(register, tmp_path):
    return register(make_private_bundle(tmp_path / "private"), goal=GOAL, rounds=9, privacy=PRIVACY)


def one_round(desk):
    for given in desk.assign("a", "b", "c", "d"):
        desk.ask(CountReport(given.assignment, "1" * 64, np.array([1, 0, 0, 0, 1], np.float32)))


@pytest.fixture
def committed_alone(store, task, monkeypatch):
    """Round 1 is committed by a process that dies before its model is stored in plain; answers its checkpoint."""

    def unavailable(_):
        raise Unavailable("dead")

    with monkeypatch.context() as patch:
        patch.setattr(store.sealed, "open", unavailable)
        one_round(Desk(store))
    assert [row.round for row in ledger(store, task)[0]] == [1]
    with store.database.reading() as records:
        sha256 = records.snapshot(store.task(task)).checkpoint_sha256
    assert sha256 not in {one.name for one in store.blobs.stored()}
    return sha256


def test_a_noisy_model_without_a_row_is_unreadable_after_kills(store, task, replicas, tmp_path):
    first = replicas.start(environment={VARIABLE: "round.before-commit"})
    with PrivateLearners(GOAL, lambda: [first.url]):
        for _ in range(KILLS - 1):
            replicas.alive.pop().ended()
            replicas.start(port=int(first.url.rpartition(":")[2]), environment={VARIABLE: "round.before-commit"})
        replicas.alive.pop().ended()
    assert len(states(store, task)) == KILLS
    assert ledger(store, task) == ((), [])
    assert models(tmp_path / "blobs") == counted(store, task)


def test_a_commit_that_waits_for_a_lock_leaves_no_readable_model(store, task, tmp_path, monkeypatch):
    with ExitStack() as held:

        def locked(*arguments):
            held.enter_context(store.database.writing()).task(task)
            return aggregate(*arguments)

        monkeypatch.setattr(commit_round, "aggregate", locked)
        one_round(Desk(store))
        assert states(store, task) == [(1, 1, "aggregating", "")]
        assert models(tmp_path / "blobs") == counted(store, task)


def backed_up(database, folder, between=lambda: None):
    """A copy of the database and its blobs by the commands of the document, and what happens between the two."""
    sqlite_back_up, _, postgres_back_up, _ = commands()
    for name in ("muster.db.keys", "muster.db.keys.lineage"):
        (folder / name).touch()
    for name, here in (("muster-blobs", "blobs"), ("muster.db", "state.db")):
        (folder / name).symlink_to(here)
    path = f"{binaries()}{os.pathsep}{os.environ['PATH']}"
    environment = {"MUSTER_DATABASE": database, "PATH": path}
    block = sqlite_back_up if database.startswith("sqlite") else postgres_back_up
    rows, last = re.split(r"(?<=\n)(?=named=|\{)", block)
    run(rows, folder, **environment)
    between()
    run(last, folder, **environment)
    return folder / "backup"


@pytest.fixture
def restored(database, tmp_path, request):
    """Opens the store that a backup of this test holds."""
    with ExitStack() as opened:

        def restore(copy):
            url = f"sqlite:///{copy}/muster.db"
            if not database.startswith("sqlite"):
                url = request.getfixturevalue("postgresql").without_tables()
                path = f"{binaries()}{os.pathsep}{os.environ['PATH']}"
                run(commands()[3], tmp_path, RESTORED=url, PATH=path)
            return opened.enter_context(open_coordinator_store(url, copy / "muster-blobs", create=False))

        yield restore


def test_a_backup_has_no_model_of_a_commit_that_never_came_about(store, database, task, tmp_path, monkeypatch):
    monkeypatch.setattr(commit_round, "reach", fail)
    one_round(Desk(store))
    stored = {one.name for one in store.blobs.stored()}
    assert len(stored - counted(store, task)) >= 2
    copy = backed_up(database, tmp_path)
    assert models(copy / "muster-blobs") == counted(store, task)


def test_a_backup_has_no_model_of_a_later_round_than_its_rows(store, database, task, tmp_path, restored):
    desk = Desk(store)
    one_round(desk)
    before = counted(store, task)
    copy = backed_up(database, tmp_path, between=lambda: one_round(desk))
    assert models(copy / "muster-blobs") <= before < counted(store, task)
    again = restored(copy)
    assert counted(again, task) == before
    np.testing.assert_array_equal(again.checkpoint(task)["params"], store.checkpoint(task, 1)["params"])


def test_a_backup_of_a_model_that_is_only_sealed_opens_it(store, database, task, tmp_path, committed_alone, restored):
    again = restored(backed_up(database, tmp_path))
    assert committed_alone not in {one.name for one in again.blobs.stored()}
    assert again.checkpoint(task)["params"].tobytes() == store.checkpoint(task)["params"].tobytes()
    one_round(Desk(again))
    assert [row.round for row in ledger(again, task)[0]] == [1, 2]


def test_a_device_fetches_the_model_before_it_is_stored_in_plain(store, database, task, tmp_path, committed_alone):
    place = {"database": database, "blobs": tmp_path / "blobs", "keys": tmp_path / "keys"}
    with serving(Settings(**place, port=0, admin_port=0)) as url, speaking_to(url) as client:
        part = blob(client, committed_alone, Range="bytes=8-15")
        assert part.status_code == 206
        whole = blob(client, committed_alone)
    assert BlobRef.of(whole.content).sha256 == committed_alone
    assert whole.content[8:16] == part.content


def test_another_driver_goes_on_from_a_model_that_is_only_sealed(store, task, tmp_path, committed_alone):
    one_round(Desk(store))
    assert [row.round for row in ledger(store, task)[0]] == [1, 2]
    assert models(tmp_path / "blobs") == counted(store, task)


def test_a_rollback_goes_back_to_a_model_that_is_only_sealed(store, task, committed_alone):
    store.pause(task)
    store.roll_back(task, 1)
    with store.database.reading() as records:
        assert records.snapshot(store.task(task), 2).checkpoint_sha256 == committed_alone
    assert store.blobs.has(committed_alone)


def test_a_collection_opens_what_is_sealed_and_removes_the_seals(store, task, tmp_path, committed_alone, monkeypatch):
    collect(store, Retention())
    assert models(tmp_path / "blobs") == counted(store, task)
    with store.database.engine.connect() as connection:
        assert connection.execute(sqlalchemy.select(SEALED_BLOBS)).all() == []
    before = {one.name for one in store.blobs.stored()}
    assert collect(store, Retention(grace_s=-10)).objects >= 2
    left = {one.name for one in store.blobs.stored()}
    assert len(before - left) == 2
    with store.database.engine.connect() as connection:
        assert left == set(connection.scalars(sqlalchemy.select(BLOBS.c.sha256)))
    assert models(tmp_path / "blobs") == counted(store, task)


@pytest.fixture
def full(monkeypatch):
    """While it lasts, no model can be stored in plain."""
    put = Blobs.put

    def fails(self, data):
        if "params" in tensors(bytes(data)):
            raise OSError(28, "No space left on device")
        return put(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Blobs, "put", fails)
        yield patch


def test_a_disk_that_is_full_after_the_commit_costs_no_round(store, task, full):
    desk = Desk(store)
    one_round(desk)
    one_round(desk)
    assert [one[2] for one in states(store, task)] == ["committed", "aggregating"]
    full.undo()
    desk.pass_time(2)
    assert [row.round for row in ledger(store, task)[0]] == [1, 2]


def test_a_collection_on_a_full_disk_removes_what_it_can(store, task, tmp_path, committed_alone, full):
    left = tmp_path / "blobs" / ".0123456789abcdef.tmp"
    left.touch()
    assert collect(store, Retention(grace_s=-10)).objects == 1
    assert not left.exists()
    full.undo()
    collect(store, Retention())
    assert models(tmp_path / "blobs") == counted(store, task)


def test_sealed_bytes_that_were_altered_are_no_blob(store, task, tmp_path, committed_alone):
    with store.database.reading() as records:
        sealed = records.sealed.find(committed_alone).sealed.sha256
    (tmp_path / "blobs" / sealed).write_bytes(b"altered")
    assert not store.blobs.has(committed_alone)
    with pytest.raises(UnknownBlob):
        store.checkpoint(task)


def test_a_device_comes_again_while_its_model_cannot_be_stored(store, database, tmp_path, committed_alone, full):
    place = {"database": database, "blobs": tmp_path / "blobs", "keys": tmp_path / "keys"}
    with serving(Settings(**place, port=0, admin_port=0)) as url, speaking_to(url) as client:
        answer = blob(client, committed_alone)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        full.undo()
        assert blob(client, committed_alone).status_code == 200
