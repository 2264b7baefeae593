"""The two ports of a coordinator in one process: how they open, and how they close without losing anything."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, cast

import uvicorn
from starlette.types import ASGIApp

from coordinator.api.connection import Connection
from coordinator.api.connection_limits import ConnectionLimits
from coordinator.api.fast_path import FastPath
from coordinator.api.middleware import RequestMiddleware
from coordinator.api.replica_routing import Router
from coordinator.api.service import Service
from coordinator.app import admin_app, device_app
from coordinator.errors import CannotListen
from coordinator.settings import Settings

_LOG = logging.getLogger(__name__)
_BACKLOG = 2048
_GC_YOUNG = 10_000
"""Objects between two looks of the collector through the youngest: hardly anything here is cyclic garbage."""


class Addresses(NamedTuple):
    """URLs: where devices are served, and where operators are."""

    devices: str
    admin: str


def serve(
    settings: Settings, on_ready: Callable[[Addresses], None] | None = None, source: random.Random | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then finish gracefully. `on_ready` is called once requests are answered.

    source: the chance by which cohorts are drawn; the system's own if not given.

    Raises what `Service.open` does, and CannotListen when a port is taken.
    """

    def ready(addresses: Addresses) -> None:
        # Objects that are loaded by now stay: Python's garbage collector need not look through them again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_YOUNG)
        if on_ready is not None:
            on_ready(addresses)

    _Devices(Service.open(settings, source), ready).run()


@contextmanager
def serving(settings: Settings) -> Iterator[str]:
    """Serve from a thread of this process, for as long as the block runs; gives the URL for devices."""
    with serving_both(settings) as addresses:
        yield addresses.devices


@contextmanager
def serving_both(settings: Settings) -> Iterator[Addresses]:
    """As `serving`; gives both URLs."""
    ready = threading.Event()
    found: list[Addresses] = []

    def on_ready(addresses: Addresses) -> None:
        found.append(addresses)
        ready.set()

    server = _Devices(Service.open(settings), on_ready)
    thread = threading.Thread(target=server.run, name="coordinator")
    thread.start()
    try:
        while not ready.wait(0.01):
            if not thread.is_alive():
                raise RuntimeError("the coordinator did not start; its log says why")
        yield found[0]
    finally:
        server.should_exit = True
        thread.join()


class _Devices(uvicorn.Server):
    """The device API; it starts the admin API too, and stops it last, so that a stop can be watched."""

    def __init__(self, service: Service, on_ready: Callable[[Addresses], None]) -> None:
        self._service = service
        self._settings = settings = service.settings
        admin = RequestMiddleware(admin_app(service), service.metrics, settings.soon)
        self._admin = _Admin(_config(admin, service))
        router = Router(FastPath(device_app(service)), service)
        app = RequestMiddleware(router, service.metrics, settings.soon, service.limits, router.is_forwarded)
        super().__init__(_config(app, service))
        self._on_ready = on_ready

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        settings = self._settings
        with (
            _listening(settings.host, settings.port, "--port") as devices,
            _listening(settings.admin_host, settings.admin_port, "--admin-port") as admin,
        ):
            self._admin_socket = admin
            self._service.membership.listen_at(settings.replica_url or self._url(devices))
            super().run([devices])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._serving_admin = asyncio.create_task(self._admin.serve([self._admin_socket]))
        while not self._admin.started and not self._serving_admin.done():
            await asyncio.sleep(0.005)
        if sockets and self.started:
            addresses = Addresses(self._url(sockets[0]), self._url(self._admin_socket))
            _LOG.info("devices at %s, operators at %s", *addresses)
            if not self._settings.enrols:
                _LOG.warning(
                    "no new device can enrol: give --authority KEY and --authority-url URL, or "
                    "--enrolment-secret-file FILE, or for development --accept-unattested"
                )
            self._on_ready(addresses)

    def _url(self, listener: socket.socket) -> str:
        scheme = "https" if self._settings.tls_cert else "http"
        host, port = listener.getsockname()[:2]
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Before connections are waited for: otherwise a device that waits to be selected holds them open.
        self._service.driver.drain()
        until = time.monotonic() + self._settings.drain_s
        await super().shutdown(sockets)
        self._admin.config.timeout_graceful_shutdown = max(0, math.ceil(until - time.monotonic()))
        self._admin.should_exit = True
        await self._serving_admin


class _Admin(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the device API, which ends this server too."""
        yield


def _config(app: ASGIApp, service: Service) -> uvicorn.Config:
    settings = service.settings
    protocol = partial(Connection, ConnectionLimits(settings, service.metrics))
    return uvicorn.Config(
        app,
        http=cast("type[Connection]", protocol),
        ws="none",
        loop="asyncio",  # also where uvloop is installed, whose turns are not what CheckInShedder takes them for
        access_log=False,  # a path holds an assignment's secret id
        log_config=None,
        backlog=_BACKLOG,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        server_header=False,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_graceful_shutdown=math.ceil(settings.drain_s),
    )


@contextmanager
def _listening(host: str, port: int, option: str) -> Iterator[socket.socket]:
    with _opened(host, port, option) as listener:
        # Connections inherit it. asyncio sets it only on sockets that it made itself; without it the second half of an
        # answer waits for the acknowledgement of the first, which many systems hold back for 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


def _opened(host: str, port: int, option: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = f"port {port} is taken" if taken else f"cannot listen on port {port}: {error.strerror or error}"
        raise CannotListen(f"{host}: {why}; choose another with {option} (0 takes a free one)") from error
