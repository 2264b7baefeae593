"""Databases that have every table and no row: a copy takes a tenth of the time of a new one."""

import functools
import tempfile
from pathlib import Path

from coordinator.store.database import Database


@functools.cache
def _without_rows():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.db")
        Database(f"sqlite:///{path}").close()
        return path.read_bytes()


def without_rows(path):
    """The URL of a new SQLite file without rows."""
    path.write_bytes(_without_rows())
    path.chmod(0o600)  # as that of a new one
    return f"sqlite:///{path}"
