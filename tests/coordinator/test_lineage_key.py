"""The lineage key is that of the store: no coordinator starts with another, and its tasks wait for none but it."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from coordinator.api.service import Service
from coordinator.errors import KeysDamaged, KeysDiffer, KeysMissing
from coordinator.keys import lineage_file, lineage_key, open_lineage, start_anew
from coordinator.rules.states import TaskState
from coordinator.settings import Settings
from fedcore.release import decode_release
from fedcore.signing import SigningKey, key_text
from muster.releasing import released
from tests.coordinator.conftest import AUTHORITY_KEY, RELEASE
from tests.coordinator.test_signed_release import SETTINGS
from tests.servers import serving


@pytest.fixture
def settings(database, store, tmp_path):
    return Settings(
        database=database,
        blobs=tmp_path / "blobs",
        keys=tmp_path / "keys",
        port=0,
        admin_port=0,
        authority=key_text(AUTHORITY_KEY),
        authority_url="https://authority.example",
    )


def create(store, bundle, settings):
    """A released task of this coordinator's."""
    signed = released(bundle, SETTINGS, RELEASE, open_lineage(settings.keys_file, store.database).signer)
    return store.register_task(bundle, SETTINGS, signed).id


def started(settings, store, task):
    """The state of a task once a coordinator has started and looked at it."""
    with serving(settings):
        return store.task(task).state


def test_the_lineage_key_is_made_once_for_its_owner_alone(store, tmp_path):
    folder = tmp_path / "secret"
    keys = folder / "m.db.keys"
    folder.mkdir()
    with pytest.raises(KeysMissing, match=r"m\.db\.keys\.lineage.* is not there.*MUSTER_KEYS"):
        lineage_key(keys)
    (folder / f"m.db.keys.lineage.{os.getpid()}").write_text("left by a process that was killed")
    made = open_lineage(keys, store.database)
    assert made.signer == open_lineage(keys, store.database).signer == lineage_key(keys).signer
    (folder / f"m.db.keys.lineage.{os.getpid()}").unlink()
    assert [path.name for path in folder.iterdir()] == ["m.db.keys.lineage"]
    assert (folder / "m.db.keys.lineage").stat().st_mode & 0o077 == 0
    assert [one.detail for one in store.audit()] == ["lineage"]


def test_a_damaged_file_of_the_lineage_key_is_not_replaced(settings):
    lineage_file(settings.keys_file).write_bytes(b"short")
    with pytest.raises(KeysDamaged, match=r"keys\.lineage"):
        Service.open(settings)
    assert lineage_file(settings.keys_file).read_bytes() == b"short"


@pytest.mark.every_engine
def test_a_start_without_the_lineage_keys_file_is_refused(settings, store, bundle, tmp_path):
    task = create(store, bundle, settings)
    assert started(settings, store, task) is TaskState.ACTIVE
    file, aside = lineage_file(settings.keys_file), tmp_path / "aside"
    file.rename(aside)
    with pytest.raises(KeysMissing, match=r"keys\.lineage.* is not there.*backup.*MUSTER_KEYS.*rotate --lost"):
        Service.open(settings)
    assert (file.exists(), store.task(task).state) == (False, TaskState.ACTIVE)
    aside.rename(file)
    assert started(settings, store, task) is TaskState.ACTIVE
    assert len(store.history(task)) == 1


@pytest.mark.every_engine
def test_a_start_with_another_lineage_key_is_refused(settings, store, bundle):
    task = create(store, bundle, settings)
    file = lineage_file(settings.keys_file)
    known = lineage_key(settings.keys_file).signer
    file.unlink()
    SigningKey.new(file)
    with pytest.raises(KeysDiffer, match=rf"keys\.lineage has .*knows {known}.*rotate --lost"):
        Service.open(settings)
    assert store.task(task).state is TaskState.ACTIVE


@pytest.mark.every_engine
def test_of_processes_with_lineage_keys_of_their_own_one_starts(settings, store, tmp_path):
    def start(number):
        with suppress(KeysDiffer, KeysMissing):
            return open_lineage(tmp_path / f"keys{number}", store.database).signer

    with ThreadPoolExecutor(8) as pool:
        (right,) = filter(None, pool.map(start, range(8)))
    with store.database.reading() as records:
        assert records.identity.get("lineage") == right


def test_a_key_that_a_release_named_before_the_first_start_is_the_stores(settings, store, bundle, tmp_path):
    task = create(store, bundle, settings)
    elsewhere = settings.model_copy(update={"keys": tmp_path / "elsewhere"})
    with pytest.raises(KeysMissing, match=r"elsewhere\.lineage"):
        Service.open(elsewhere)
    assert not list(tmp_path.glob("elsewhere*"))
    assert started(settings, store, task) is TaskState.ACTIVE


@pytest.mark.every_engine
def test_tasks_paused_for_a_lost_lineage_key_go_on_when_it_is_back(settings, store, bundle, tmp_path):
    task, by_hand = create(store, bundle, settings), create(store, bundle, settings)
    assert started(settings, store, task) is TaskState.ACTIVE
    store.pause(by_hand)
    file, aside = lineage_file(settings.keys_file), tmp_path / "aside"
    with pytest.raises(KeysDiffer, match="no key is lost"):
        start_anew(settings.keys_file, store.database)
    file.rename(aside)
    start_anew(settings.keys_file, store.database)
    assert started(settings, store, task) is TaskState.PAUSED
    assert decode_release(store.task(task).release.text).lineage in store.task(task).reason
    aside.replace(file)
    with pytest.raises(KeysDiffer, match="rotate --lost"):
        Service.open(settings)
    start_anew(settings.keys_file, store.database)
    assert started(settings, store, task) is TaskState.ACTIVE
    assert [one.after for one in store.history(task)] == ["active", "paused", "active"]
    assert store.task(by_hand).state is TaskState.PAUSED
