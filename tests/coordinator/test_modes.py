"""Files of a coordinator are for its owner alone, whatever the umask of whoever starts it."""

import os
import stat

import pytest

from coordinator.settings import Settings
from coordinator.store.tasks import TaskSettings, open_coordinator_store
from tests.coordinator.bundles import make_bundle, report_body
from tests.coordinator.conftest import committed
from tests.coordinator.devices import speaking_to
from tests.coordinator.test_api import assign, put
from tests.servers import serving

pytestmark = pytest.mark.promise("A coordinator's files are readable by their owner only, whatever the umask")

STATE = ("state.db", "state.db-wal", "state.db-shm", "state.db.keys", "state.db.keys.lineage")


@pytest.fixture(params=[0o000, 0o022, 0o377])
def umask(request):
    """A careless umask, the usual one, and one under which an owner could not write what they made."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder):
    """The mode of every file and folder below a folder."""
    return {path.relative_to(folder): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}


@pytest.mark.security("Database, blobs and keys are made with the modes 0600 and 0700, whatever the umask")
def test_what_a_coordinator_writes_is_for_its_owner_alone(tmp_path, umask):
    bundle = make_bundle(tmp_path / "bundle")
    place = tmp_path / "place"
    place.mkdir(0o755)
    place.chmod(0o755)
    database, blobs = f"sqlite:///{place}/state.db", place / "deep" / "blobs"
    with open_coordinator_store(database, blobs) as store:
        task = store.register_task(bundle, TaskSettings(population="phones", goal=1, rounds=2, over_selection=1.0)).id
        with serving(Settings(database=database, blobs=blobs, port=0, admin_port=0)) as url, speaking_to(url) as client:
            (one,) = assign(client, "a")
            put(client, one.assignment, report_body([1, 0, 0, 0], 1))
            committed(store, task, 1)
            found = modes(place)
    assert {str(path) for path in found} >= {*STATE, "deep", "deep/blobs", "deep/blobs/muster-store"}
    assert len(found) > 12
    assert {mode for path, mode in found.items() if (place / path).is_dir()} == {0o700}
    assert {mode for path, mode in found.items() if not (place / path).is_dir()} == {0o600}
