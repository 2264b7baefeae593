"""A PostgreSQL server of one's own, from the binaries that are installed; no service is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psycopg

from coordinator.store.database import Database
from coordinator.store.tables import METADATA
from muster.local.memory_folder import memory_folder

USER = "muster"
# PostgreSQL refuses to run as root: then it runs as whoever exists for the purpose, on a folder of theirs.
AS_USER: dict[str, Any] = {"user": "nobody", "extra_groups": []} if os.geteuid() == 0 else {}


def binaries() -> Path | None:
    """The newest installed server's folder; None without one."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("pg_ctl")
    paths = [Path(on_path)] if on_path else found[::-1]
    return paths[0].parent if paths else None


class Cluster:
    """A running server. `without_tables` makes a database; `without_rows` empties the one that most tests share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = count()
        self._shared = ""

    def without_tables(self) -> str:
        """The URL of a new database."""
        name = f"test{next(self._numbers)}"
        with psycopg.connect(host=str(self.folder), user=USER, dbname="postgres", autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return f"postgresql://{USER}@/{name}?host={self.folder}"

    def without_rows(self) -> str:
        """The URL of the database that has every table and no row: emptying is ten times quicker than making one."""
        if not self._shared:
            self._shared = self.without_tables()
            Database(self._shared).close()
        with psycopg.connect(self._shared) as connection:
            connection.execute(f"TRUNCATE {', '.join(METADATA.tables)} RESTART IDENTITY")
        return self._shared


@contextmanager
def cluster(programs: Path, *options: str) -> Iterator[Cluster]:
    """Start a server on a socket in a folder of its own; without `options` it does not survive a power cut."""
    folder = Path(tempfile.mkdtemp(prefix="muster-pg-", dir=memory_folder()))
    data, log = folder / "data", folder / "log"
    if AS_USER:
        shutil.chown(folder, AS_USER["user"])

    def run(program: str, *arguments: str | Path) -> None:
        command = [str(programs / program), "-D", str(data), *map(str, arguments)]
        # Output goes to a file: the server inherits it, and a pipe would never be closed.
        with (folder / program).open("w+") as output:
            if subprocess.run(command, stdout=output, stderr=output, cwd=folder, check=False, **AS_USER).returncode:
                raise RuntimeError((folder / program).read_text() + (log.read_text() if log.exists() else ""))

    settings = " ".join(f"-c {option}" for option in options or ("fsync=off", "full_page_writes=off"))
    listening = f"-c listen_addresses= -k {folder} -c max_connections=200"
    try:
        run("initdb", "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        run("pg_ctl", "start", "-w", "-l", log, "-o", f"{listening} {settings}")
        try:
            yield Cluster(folder)
        finally:
            run("pg_ctl", "stop", "-w", "-m", "immediate")
    finally:
        shutil.rmtree(folder)
