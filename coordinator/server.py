"""The two ports of a coordinator in one process: how they open, and how they close without losing anything."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import uvicorn

from coordinator.api.http import FewAtOnce, RequestMiddleware
from coordinator.api.replica_routing import Router
from coordinator.api.service import Service
from coordinator.app import admin_app, device_app
from coordinator.settings import Settings
from ingress.limits import ConnectionLimits
from ingress.server import HttpConfig, listening, open_to

_LOG = logging.getLogger(__name__)
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

    source: the random source that draws cohorts; the system's own by default.

    Raises what `Service.open` does, and ingress.errors.CannotListen when a port is taken.
    """

    def ready(addresses: Addresses) -> None:
        # Objects that are loaded by now stay: Python's garbage collector need not look through them again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_YOUNG)
        if on_ready is not None:
            on_ready(addresses)

    DeviceServer(Service.open(settings, source), ready).run()


class DeviceServer(uvicorn.Server):
    """The device API; it starts the admin API too, and stops it last, so that a stop can be watched."""

    def __init__(self, service: Service, on_ready: Callable[[Addresses], None]) -> None:
        self._service = service
        self._settings = settings = service.settings
        self._http = HttpConfig(tls_cert=settings.tls_cert, tls_key=settings.tls_key, drain_s=settings.drain_s)
        self._limits, self._admin_limits = _limits(service), _limits(service)
        admin = RequestMiddleware(FewAtOnce(admin_app(service)), service.metrics, settings.soon)
        self._admin = _Admin(self._http.uvicorn(admin, self._admin_limits))
        router = Router(device_app(service), service)
        app = RequestMiddleware(router, service.metrics, settings.soon, service.limits, router.is_forwarded)
        super().__init__(self._http.uvicorn(open_to(settings.origins, app), self._limits))
        self._on_ready = on_ready

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on both ports, and serve until it is to stop. Raises ingress.errors.CannotListen."""
        settings = self._settings
        with (
            listening(settings.host, settings.port, self._limits) as devices,
            listening(settings.admin_host, settings.admin_port, self._admin_limits, "--admin-port") as admin,
        ):
            self._admin_socket = admin
            self._service.membership.listen_at(settings.replica_url or self._http.url(devices))
            super().run([devices])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start both ports, and say their URLs."""
        await super().startup(sockets)
        self._serving_admin = asyncio.create_task(self._admin.serve([self._admin_socket]))
        while not self._admin.started and not self._serving_admin.done():
            await asyncio.sleep(0.005)
        if sockets and self.started:
            addresses = Addresses(self._http.url(sockets[0]), self._http.url(self._admin_socket))
            _LOG.info("devices at %s, operators at %s", *addresses)
            if not self._settings.enrols:
                _LOG.warning(
                    "no new device can enrol: give --authority KEY and --authority-url URL, or "
                    "--enrolment-secret-file FILE, or for development --accept-unattested"
                )
            self._on_ready(addresses)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop in order: selection, devices, the admin port."""
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


def _limits(service: Service) -> ConnectionLimits:
    settings, closed = service.settings, service.metrics.closed
    return ConnectionLimits(
        settings.connection_limit,
        settings.address_connection_limit,
        settings.proxies,
        lambda limit: closed.labels(limit).inc(),
        most_unread=settings.answers_bytes - settings.deltas_bytes,
    )
