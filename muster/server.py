"""A coordinator as a process of its own, for commands that need one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from coordinator.api import tokens
from coordinator.lineage import lineage_key
from coordinator.rules.entities import Role, Task
from coordinator.settings import Settings
from coordinator.store.tasks import CoordinatorStore, TaskSettings, open_coordinator_store
from fedcore.bundle import Bundle
from fedcore.signing import SigningKey
from muster.releasing import released

START_TIMEOUT_S = 30.0
FOR_ONE_MACHINE: Mapping[str, object] = {
    "admin_port": 0,
    "accept_unattested": True,
    "device_limit_per_minute": 0,
    "retry_min_s": 0.1,
    "retry_max_s": 0.5,
}
"""Settings of a coordinator whose devices are on its own machine: they need no attestation, and ask often."""
_STOP_TIMEOUT_S = 60.0


class ServerError(Exception):
    """The coordinator process did not start."""


@dataclass(frozen=True, slots=True)
class LocalCoordinator:
    """A coordinator process: the URLs of its two ports, and the store that it works on."""

    url: str
    admin_url: str
    pid: int
    database: str
    blobs: Path
    store: CoordinatorStore

    def create_task(self, bundle: Bundle, settings: TaskSettings, key: SigningKey) -> Task:
        """Start a task on a bundle, released by `key` if its rounds are secure. Raises InvalidTask."""
        release = None
        if settings.secagg is not None:
            lineage = lineage_key(Settings(database=self.database).keys_file)
            release = released(bundle, settings, key, lineage.signer)
        return self.store.register_task(bundle, settings, release)

    def samples(self, metric: str) -> list[Sample]:
        """The samples of one of the process's metrics so far (docs/operations.md)."""
        _, token = tokens.issue(self.store.database, "local", Role.VIEWER)
        answer = httpx2.get(f"{self.admin_url}/metrics", headers={"Authorization": f"Bearer {token}"})
        families = text_string_to_metric_families(answer.raise_for_status().text)
        return [sample for family in families if family.name == metric for sample in family.samples]


@contextmanager
def local_coordinator(folder: Path, **settings: object) -> Iterator[LocalCoordinator]:
    """Run `muster coordinator serve` on a free loopback port, with all its files in `folder`, which is made if missing.

    `settings` are further settings of the coordinator's. Devices need no attestation and have no rate limit, and
    those without work come back after a fraction of a second: this is for one machine. Raises ServerError.
    """
    with starting_coordinator(folder, **settings) as ready:
        yield ready()


@contextmanager
def starting_coordinator(folder: Path, **settings: object) -> Iterator[Callable[[], LocalCoordinator]]:
    """As `local_coordinator`, but the block begins at once: it gets a function that waits until devices are served.

    That function raises ServerError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    database, blobs = f"sqlite:///{folder / 'muster.db'}", folder / "blobs"
    ready, log = folder / "coordinator.url", folder / "coordinator.log"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "muster", "coordinator", "serve", "--port", "0", "--db", database]
    command += ["--blobs", str(blobs), "--ready-file", str(ready)]
    given = {f"MUSTER_{name.upper()}": str(value) for name, value in {**FOR_ONE_MACHINE, **settings}.items()}
    with open_coordinator_store(database, blobs) as store:
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | given)
        deadline = time.monotonic() + START_TIMEOUT_S

        def started() -> LocalCoordinator:
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise ServerError(f"the coordinator did not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.02)
            url, admin_url = ready.read_text().splitlines()
            return LocalCoordinator(url, admin_url, process.pid, database, blobs, store)

        try:
            yield started
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
