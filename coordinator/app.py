"""The service composed: device API, admin API, dashboard and driver in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from coordinator.api.admin.problems import install_admin_problems
from coordinator.api.admin.routes import ADMIN, Access, admin_router, health_router, metrics_router
from coordinator.api.devices.assignment_access import AssignmentAccess
from coordinator.api.devices.endpoints import DeviceApi, MaskedReports
from coordinator.api.devices.reports import ReportApi, Senders
from coordinator.api.devices.routes import DEVICES, DeviceRouter, device_routes, paths_of
from coordinator.api.http import install_problems
from coordinator.api.masked_exchange import MaskedExchange
from coordinator.api.page import PAGE, PageFiles
from coordinator.api.replica_channel import ReplicaChannel, ShareSender
from coordinator.api.service import Service
from coordinator.dashboard.routes import dashboard_router
from coordinator.driver.watch import watch_forever
from coordinator.store.garbage_collection import collect_forever


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
    app.include_router(metrics_router(service), dependencies=[Depends(access.metrics)])
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
