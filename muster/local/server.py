"""A coordinator and an enrolment authority as local processes, for commands and tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from coordinator.api import authentication
from coordinator.keys import Keys, lineage_key
from coordinator.rules.entities import Evaluates, Regularly, Role, RoundRecord, Task
from coordinator.rules.states import RoundState
from coordinator.settings import Settings, load_settings
from coordinator.store.database import Database
from coordinator.store.tasks import CoordinatorStore, TaskSettings, open_coordinator_store
from fedcore.bundle import Bundle
from fedcore.signing import SigningKey, SucceedingKey, key_text
from muster.creating import released
from muster.plain import remark

IN_MEMORY, LEAST_FREE_BYTES = "/dev/shm", 1 << 29  # noqa: S108  # each use makes a folder of its own in it


def memory_folder() -> str | None:
    """The folder in memory, if half a gigabyte is free there; else None, for the usual folder of temporary files.

    Databases sync there in no time. If the user set TMPDIR, it is None too.
    """
    if os.environ.get("TMPDIR"):
        return None
    try:
        roomy = shutil.disk_usage(IN_MEMORY).free > LEAST_FREE_BYTES and os.access(IN_MEMORY, os.W_OK)
    except OSError:
        return None
    return IN_MEMORY if roomy else None


START_TIMEOUT_S = 30.0
FOR_ONE_MACHINE: Mapping[str, object] = {
    "admin_port": 0,
    "accept_unattested": True,
    "device_limit_per_minute": 0,
    "retry_min_s": 0.1,
    "retry_max_s": 0.5,
}
"""Settings of a coordinator with devices on its own machine: no attestation, no rate limit, frequent check-ins."""
_STOP_TIMEOUT_S = 60.0


class ServerError(Exception):
    """A process did not start."""


@dataclass(frozen=True, slots=True)
class LocalCoordinator:
    """A coordinator process: the URLs of its two ports, and its store."""

    url: str
    admin_url: str
    pid: int
    database: str
    blobs: Path
    store: CoordinatorStore

    def create_task(
        self, bundle: Bundle, settings: TaskSettings, key: SigningKey, evaluation: Evaluates | Regularly | None = None
    ) -> Task:
        """Start a task on a bundle, released by `key` if its rounds are secure. Raises InvalidTask."""
        release = None
        if settings.secagg is not None:
            lineage = lineage_key(Settings(database=self.database).keys_file).signer
            modules = self.store.algorithm_modules
            release = released(bundle, settings, key, lineage, evaluation=evaluation, algorithm_modules=modules)
        return self.store.register_task(bundle, settings, release, evaluation=evaluation)

    def committed(self, task: str) -> list[RoundRecord]:
        """The committed rounds of a task, in order."""
        return [record for record in self.store.rounds(task) if record.state is RoundState.COMMITTED]

    def samples(self, metric: str) -> list[Sample]:
        """The samples of one of the process's metrics so far (docs/operations.md)."""
        _, token = authentication.issue(self.store.database, "local", Role.VIEWER)
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx2.get(f"{self.admin_url}/metrics", headers=headers, trust_env=False)
        families = text_string_to_metric_families(answer.raise_for_status().text)
        return [sample for family in families if family.name == metric for sample in family.samples]


@contextmanager
def local_coordinator(folder: Path, *, secure: bool = False, **settings: object) -> Iterator[LocalCoordinator]:
    """Run `muster coordinator serve` on a free loopback port, with its files in `folder`, made if missing.

    secure: run an enrolment authority too, which secure rounds need. settings: of the coordinator, beside
    FOR_ONE_MACHINE. Raises ServerError.
    """
    with starting_coordinator(folder, secure=secure, **settings) as ready:
        yield ready()


@contextmanager
def starting_coordinator(
    folder: Path, *, secure: bool = False, **settings: object
) -> Iterator[Callable[[], LocalCoordinator]]:
    """As `local_coordinator`, but the block begins at once, and gets a function that waits for the coordinator.

    That function raises ServerError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    database = str(settings.get("database", f"sqlite:///{folder / 'muster.db'}"))
    blobs = Path(str(settings.get("blobs", folder / "blobs")))
    with ExitStack() as stack:
        modules = load_settings({**settings, "database": database}).algorithm_modules
        store = stack.enter_context(open_coordinator_store(database, blobs, algorithm_modules=modules))
        authority, port = None, 0
        if secure:
            server = Keys.open(Settings(database=database).keys_file, store.database).server
            # The coordinator's page calls the authority too.
            port = _free_port()
            origin = f"http://127.0.0.1:{port}"
            authority = stack.enter_context(starting_authority(folder / "authority", key_text(server.public), origin))
            settings = settings | {"authority": authority.key, "authority_url": authority.url}
        command = ["coordinator", "serve", "--port", str(port), "--db", database, "--blobs", str(blobs)]
        environment = {f"MUSTER_{name.upper()}": str(value) for name, value in {**FOR_ONE_MACHINE, **settings}.items()}
        process = stack.enter_context(_Process.starting("coordinator", folder, command, environment))

        def started() -> LocalCoordinator:
            if authority is not None:
                authority.process.ready()
            url, admin_url = process.ready()
            return LocalCoordinator(url, admin_url, process.pid, database, blobs, store)

        yield started


@dataclass(frozen=True, slots=True)
class StartingAuthority:
    """An authority process: its public key as text, the URL at which it will answer, and its process."""

    key: str
    url: str
    process: _Process


@contextmanager
def starting_authority(folder: Path, server_key: str, origin: str) -> Iterator[StartingAuthority]:
    """Start `muster authority serve` on a free loopback port, with the key in `folder`; no device is attested.

    A missing key is made. It draws beacons for the coordinator with `server_key`. origin: of the web pages that may be
    devices.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "authority.key").exists():
        SucceedingKey.new("authority").save(folder / "authority.key")
    key = SucceedingKey.load("authority", folder / "authority.key")
    port = _free_port()
    command = ["authority", "serve", "--key", str(folder / "authority.key"), "--port", str(port)]
    command += ["--accept-unattested", "--server-key", server_key, "--allowed-origins", origin]
    with _Process.starting("authority", folder, command, {}) as process:
        yield StartingAuthority(key_text(key.public), f"http://127.0.0.1:{port}", process)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class _Process:
    """A process of `muster`, which writes a file once it is ready."""

    def __init__(self, name: str, ready: Path, log: Path, process: subprocess.Popen[bytes]) -> None:
        self._name, self._ready, self._log, self._process = name, ready, log, process
        self._deadline = time.monotonic() + START_TIMEOUT_S
        self.pid = process.pid

    @classmethod
    @contextmanager
    def starting(
        cls, name: str, folder: Path, command: Sequence[str], environment: Mapping[str, str]
    ) -> Iterator[_Process]:
        """The process of a command, until the block ends."""
        ready, log = folder / f"{name}.url", folder / f"{name}.log"
        ready.unlink(missing_ok=True)
        words = [sys.executable, "-m", "muster", *command, "--ready-file", str(ready)]
        with log.open("wb") as output:
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment)
        try:
            yield cls(name, ready, log, process)
        finally:
            _end(process)

    def ready(self) -> list[str]:
        """The lines of its file, once it is ready. Raises ServerError."""
        while not self._ready.exists():
            if self._process.poll() is not None or time.monotonic() > self._deadline:
                raise ServerError(f"the {self._name} did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.02)
        return self._ready.read_text().splitlines()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


FOLDER = Path("muster-trial")
"""In the working folder: the keys of a trial, which a later one uses again."""
RELEASE_KEY = FOLDER / "release.pem"


@contextmanager
def trial(settings: Settings) -> Iterator[Settings]:
    """The settings with which a coordinator goes by an authority that runs beside it, until the block ends.

    Both take devices without evidence. Raises ServerError.
    """
    with closing(Database(settings.database)) as database:
        server = key_text(Keys.open(settings.keys_file, database).server.public)
    with starting_authority(FOLDER, server, f"http://{settings.host}:{settings.port}") as authority:
        authority.process.ready()
        if not RELEASE_KEY.exists():
            SigningKey.new(RELEASE_KEY)
        remark(
            f"trial: one machine has the keys of coordinator, authority and releases (in {FOLDER}/), and any device "
            "may enrol. Secure rounds run as they do in the field, but protect nobody's reports from this machine"
        )
        given = {"authority": authority.key, "authority_url": authority.url, "accept_unattested": True}
        yield settings.model_copy(update=given)
