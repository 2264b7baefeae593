"""The commands of docs/operations.md that back up and restore, run as they stand there."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.postgresql import binaries
from coordinator.settings import Settings
from coordinator.store.tasks import TaskSettings, open_coordinator_store
from tests.coordinator.bundles import START, make_bundle, report_body
from tests.coordinator.conftest import committed
from tests.coordinator.devices import speaking_to
from tests.coordinator.test_api import assign, check_in, put
from tests.servers import serving

pytestmark = pytest.mark.promise("No row points at a missing blob, during garbage collection and in a backup too")

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"


def commands():
    """The four blocks of the section: back up and restore, on SQLite and on PostgreSQL."""
    section = DOCUMENT.read_text().split("\n## Backup\n")[1].split("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)


def run(block, folder, **environment):
    command = ["bash", "-euo", "pipefail", "-c", block]
    subprocess.run(command, cwd=folder, env={**os.environ, **environment}, check=True, capture_output=True, timeout=60)


def one_round(store, client, task, number):
    while "session" not in check_in(client).json():
        time.sleep(0.02)  # until the lease that the copy holds has run out
    (one,) = assign(client, f"device-{number}")
    assert put(client, one.assignment, report_body([1, 0, 0, 0], 1)).status_code == 200
    return committed(store, task, number)


def test_copy_of_a_running_service_is_whole_and_goes_on_where_it_was_made(tmp_path):
    if not shutil.which("sqlite3"):
        pytest.skip("no sqlite3 command (apt install sqlite3)")
    back_up, restore, *_ = commands()
    database, blobs = f"sqlite:///{tmp_path}/muster.db", tmp_path / "muster-blobs"
    settings = Settings(database=database, blobs=blobs, port=0, admin_port=0, lease_s=0.5)
    with open_coordinator_store(database, blobs) as store:
        made = TaskSettings(population="phones", goal=1, rounds=9, over_selection=1.0)
        task = store.register_task(make_bundle(tmp_path / "plan"), made).id
        with serving(settings) as url, speaking_to(url) as client:
            one_round(store, client, task, 1)
            run(back_up, tmp_path)
            keys = (tmp_path / "muster.db.keys").read_bytes()
            one_round(store, client, task, 2)
    (tmp_path / "muster.db.keys").unlink()
    run(restore, tmp_path)
    assert (tmp_path / "muster.db.keys").read_bytes() == keys
    with open_coordinator_store(database, blobs) as store:
        assert [record.number for record in store.rounds(task) if record.state == "committed"] == [1]
        with serving(settings) as url, speaking_to(url) as client:
            model = one_round(store, client, task, 2)
    np.testing.assert_array_equal(model, START + np.array([2, 0, 0, 0]))


def test_dump_of_postgresql_is_restored_with_every_row(postgresql, tmp_path):
    *_, back_up, restore = commands()
    before, after = postgresql.without_tables(), postgresql.without_tables()
    path = f"{binaries()}{os.pathsep}{os.environ['PATH']}"
    with open_coordinator_store(before, tmp_path / "muster-blobs") as store:
        made = TaskSettings(population="phones", goal=1, rounds=1)
        task = store.task(store.register_task(make_bundle(tmp_path / "plan"), made).id)
    run(back_up, tmp_path, MUSTER_DATABASE=before, PATH=path)
    run(restore, tmp_path, RESTORED=after, PATH=path)
    with open_coordinator_store(after, tmp_path / "backup" / "muster-blobs", create=False) as store:
        assert store.tasks() == [task]
        np.testing.assert_array_equal(store.checkpoint(task.id)["params"], START)
