"""A report in the clear is in memory alone: while it comes, while it waits for others, and once it was counted."""

from __future__ import annotations

import base64
import os
import stat
import tempfile
from pathlib import Path

import numpy as np
import psycopg
import pytest

from coordinator.rules import states
from coordinator.rules.task_settings import Buffered, ClearReports
from fedcore import checkpoint
from tests.coordinator.bundles import make_bundle, make_plan, report_vector
from tests.coordinator.conftest import committed
from tests.coordinator.test_api import assign, put
from tests.coordinator.test_uploads import patch

SIZE = 4000
PLAN = make_plan(SIZE)
PIECE = 24
GAP = bytes(1024)
"""Most of a database's files is gaps, which are made as short as a piece before anything is looked for."""


def body_of(seed):
    """A report of random numbers, of which any few bytes are found nowhere else."""
    values = np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)
    return checkpoint.encode({"report": report_vector(values, 1.0, plan=PLAN)})


def pieces(body):
    """Bytes by which a report is known wherever a part of it lies, as it is or as text."""
    for start in range(len(body) % PIECE + PIECE, len(body) // 2 - PIECE, 40 * PIECE):
        piece = body[start : start + PIECE]
        yield from (piece, piece.hex().encode(), piece.hex().upper().encode())
        yield from (base64.b64encode(body[at : at + PIECE]) for at in range(start, start + 3))


def open_files():
    """The regular files that this process has open, also those that have no name any more."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = Path("/proc/self/fd", descriptor)
            if stat.S_ISREG(path.stat().st_mode):
                yield path
        except FileNotFoundError:
            continue


def lying(folders, since, *bodies):
    """The files, of those written since then, in which a part of one of these reports lies."""
    wanted = [piece for body in bodies for piece in pieces(body)]
    files = {path for folder in folders for path in folder.rglob("*") if path.is_file()} | set(open_files())
    found = []
    for path in files:
        try:
            data = path.read_bytes() if path.stat().st_mtime >= since else b""
        except FileNotFoundError:
            continue
        data = data.replace(GAP, bytes(PIECE))
        found += [path] if any(piece in data for piece in wanted) else []
    return found


@pytest.fixture
def folders(tmp_path, monkeypatch, database, request):
    """All that the coordinator of a test may write to."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(states, "_LEAST_SILENCE_S", 120.0)  # devices are silent while the files are read
    if not database.startswith("postgresql"):
        return [tmp_path]
    with psycopg.connect(database) as connection:
        connection.execute("SELECT pg_switch_wal()")  # the log of making the tables is long, and stays as it is
    return [tmp_path, request.getfixturevalue("postgresql").folder]


def clock_of_files(folder):
    """The time that a file has which is written now: that of the kernel's last tick."""
    (folder / "now").touch()
    return (folder / "now").stat().st_mtime


@pytest.mark.security("The coordinator writes no single report to disk")
@pytest.mark.every_engine
@pytest.mark.parametrize(
    "settings",
    [{}, {"clear": ClearReports(estimator="median")}, {"buffered": Buffered(concurrency=3)}],
    ids=["mean", "median", "buffered"],
)
def test_no_single_report_is_on_the_coordinators_disk(store, register, client, tmp_path, folders, settings):
    since = clock_of_files(tmp_path)
    bundle = make_bundle(tmp_path / "large", PLAN, start=np.full(SIZE, 0.5, np.float32))
    task = register(bundle, goal=3, rounds=1, **settings)
    whole, in_parts, last = (body_of(seed) for seed in range(3))
    first, second, third = (one.assignment for one in assign(client, "a", "b", "c"))
    assert put(client, first, whole).status_code == 200
    assert patch(client, second, 0, 3 * len(in_parts) // 4, "?0", body=in_parts).status_code == 204
    assert lying(folders, since, whole, in_parts) == []
    assert patch(client, second, 3 * len(in_parts) // 4, body=in_parts).status_code == 200
    assert lying(folders, since, whole, in_parts) == []
    assert put(client, third, last).status_code == 200
    committed(store, task, 1)
    assert lying(folders, since, whole, in_parts, last) == []
    (tmp_path / "written").write_bytes(whole[100:])
    assert lying(folders, since, whole) == [tmp_path / "written"]
