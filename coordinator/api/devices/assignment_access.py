"""Ownership of assignments: only the device that has an assignment may use its address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from coordinator.api.authentication import LruCache, signed
from coordinator.api.service import Service
from coordinator.errors import ForeignAssignment
from coordinator.rules.buffers import refusal
from coordinator.rules.replicas import SharedRound, may_share, round_in
from coordinator.rules.states import AssignmentState
from fedcore.codecs import RoundKey
from fedcore.report import ReportLayout
from fedcore.wire.messages import Assignment, Receipt

_ROUNDS = 1 << 8
REMEMBERED = 1 << 14
"""Assignments whose unchanging part is kept in memory, 750 bytes each; of others it is read from the database."""


class Owned(NamedTuple):
    """The unchanging part of an assignment: its device, and the layout of its report.

    shared: its round, where another replica drives that and this one may sum its reports.
    """

    device: str
    layout: ReportLayout
    shared: SharedRound | None = None


class AssignmentAccess:
    """Lets the device that signs a request to its own assignments."""

    def __init__(self, service: Service) -> None:
        self._store = service.store
        self._keys = service.keys
        self._presence = service.driver.presence
        self._sums = service.driver.shared
        self._parts: LruCache[str, Owned] = LruCache(REMEMBERED)
        self._finding = asyncio.Lock()
        self._shared: LruCache[int, tuple[SharedRound | None]] = LruCache(_ROUNDS)

    def remember(self, assignment: Assignment, device: str) -> None:
        """Remember an assignment that a device is given, so that its report need not ask the database."""
        # The driver, which gave it, has decoded the plan: nothing is read here.
        plan = self._store.plan(assignment.plan.sha256).of_round(assignment.round)
        self._parts.put(assignment.assignment, Owned(device, plan.report))

    async def shared(self, assignment: str, request: Request) -> SharedRound | None:
        """The round of an assignment that another replica made, where this one may take its report; else None.

        Its id says whose it is, so nothing is read but once for a round.
        """
        device = signed(request).keyid
        round_id = None if self._sums.leaving else round_in(self._keys.of_assignments, assignment, device)
        if round_id is None or self._sums.closed(round_id):
            return None
        found = self._shared.get(round_id)
        if found is None:
            async with self._finding:  # the first reports of a round come together
                found = self._shared.get(round_id)
                if found is None:
                    found = self._shared.put(round_id, (await run_in_threadpool(self._find_shared, assignment),))
        return found[0]

    @asynccontextmanager
    async def present(self, assignment: str, request: Request) -> AsyncIterator[Owned]:
        """The part of an assignment; its device counts as present while this request is answered.

        Raises UnknownAssignment; ForeignAssignment if it is another's.
        """
        part = await self.part(assignment, request)
        self._presence.begin(assignment)
        broken = False
        try:
            yield part
        except (ClientDisconnect, asyncio.CancelledError):
            broken = True
            raise
        finally:
            self._presence.end(assignment, broken=broken)

    async def part(self, assignment: str, request: Request) -> Owned:
        """The part of an assignment. Raises UnknownAssignment; ForeignAssignment if it is another's."""
        part = self._parts.get(assignment)
        if part is None:
            part = self._parts.put(assignment, await run_in_threadpool(self._find, assignment))
        if part.device != signed(request).keyid:
            raise ForeignAssignment("the assignment is another device's; check in for one of your own")
        return part

    async def receipt(self, assignment: str) -> Receipt | None:
        """The receipt of a report that was counted; None while one is waited for. Raises NoLongerNeeded.

        The database is not asked about an assignment that is open in this process.
        """
        return None if self._presence.is_open(assignment) else await run_in_threadpool(self._receipt, assignment)

    def _receipt(self, assignment: str) -> Receipt | None:
        with self._store.database.reading() as records:
            record = records.assignment(assignment)
        if record.report_sha256 is not None:
            return Receipt(assignment=record.id, task=record.task, round=record.number, sha256=record.report_sha256)
        if record.state is not AssignmentState.ASSIGNED:
            raise refusal(record.state)
        return None

    def _find(self, assignment: str) -> Owned:
        with self._store.database.reading() as records:
            record = records.assignment(assignment)
        return Owned(record.device, self._store.plan(record.plan_sha256).of_round(record.number).report)

    def _find_shared(self, assignment: str) -> SharedRound | None:
        with self._store.database.reading() as records:
            record = records.assignment(assignment)
            settings = records.task(record.task).settings
        if not may_share(settings):
            return None
        layout = self._store.plan(record.plan_sha256).of_round(record.number).report
        key, buffered = RoundKey(settings.seed, record.number), settings.buffered is not None
        return SharedRound(record.round, layout, settings.clear, key, buffered)
