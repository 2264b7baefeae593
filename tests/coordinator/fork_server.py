"""A process that has loaded the coordinator and forks others: that takes a hundredth of the time of a start."""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from unittest.mock import MagicMock

from authority.configuration import AuthorityConfig
from coordinator.failpoints import VARIABLE
from coordinator.store.tasks import open_coordinator_store
from fedcore.signing import SucceedingKey, key_text
from muster.local.server import FOR_ONE_MACHINE, LocalCoordinator
from tests.servers import authority_serving
from tests.stores import without_rows

PROGRAM = "from tests.coordinator.fork_server import main; main()"
LAZY = (
    "pydantic.v1 uvicorn.loops.asyncio uvicorn.lifespan.on uvicorn.protocols.http.httptools_impl "
    "fastapi.telemetry._runtime anyio._backends._asyncio dp_accounting httpcore2 coordinator.store.bounded_connection"
)
"""What a coordinator imports only once it starts, answers or accounts."""
ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0


class SeededSource(random.Random):
    """Draws by its seed and by which devices wait, not by which of them came first."""

    def sample(self, population, k, *, counts=None):
        return super().sample(sorted(population, key=lambda session: session.device), k, counts=counts)


class CoordinatorForkServer:
    """Starts coordinator processes; the caller of `fork` also ends what it started."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def fork(
        self,
        ready: Path,
        settings: dict[str, object],
        environment: dict[str, str],
        seed: int | None = None,
        silence_s: float | None = None,
    ):
        """The id of a process that writes its URLs, for devices and for operators, into `ready` once it answers.

        A `seed` fixes which of the waiting devices are drawn, and in which order. silence_s: how long a device may be
        silent, where that is not the coordinator's own choice.
        """
        self._process.stdin.write(json.dumps([str(ready), settings, environment, seed, silence_s], default=str) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    @contextmanager
    def local(
        self,
        folder: Path,
        seed: int | None = None,
        *,
        silence_s: float | None = None,
        secure: bool = False,
        failpoint: str = "",
        **settings: object,
    ) -> Iterator[LocalCoordinator]:
        """As `muster.local.server.local_coordinator`; `seed` and `silence_s` are those of `fork`.

        failpoint: where it dies, if anywhere.

        The authority is a thread of this process, and knows the coordinator's enrolment secret.
        """
        with ExitStack() as stack:
            shared = {name: value for name, value in settings.items() if name == "enrolment_secret_file"}
            if "page" in settings:  # it speaks to the authority too
                settings.setdefault("port", free_port())
                shared["allowed_origins"] = (f"http://127.0.0.1:{settings['port']}",)
            if secure:
                settings |= stack.enter_context(authority(folder, **shared))
            environment = {VARIABLE: failpoint} if failpoint else {}
            yield stack.enter_context(self._local(folder, seed, silence_s, settings, environment))

    @contextmanager
    def _local(
        self,
        folder: Path,
        seed: int | None,
        silence_s: float | None,
        settings: dict[str, object],
        environment: dict[str, str],
    ) -> Iterator[LocalCoordinator]:
        folder.mkdir(parents=True, exist_ok=True)
        database = str(settings.get("database", f"sqlite:///{folder / 'muster.db'}"))
        blobs, ready = Path(str(settings.get("blobs", folder / "blobs"))), folder / "coordinator.url"
        ready.unlink(missing_ok=True)
        if "database" not in settings and not (folder / "muster.db").exists():
            without_rows(folder / "muster.db")
        given = {"database": database, "blobs": str(blobs), "port": 0} | FOR_ONE_MACHINE | settings
        with open_coordinator_store(database, blobs) as store:
            pid = self.fork(ready, given, environment, seed, silence_s)
            try:
                devices, operators = urls(pid, ready)
                yield LocalCoordinator(devices, operators, pid, database, blobs, store)
            finally:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                wait_until(lambda: not runs(pid))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextmanager
def authority(folder: Path, **config: object) -> Iterator[dict[str, object]]:
    """An enrolment authority that attests nobody, with a new key in a folder; gives the coordinator's settings."""
    folder.mkdir(parents=True, exist_ok=True)
    key = SucceedingKey.new("authority")
    key.save(folder / "authority.key", replace=True)
    given = {"accept_unattested": True} | config
    with authority_serving(AuthorityConfig(key=folder / "authority.key", port=0, **given)) as url:
        yield {"authority": key_text(key.public), "authority_url": url}


@contextmanager
def coordinator_fork_server() -> Iterator[CoordinatorForkServer]:
    """A fork server for as long as the block runs."""
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        yield CoordinatorForkServer(process)
        process.stdin.close()


def urls(pid: int, ready: Path) -> list[str]:
    """Where a process answers, for devices and for operators, once it does."""
    wait_until(lambda: not runs(pid) or (ready.exists() and ready.read_text()))
    assert ready.exists(), "the coordinator ended before it answered; its log is on standard error"
    return ready.read_text().splitlines()


def runs(pid: int) -> bool:
    """Whether there is such a process: the fork server leaves none behind that has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition) -> None:
    """Return once `condition` holds."""
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit, "this did not come about"
        time.sleep(0.005)


def main() -> None:
    """Fork a coordinator for every line of standard input, and say its process id."""
    from coordinator.rules import states
    from coordinator.server import admin_app, serve
    from coordinator.settings import Settings
    from tests.coordinator.operators import operators_when_asked
    from tests.coordinator.ticks import shorten_ticks
    from tests.statements import write_statements_once

    shorten_ticks()
    operators_when_asked()
    write_statements_once()
    for name in LAZY.split():
        __import__(name)
    admin_app(MagicMock())  # for what the first application of a process compiles
    gc.collect()
    gc.freeze()  # what is loaded stays: a child's collector need neither look through its pages nor copy them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the dead
    for line in sys.stdin:
        ready, settings, environment, seed, silence_s = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.environ |= environment
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if silence_s is not None:
                states._LEAST_SILENCE_S = silence_s
            source = None if seed is None else SeededSource(seed)
            serve(Settings(**settings), functools.partial(write_urls, Path(ready)), source)
            os._exit(0)
        print(pid, flush=True)


def write_urls(ready: Path, addresses: tuple[str, str]) -> None:
    """Say where a coordinator answers."""
    ready.write_text("\n".join(addresses))
