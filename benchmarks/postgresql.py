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
from muster.local.server import memory_folder

USER = "muster"
# PostgreSQL refuses to run as root: then it runs as whoever exists for the purpose, on a folder of theirs.
AS_USER: dict[str, Any] = {"user": "nobody", "extra_groups": []} if os.geteuid() == 0 else {}


def binaries() -> Path | None:
    """The newest installed server's folder; None without one."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("pg_ctl")
    paths = [Path(on_path).resolve()] if on_path else found[::-1]
    return paths[0].parent if paths else None


class Cluster:
    """A server's folder. `without_tables` makes a database; `without_rows` empties the one that most tests share."""

    def __init__(self, programs: Path, folder: Path, options: tuple[str, ...]) -> None:
        self.folder = folder
        self.data = folder / "data"
        self._programs = programs
        settings = " ".join(f"-c {option}" for option in options or ("fsync=off", "full_page_writes=off"))
        self._options = f"-c listen_addresses= -k {folder} -c max_connections=200 {settings}"
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

    def start(self) -> None:
        """Start, and return once it answers."""
        self.run("pg_ctl", "start", "-w", "-l", self.folder / "log", "-o", self._options)

    def stop(self, how: str = "immediate") -> None:
        """Stop, as after a power cut or as `how` says."""
        self.run("pg_ctl", "stop", "-w", "-m", how)

    def run(self, program: str, *arguments: str | Path) -> None:
        """Run one of the server's programs on its data. Raises RuntimeError."""
        command = [str(self._programs / program), "-D", str(self.data), *map(str, arguments)]
        log = self.folder / "log"
        # Output goes to a file: the server inherits it, and a pipe would never be closed.
        with (self.folder / program).open("w+") as output:
            if subprocess.run(
                command, stdout=output, stderr=output, cwd=self.folder, check=False, **AS_USER
            ).returncode:
                raise RuntimeError((self.folder / program).read_text() + (log.read_text() if log.exists() else ""))


@contextmanager
def cluster(programs: Path, *options: str, standby_of: Cluster | None = None) -> Iterator[Cluster]:
    """Start a server on a socket in a folder of its own; without `options` it does not survive a power cut."""
    folder = Path(tempfile.mkdtemp(prefix="muster-pg-", dir=memory_folder()))
    if AS_USER:
        shutil.chown(folder, AS_USER["user"])
    server = Cluster(programs, folder, options)
    try:
        if standby_of is None:
            server.run("initdb", "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        else:
            server.run("pg_basebackup", "-h", standby_of.folder, "-U", USER, "-R", "-c", "fast", "--no-sync")
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)
