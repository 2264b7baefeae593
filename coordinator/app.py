"""The service: composition, start and stop."""

from __future__ import annotations

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
from coordinator.keys import Keys
from coordinator.routing import Router
from coordinator.settings import Settings
from coordinator.tasks import open_coordinator_store
from coordinator.tenure import Place, Tenure

_LOG = logging.getLogger(__name__)


def create_app(settings: Settings, url: str) -> FastAPI:
    """The application; its lifespan runs the driver. Raises UnsupportedDatabase, KeysDiffer.

    url: where it listens. `serve` sends waiting devices away before it stops. Under another server they hold it up until
    their wait ends.
    """
    store = open_coordinator_store(settings.database, settings.blobs)
    keys = Keys.at(settings.keys_file)
    place = Place(
        url=settings.replica_url or url,
        keys=keys.fingerprint,
        lease_s=settings.lease_s,
        drives=settings.role != "api",
    )
    tenure = Tenure(store.database, place)
    tenure.check_keys()
    driver = Driver(store, tenure, keys, settings.retry, settings.queue_limit)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        driver.start()
        yield
        driver.stop()
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
    app.add_middleware(Router, tenure=tenure, secret=keys.between_replicas, settings=settings)
    return app


def serve(settings: Settings, on_ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then finish gracefully. `on_ready` is told the URL once requests are answered.

    Raises KeysDiffer, before anything is changed, when a coordinator with other keys runs on the database.
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


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens, before anything else is done: others must be told where. Raises OSError."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    def __init__(self, settings: Settings, on_ready: Callable[[str], None]) -> None:
        self._listening = _listen(settings.host, settings.port)
        self._app = create_app(settings, _url(self._listening))
        # The access log is off because a path holds an assignment's secret id.
        super().__init__(uvicorn.Config(self._app, access_log=False, log_config=None))
        self._on_ready = on_ready

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        super().run([self._listening])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready(_url(self._listening))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Before connections are waited for: otherwise a device that waits to be selected holds them open.
        self._app.state.driver.drain()
        await super().shutdown(sockets)
