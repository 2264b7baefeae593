"""Health checks and metrics: `/healthz`, `/readyz` and `/metrics`."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from coordinator.api.admin.routes import ADMIN
from coordinator.api.openapi import HEALTH, Answer
from coordinator.api.service import Service
from coordinator.errors import Unavailable


def health_router(service: Service) -> APIRouter:
    """`/healthz`: the process answers. `/readyz`: it can also serve devices."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", **HEALTH.route({200: Answer("The process answers")}))
    async def healthz() -> Response:
        """The process answers."""
        return JSONResponse({"status": "ok"})

    @router.get("/readyz", **HEALTH.route({200: Answer("Devices may come")}))
    async def readyz() -> Response:
        """The driver runs, reads and writes the database, others reach this replica, and no stop is under way."""
        # Nothing here waits, for a database or for a thread.
        if not service.driver.alive:
            raise Unavailable("the driver is not running")
        if service.driver.draining:
            raise Unavailable("the coordinator is about to stop")
        if service.membership.ousted:
            raise Unavailable("another replica announces the same URL; give each its own as replica_url")
        if service.membership.superseded:
            raise Unavailable("the server's key was succeeded, and this replica has the file of the old one")
        if obstacle := service.driver.obstacle:
            raise Unavailable(obstacle)
        return JSONResponse({"status": "ready"})

    return router


def metrics_router(service: Service) -> APIRouter:
    """`/metrics`, for Prometheus."""
    router = APIRouter(tags=["metrics"])

    @router.get("/metrics", **ADMIN.route({200: Answer("The metrics", ("text/plain",))}))
    def read() -> Response:
        """All metrics, in Prometheus' text format."""
        try:
            service.metrics.tasks_are(service.store.progress())
        except Unavailable:
            # The other metrics do not need the database, but tokens do: without it only the loopback viewer comes here.
            # A token that was good a moment ago is not believed: it may be revoked, and the example's alert that no
            # coordinator gives its metrics is how people learn that the database is away.
            service.metrics.stalled.clear()
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router
