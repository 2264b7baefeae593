"""The service: composition, start and stop."""

from __future__ import annotations

import fcntl
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI

from coordinator.api.devices import DeviceApi, device_router
from coordinator.api.health import health_router
from coordinator.api.http import install_problems
from coordinator.api.openapi import describe_messages
from coordinator.drivers import Driver
from coordinator.errors import StoreInUse
from coordinator.keys import Keys
from coordinator.secure import SecureRounds
from coordinator.settings import Settings
from coordinator.tasks import open_coordinator_store
from coordinator.unmasker import Unmasker

_LOG = logging.getLogger(__name__)


def create_app(settings: Settings) -> FastAPI:
    """The application; its lifespan runs the driver. Raises UnsupportedDatabase.

    `serve` sends waiting devices away before it stops. Under another server they hold it up until their wait ends.
    """
    store = open_coordinator_store(settings.database, settings.blobs)
    keys = Keys.beside(settings.database)
    unmasker = Unmasker()
    driver = Driver(store, SecureRounds(keys, unmasker), settings.retry, settings.queue_limit)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        driver.start()
        yield
        driver.stop()
        unmasker.close()
        store.close()

    app = FastAPI(
        title="Muster coordinator",
        lifespan=lifespan,
        docs_url=None,  # the pages that show the document would load scripts from elsewhere
        redoc_url=None,
        # Its spans and logs would carry paths, and a path holds an assignment's secret id.
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
    )
    app.state.driver = driver
    install_problems(app, settings.retry)
    app.include_router(device_router(DeviceApi(driver, store, keys, settings)))
    app.include_router(health_router(driver, store))
    describe_messages(app)
    return app


def serve(settings: Settings, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then finish gracefully. `on_ready` is told the URL once requests are answered.

    Raises StoreInUse, before anything is changed, when another coordinator runs on the database.
    """
    _Server(settings, on_ready or (lambda url: _LOG.info("serving on %s", url))).run()


@contextmanager
def serving(settings: Settings) -> Iterator[str]:
    """Serve from a thread of this process, for as long as the block runs; gives the URL."""
    ready = threading.Event()
    urls: list[str] = []

    def on_ready(url: str) -> None:
        urls.append(url)
        ready.set()

    server = _Server(settings, on_ready)
    thread = threading.Thread(target=server.run, name="coordinator")
    thread.start()
    try:
        while not ready.wait(0.01):
            if not thread.is_alive():
                raise RuntimeError("the coordinator did not start; its log says why")
        yield urls[0]
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def _only_coordinator(database: str) -> Iterator[None]:
    """Hold the database against a second coordinator, which would abandon this one's rounds. Raises StoreInUse."""
    with open(f"{database.removeprefix('sqlite:///')}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreInUse(f"another coordinator runs on {database}; stop it first, or name another --db") from error
        yield


class _Server(uvicorn.Server):
    def __init__(self, settings: Settings, on_ready: Callable[[str], None]) -> None:
        self._app = create_app(settings)
        self._database = settings.database
        # The access log is off because a path holds an assignment's secret id.
        config = uvicorn.Config(self._app, settings.host, settings.port, access_log=False, log_config=None)
        super().__init__(config)
        self._on_ready = on_ready

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        with _only_coordinator(self._database):
            super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Before connections are waited for: otherwise a device that waits to be selected holds them open.
        self._app.state.driver.drain()
        await super().shutdown(sockets)
