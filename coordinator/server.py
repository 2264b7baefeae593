"""A coordinator in one process: device API, admin API, dashboard and driver composed, and its two ports.

The ports open together, and close without losing anything.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

import uvicorn
from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from coordinator.api.admin import ADMIN, Access, admin_router, health_router, metrics_router
from coordinator.api.devices.blobs import AssignmentAccess
from coordinator.api.devices.reports import ReportApi, Senders
from coordinator.api.devices.routes import DEVICES, DeviceApi, DeviceRouter, MaskedReports, device_routes, paths_of
from coordinator.api.http import FewAtOnce, RequestMiddleware, install_admin_problems, install_problems
from coordinator.api.masked_exchange import MaskedExchange, ReplicaChannel, ShareSender
from coordinator.api.page import PAGE, PageFiles
from coordinator.api.replica_routing import Router
from coordinator.api.service import Service
from coordinator.dashboard.pages import dashboard_router
from coordinator.driver.watch import watch_forever
from coordinator.rules.entities import Role
from coordinator.settings import Settings
from coordinator.store.garbage_collection import collect_forever
from ingress.limits import ConnectionLimits
from ingress.server import HttpConfig, listening, open_to


def device_app(service: Service) -> DeviceRouter:
    """What devices talk to; its lifespan runs the driver. The framework has health, the document and the page only.

    `serve` sends waiting devices away before it stops. Under another server they hold it up until their wait ends.
    """
    assignments = AssignmentAccess(service)
    senders = Senders()
    reports = ReportApi(service, assignments, senders)
    channel = ReplicaChannel(service)
    exchange = MaskedExchange(service, channel)
    masked = MaskedReports(service, senders, exchange)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        shares = ShareSender(service, channel)
        aside = [asyncio.create_task(reports.sweep_forever()), asyncio.create_task(shares.send_forever())]
        if (every_h := service.settings.collect_every_h) and service.settings.role != "api":
            collecting = collect_forever(service.store, service.settings.retention, 3600 * every_h)
            aside.append(asyncio.create_task(collecting))
        service.authenticator.begin()
        service.driver.start()
        if service.settings.role != "api":
            store, here = service.store.database, service.membership.id
            watching = watch_forever(store, service.settings, here, service.webhook, service.metrics)
            aside.append(asyncio.create_task(watching))
        service.lines.begin()
        yield
        service.driver.drain()
        await asyncio.gather(shares.send_last(), exchange.send_last())
        await exchange.close()
        service.lines.end()
        for task in aside:
            task.cancel()
        await asyncio.wait(aside)
        await channel.close()
        service.driver.stop()
        service.unmasker.close()
        service.beacons.close()
        service.store.close()

    routes = device_routes(DeviceApi(service, assignments, senders, masked), reports, service.authenticator)
    app = _application("Muster coordinator", lifespan)
    install_problems(app, service.settings.soon)
    app.include_router(health_router(service))
    if service.settings.page is not None:
        authority = service.settings.authority_url
        app.mount(PAGE, PageFiles(service.settings.page, (authority,) if authority else ()))
    DEVICES.complete(app, paths_of(routes))
    return DeviceRouter(routes, app, service.settings.soon)


def admin_app(service: Service) -> FastAPI:
    """What operators and their tools talk to."""
    app = _application("Muster coordinator: administration")
    install_problems(app, service.settings.soon)
    install_admin_problems(app, service.settings.soon)
    access = Access(service)
    app.include_router(health_router(service))
    app.include_router(metrics_router(service), dependencies=[Depends(access.guard(Role.METRICS, whole=True))])
    app.include_router(admin_router(service, access))
    app.include_router(dashboard_router(service, access))
    app.mount("/v1", _devices_port(service))
    ADMIN.complete(app)
    return app


def _devices_port(service: Service) -> ASGIApp:
    """The answer to a device at the operators' port: which port is for devices."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        raise HTTPException(404, f"this is the port for operators; devices use {service.membership.url}")

    return answer


def _application(title: str, lifespan: Lifespan[FastAPI] | None = None) -> FastAPI:
    return FastAPI(
        title=title,
        lifespan=lifespan,
        docs_url=None,  # the pages that show the document would load scripts from elsewhere
        redoc_url=None,
        # Its spans and logs would carry paths, and a path holds an assignment's secret id.
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
    )


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

    Raises what `Service.open` does, and ingress.limits.CannotListen when a port is taken.
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
        """Listen on both ports, and serve until it is to stop. Raises ingress.limits.CannotListen."""
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
