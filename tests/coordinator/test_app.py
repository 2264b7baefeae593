from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx2
import numpy as np
import pytest

from coordinator.errors import UnsupportedDatabase
from coordinator.service import Service
from coordinator.settings import Settings
from tests.coordinator.bundles import START, report_body
from tests.coordinator.conftest import committed
from tests.coordinator.test_api import assign, put, refused, wait

SERVE = """
import sys
from pathlib import Path
from coordinator.server import serve
from coordinator.settings import Settings
settings = Settings(database=sys.argv[1], blobs=Path(sys.argv[2]), port=sys.argv[3])
serve(settings, lambda ready: print(ready.devices, flush=True))
"""


@contextmanager
def process(tmp_path, port=0):
    """The service as a process of its own; gives it and a client."""
    command = [sys.executable, "-c", SERVE, f"sqlite:///{tmp_path}/state.db", str(tmp_path / "blobs"), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            with httpx2.Client(base_url=child.stdout.readline().strip(), timeout=10) as client:
                yield child, client
        finally:
            child.kill()


def test_killed_service_runs_the_round_again_and_keeps_its_receipts(store, register, tmp_path):
    task = register(goal=2, rounds=1)
    body = report_body([100, 0, 0, 0], 1)
    with process(tmp_path) as (child, client):
        first, second = assign(client, "a", "b")
        receipt = put(client, first.assignment, body)
        child.kill()
    with process(tmp_path, client.base_url.port) as (child, client):
        assert put(client, first.assignment, body).content == receipt.content
        refused(put(client, second.assignment, body), "no-longer-needed")
        again = assign(client, "a", "b")
        assert [(a.round, a.attempt) for a in again] == [(1, 2), (1, 2)]
        for assignment in again:
            put(client, assignment.assignment, report_body([0, 1, 0, 0], 1))
        np.testing.assert_array_equal(committed(store, task, 1), START + np.array([0, 1, 0, 0]))
    assert [(r.attempt, r.state.value) for r in store.rounds(task)] == [(1, "abandoned"), (2, "committed")]


def test_terminated_service_sends_waiting_devices_away_and_stops(store, register, tmp_path):
    task = register(goal=2)
    with process(tmp_path) as (child, client), ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait, client, "a", 30)
        while not store.rounds(task):
            pass
        child.send_signal(signal.SIGTERM)
        assert waiting.result(5).json()["reason"] == "shutting-down"
        assert child.wait(5) in (0, -signal.SIGTERM)


def test_database_that_this_version_cannot_use_is_refused(tmp_path):
    with pytest.raises(UnsupportedDatabase, match="postgresql"):
        Service.open(Settings(database="postgresql://host/db", blobs=tmp_path))
