"""Keys: of the server, of the lineage, and what a coordinator is known by."""

import base64
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import sqlalchemy
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from coordinator.api.service import Service
from coordinator.errors import KeysDamaged, KeysDiffer, KeysMissing, UnusableStore
from coordinator.keys import Keys, lineage_file, lineage_key, open_lineage, rotate, start_anew
from coordinator.rules.states import TaskState
from coordinator.settings import Settings
from coordinator.store.tables import METADATA
from coordinator.store.tasks import TaskSettings, open_coordinator_store
from fedcore.release import decode_release
from fedcore.signing import SigningKey, SucceedingKey, key_text
from muster.creating import released
from tests.coordinator.conftest import AUTHORITY_KEY, PEM, RELEASE
from tests.coordinator.test_api import assign
from tests.coordinator.test_blobs import s3_server
from tests.coordinator.test_release import SETTINGS
from tests.coordinator.test_secure import NAMES, SECURE
from tests.servers import serving


def raw(keys):
    return keys.server.private.private_bytes_raw()


def known(store):
    with store.database.reading() as records:
        return records.identity.get("server")


@pytest.mark.security("The database holds the public key, and no coordinator starts with another")
@pytest.mark.every_engine
def test_keys_are_made_at_the_first_start_and_known_to_the_store(store, tmp_path):
    folder = tmp_path / "secret"
    folder.mkdir()
    made = Keys.open(folder / "keys", store.database)
    assert raw(Keys.open(folder / "keys", store.database)) == raw(made)
    assert {path.name for path in folder.iterdir()} == {"keys"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    assert known(store) == made.server.public.hex()


@pytest.mark.security("a copy of the database … can sign no invitation")
@pytest.mark.every_engine
def test_no_private_key_is_in_the_database_or_in_another_file(store, register, client, tmp_path):
    register(**SECURE)
    assert all(one.secagg and one.server for one in assign(client, *NAMES))
    before, after = Keys.load(tmp_path / "keys"), rotate(tmp_path / "keys", store.database)
    secrets = [load_pem_private_key(PEM, None).private_bytes_raw()]
    for keys in (before, after):
        secrets += [raw(keys), keys.between_replicas, keys.of_web_sessions]
    with store.database.engine.connect() as connection:
        values = [
            value
            for name in METADATA.tables.values()
            for row in connection.execute(sqlalchemy.select(name))
            for value in row
        ]
    texts = [value if isinstance(value, bytes) else str(value).encode() for value in values]
    texts += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "keys" not in path.name]
    assert any(after.server.public.hex().encode() in text for text in texts)
    for secret in secrets:
        for form in (
            secret,
            secret.hex().encode(),
            base64.b64encode(secret)[:-2],
            base64.urlsafe_b64encode(secret)[:-2],
        ):
            assert not any(form in text for text in texts)


@pytest.mark.every_engine
def test_of_keys_of_processes_that_start_together_one_is_right(store, tmp_path):
    def start(number):
        with suppress(KeysDiffer, KeysMissing):
            return raw(Keys.open(tmp_path / f"keys{number}", store.database))

    with ThreadPoolExecutor(8) as pool:
        (right,) = filter(None, pool.map(start, range(8)))
    public = {raw(Keys.load(file)): Keys.load(file).server.public.hex() for file in tmp_path.glob("keys?")}
    assert known(store) == public[right]


def test_a_coordinator_does_not_start_without_the_file_of_a_key(database, tmp_path):
    settings = Settings(database=database, blobs=tmp_path / "blobs", keys=tmp_path / "keys")
    Service.open(settings).store.close()
    (tmp_path / "keys").unlink()
    with pytest.raises(KeysMissing, match=r"keys.* is not there.*backup.*rotate --lost"):
        Service.open(settings)
    assert not (tmp_path / "keys").exists()


@pytest.mark.security("The database holds the public key, and no coordinator starts with another")
def test_a_coordinator_does_not_start_with_the_file_of_another_key(database, tmp_path):
    settings = Settings(database=database, blobs=tmp_path / "blobs", keys=tmp_path / "keys")
    Service.open(settings).store.close()
    SucceedingKey.new("server").save(tmp_path / "keys", replace=True)
    with pytest.raises(KeysDiffer, match=r"keys does not go with this database.*Put the file with the key"):
        Service.open(settings)


def test_a_damaged_file_of_keys_is_not_replaced(store, tmp_path):
    path = tmp_path / "m.db.keys"
    path.write_bytes(b"short")
    with pytest.raises(KeysDamaged, match=r"m\.db\.keys"):
        Keys.open(path, store.database)
    assert path.read_bytes() == b"short"


@pytest.mark.every_engine
def test_a_rotated_key_succeeds_the_old_one_which_does_not_come_back(store, tmp_path):
    path, old = tmp_path / "keys", tmp_path / "old"
    first = Keys.open(path, store.database)
    shutil.copy(path, old)
    rotated = rotate(path, store.database)
    assert rotated.server.succession.follow("server", first.server.public) == rotated.server.public
    assert known(store) == rotated.server.public.hex()
    changed = [one.subject for one in store.audit() if (one.action, one.detail) == ("keys-changed", "server")]
    assert changed == [first.server.public.hex(), rotated.server.public.hex()]
    with pytest.raises(KeysDiffer, match=first.server.public.hex()[:16]):
        Keys.open(old, store.database)


def test_of_two_rotations_at_once_neither_destroys_the_others_key(store, tmp_path, monkeypatch):
    path, both, successor = tmp_path / "keys", threading.Barrier(2), SucceedingKey.successor
    first = Keys.open(path, store.database)

    def meeting(key):
        with suppress(threading.BrokenBarrierError):  # where one waits for the other, they never meet
            both.wait(0.5)
        return successor(key)

    monkeypatch.setattr(SucceedingKey, "successor", meeting)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: rotate(path, store.database), range(2)))
    last = Keys.open(path, store.database).server
    assert len(last.succession.keys) == 3
    assert {one.server.public for one in made} | {first.server.public} == set(last.succession.keys)


def test_a_successor_kept_offline_takes_the_place_of_a_lost_key(store, tmp_path):
    path, offline = tmp_path / "keys", tmp_path / "offline"
    first = Keys.open(path, store.database)
    rotate(path, store.database, out=offline)
    assert known(store) == first.server.public.hex()
    offline.replace(path)
    assert Keys.open(path, store.database).server.succession.first == first.server.public
    assert known(store) != first.server.public.hex()


def test_a_running_coordinator_goes_on_with_the_successor(store, tmp_path):
    path = tmp_path / "keys"
    running = Keys.open(path, store.database)
    first, secret = running.server.public, running.between_replicas
    rotate(path, store.database)
    assert running.hold(known(store))
    assert running.server.public.hex() == known(store) != first.hex()
    assert running.between_replicas != secret
    path.unlink()
    assert running.hold(known(store))  # the file is read only when the key was succeeded
    assert not running.hold(SucceedingKey.new("server").public.hex())


def test_a_lost_key_is_given_up_only_when_told_and_only_when_lost(store, tmp_path):
    path = tmp_path / "keys"
    first = Keys.open(path, store.database)
    with pytest.raises(KeysDiffer, match="no key is lost"):
        start_anew(path, store.database)
    path.unlink()
    anew = start_anew(path, store.database)
    assert first.server.public not in anew.server.succession.keys
    assert known(store) == anew.server.public.hex()


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
