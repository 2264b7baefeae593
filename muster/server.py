"""A coordinator as a process of its own, for commands that need one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 30.0


class ServerError(Exception):
    """The coordinator process did not start."""


@dataclass(frozen=True, slots=True)
class Running:
    """A coordinator process."""

    url: str
    pid: int


@contextmanager
def coordinator_process(folder: Path, database: str, blobs: Path) -> Iterator[str]:
    """As `running_coordinator`; gives the URL for devices."""
    with running_coordinator(folder, database, blobs) as running:
        yield running.url


@contextmanager
def running_coordinator(folder: Path, database: str, blobs: Path, **settings: object) -> Iterator[Running]:
    """Run `muster coordinator serve` on a free loopback port, logging to `folder`; `settings` are further ones of its.

    Devices need no attestation, and without work are sent away for a fraction of a second: this is for one machine.
    Raises ServerError.
    """
    ready, log = folder / "coordinator.url", folder / "coordinator.log"
    command = [sys.executable, "-m", "muster", "coordinator", "serve", "--port", "0", "--db", database]
    command += ["--blobs", str(blobs), "--ready-file", str(ready)]
    environment = {**os.environ, "MUSTER_ADMIN_PORT": "0", "MUSTER_RETRY_MIN_S": "0.1", "MUSTER_RETRY_MAX_S": "0.5"}
    environment["MUSTER_ACCEPT_UNATTESTED"] = "1"
    environment |= {f"MUSTER_{name.upper()}": str(value) for name, value in settings.items()}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"the coordinator did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.02)
        yield Running(ready.read_text(), process.pid)
    finally:
        process.terminate()
        process.wait()
