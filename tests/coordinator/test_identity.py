"""The tie between a database and its blobs."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.errors import UnusableStore
from coordinator.store.tasks import TaskSettings, open_coordinator_store
from tests.coordinator.test_blobs import s3_server

every_engine = pytest.mark.every_engine


@every_engine
def test_a_start_with_a_wrong_or_unmounted_folder_is_refused(database, tmp_path, bundle):
    right, elsewhere, other = tmp_path / "right", tmp_path / "elsewhere", tmp_path / "other"
    with open_coordinator_store(database, right) as store:
        task = store.register_task(bundle, TaskSettings(population="phones", goal=1, rounds=1)).id
    open_coordinator_store(f"sqlite:///{tmp_path / 'other.db'}", other).close()
    with pytest.raises(UnusableStore, match=r"are not at .*elsewhere: mount their folder"):
        open_coordinator_store(database, elsewhere)
    with pytest.raises(UnusableStore, match=r"other belong to another database"):
        open_coordinator_store(database, other)
    with open_coordinator_store(database, right, create=False) as store:
        assert store.task(task).state == "active"
        assert store.checkpoint(task)


def test_a_new_database_takes_no_blobs_of_another(database, tmp_path):
    open_coordinator_store(database, tmp_path / "blobs").close()
    with pytest.raises(UnusableStore, match="belong to another database"):
        open_coordinator_store(f"sqlite:///{tmp_path / 'new.db'}", tmp_path / "blobs")
    open_coordinator_store(f"sqlite:///{tmp_path / 'new.db'}", tmp_path / "empty").close()


def test_copies_of_both_belong_together(tmp_path, bundle):
    with open_coordinator_store(f"sqlite:///{tmp_path / 'm.db'}", tmp_path / "blobs") as store:
        store.register_task(bundle, TaskSettings(population="phones", goal=1, rounds=1))
    shutil.copytree(tmp_path / "blobs", tmp_path / "copies")
    shutil.copy(tmp_path / "m.db", tmp_path / "copy.db")
    with open_coordinator_store(f"sqlite:///{tmp_path / 'copy.db'}", tmp_path / "copies", create=False) as store:
        assert len(store.tasks()) == 1


@every_engine
def test_processes_that_start_together_agree_on_the_tie(database, tmp_path):
    def start(_):
        open_coordinator_store(database, tmp_path / "blobs").close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(start, range(8)))
    assert [path.name for path in (tmp_path / "blobs").iterdir()] == ["muster-store"]


def test_an_object_store_is_tied_too(database, tmp_path, bundle, monkeypatch):
    with s3_server(monkeypatch) as bucket:
        with open_coordinator_store(database, f"s3://{bucket}/a") as store:
            store.register_task(bundle, TaskSettings(population="phones", goal=1, rounds=1))
        open_coordinator_store(database, f"s3://{bucket}/a").close()
        with pytest.raises(UnusableStore, match="are not at s3://"):
            open_coordinator_store(database, f"s3://{bucket}/b")
