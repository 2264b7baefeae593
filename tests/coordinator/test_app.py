from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from coordinator.api.service import Service
from coordinator.errors import UnusableStore
from coordinator.settings import Settings
from tests.coordinator.bundles import START, report_body
from tests.coordinator.conftest import committed
from tests.coordinator.devices import speaking_to
from tests.coordinator.fork_server import runs, urls, wait_until
from tests.coordinator.test_api import assign, put, refused, wait
from tests.forked import COMMAND, forked
from tests.servers import serving

pytestmark = pytest.mark.every_engine

SERVE = """
import sys
from pathlib import Path
from coordinator.server import serve
from coordinator.settings import Settings
database, folder = sys.argv[1], Path(sys.argv[2])
place = {"database": database, "blobs": folder / "blobs", "keys": folder / "keys"}
settings = Settings(**place, port=0, admin_port=0)
serve(settings, lambda ready: print(ready.devices, flush=True))
"""


@contextmanager
def process(database, folder):
    """The service as a process of its own; gives it and a client."""
    command = [sys.executable, "-c", SERVE, database, str(folder)]
    with forked(COMMAND).start(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            with speaking_to(child.stdout.readline().strip()) as client:
                yield child, client
        finally:
            child.kill()


@contextmanager
def killed(coordinators, database, folder, port=0, devices=None):
    """The service as a process that is killed at the end of the block, with its client connected; gives the client."""
    place = {"database": database, "blobs": str(folder / "blobs"), "keys": str(folder / "keys")}
    (ready := folder / "ready").unlink(missing_ok=True)
    pid = coordinators.fork(ready, {**place, "port": port, "admin_port": 0}, {})
    with speaking_to(urls(pid, ready)[0], devices=devices) as client:
        try:
            yield client
        finally:
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not runs(pid))


def test_killed_service_runs_the_round_again_and_keeps_its_receipts(store, register, database, coordinators, tmp_path):
    task = register(goal=2, rounds=1)
    body = report_body([100, 0, 0, 0], 1)
    with killed(coordinators, database, tmp_path) as client:
        first, second = assign(client, "a", "b")
        receipt = put(client, first.assignment, body)
    with killed(coordinators, database, tmp_path, client.base_url.port, client.devices) as client:
        assert put(client, first.assignment, body).content == receipt.content
        refused(put(client, second.assignment, body), "no-longer-needed")
        again = assign(client, "a", "b")
        assert [(a.round, a.attempt) for a in again] == [(1, 2), (1, 2)]
        for assignment in again:
            put(client, assignment.assignment, report_body([0, 1, 0, 0], 1))
        np.testing.assert_array_equal(committed(store, task, 1), START + np.array([0, 1, 0, 0]))
    assert [(r.attempt, r.state.value) for r in store.rounds(task)] == [(1, "abandoned"), (2, "committed")]


def test_terminated_service_sends_waiting_devices_away_and_stops(store, register, database, tmp_path):
    task = register(goal=2)
    with process(database, tmp_path) as (child, client), ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait, client, "a", 30)
        while not store.rounds(task):
            pass
        child.send_signal(signal.SIGTERM)
        assert waiting.result(5).json()["reason"] == "shutting-down"
        assert child.wait(5) in (0, -signal.SIGTERM)


def test_coordinator_that_tells_no_replica_anything_reads_no_certificates(database, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(ssl, "create_default_context", lambda: read.append("certificates"))
    with serving(Settings(database=database, blobs=tmp_path / "blobs", keys=tmp_path / "keys", port=0, admin_port=0)):
        pass
    assert read == []


def test_database_that_this_version_cannot_use_is_refused(tmp_path):
    with pytest.raises(UnusableStore, match="mysql"):
        Service.open(Settings(database="mysql://host/db", blobs=tmp_path))


def test_the_file_of_keys_must_be_named_where_the_database_is_no_file():
    assert str(Settings(database="sqlite:///folder/m.db").keys_file) == "folder/m.db.keys"
    assert str(Settings(database="sqlite:///m.db", keys="other").keys_file) == "other"
    with pytest.raises(UnusableStore, match="MUSTER_KEYS"):
        Settings(database="postgresql://host/db").keys_file  # noqa: B018 - reading it is what fails
