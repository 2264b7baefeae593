"""Whether the service lives, and whether it should be sent work."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from coordinator.drivers import Driver
from coordinator.errors import Unavailable
from coordinator.tasks import CoordinatorStore


def health_router(driver: Driver, store: CoordinatorStore) -> APIRouter:
    """`/healthz`: the process answers. `/readyz`: it can also serve devices."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz")
    async def healthz() -> Response:
        """The process answers."""
        return JSONResponse({"status": "ok"})

    @router.get("/readyz")
    def readyz() -> Response:
        """The driver runs and the database can be read."""
        if not driver.alive:
            raise Unavailable("the driver is not running")
        store.tasks()
        return JSONResponse({"status": "ready"})

    return router
