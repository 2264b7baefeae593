"""Masked reports of secure rounds that other replicas drive, over HTTP. Spec: docs/spec/wire.md §8."""

from __future__ import annotations

import asyncio

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from coordinator.api.authentication import demand_body, signed
from coordinator.api.devices.reports import HEADER_BYTES
from coordinator.api.devices.uploads import Senders
from coordinator.api.http import ONWARD, read_hashed
from coordinator.api.lru_cache import LruCache
from coordinator.api.masked_exchange import MaskedExchange
from coordinator.api.service import Service
from coordinator.rules.assignment_ids import round_in
from fedcore.report import ReportLayout

_ROUNDS = 1 << 8


def most_bytes(layout: ReportLayout) -> int:
    """The longest masked report: at most half a word per value, and a word for each segment and the checks."""
    return 4 * layout.size + 8 * len(layout.segments) + HEADER_BYTES


class MaskedReports:
    """The endpoint for masked reports that this replica adds for a driver elsewhere."""

    def __init__(self, service: Service, senders: Senders, exchange: MaskedExchange) -> None:
        self._store = service.store
        self._keys = service.keys
        self._shared = service.driver.shared
        self._room = service.limits.reports
        self._senders = senders
        self._exchange = exchange
        self._most: LruCache[int, int] = LruCache(_ROUNDS)
        self._finding = asyncio.Lock()

    async def put(self, assignment: str, request: Request) -> ASGIApp:
        """Take a masked report here; the next message comes from the driver. Pass on what cannot be checked here."""
        device = signed(request).keyid
        round_id = None if self._shared.leaving else round_in(self._keys.of_assignments, assignment, device)
        if round_id is None:
            onward: ASGIApp = request.scope[ONWARD](None)
            return onward
        most = await self._most_bytes(round_id, assignment)
        with self._shared.expecting(assignment, round_id):
            async with self._senders.one_at_a_time(device, request, assignment):
                with self._room.reserve(most):
                    message, digest = await read_hashed(request, most)
                    demand_body(request, digest)
                    await self._exchange.take(assignment, bytes(message), digest.hex())
        return Response(status_code=204)

    async def _most_bytes(self, round_id: int, assignment: str) -> int:
        found = self._most.get(round_id)
        if found is None:
            async with self._finding:  # the first reports of a round come together
                found = self._most.get(round_id)
                if found is None:
                    found = self._most.put(round_id, await run_in_threadpool(self._find, assignment))
        return found

    def _find(self, assignment: str) -> int:
        with self._store.database.reading() as records:
            record = records.assignment(assignment)
        return most_bytes(self._store.plan(record.plan_sha256).of_round(record.number).report)
