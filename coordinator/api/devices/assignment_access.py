"""Ownership of assignments: only the device that has an assignment may use its address."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request

from coordinator.api.authentication import signed
from coordinator.api.lru_cache import LruCache
from coordinator.driver.memory.device_presence import Presence
from coordinator.errors import ForeignAssignment
from coordinator.rules.buffers import refusal
from coordinator.rules.states import AssignmentState
from coordinator.store.tasks import CoordinatorStore
from fedcore.report import ReportLayout
from fedcore.wire.messages import Assignment, Receipt

REMEMBERED = 1 << 14
"""Assignments whose unchanging part is kept in memory, 750 bytes each; of others it is read from the database."""


class _Part(NamedTuple):
    """The unchanging part of an assignment: its device, and the layout of its report."""

    device: str
    layout: ReportLayout


class AssignmentAccess:
    """Lets the device that signs a request to its own assignments."""

    def __init__(self, store: CoordinatorStore, presence: Presence) -> None:
        self._store = store
        self._presence = presence
        self._parts: LruCache[str, _Part] = LruCache(REMEMBERED)

    def remember(self, assignment: Assignment, device: str) -> None:
        """Remember an assignment that a device is given, so that its report need not ask the database."""
        # The driver, which gave it, has decoded the plan: nothing is read here.
        plan = self._store.plan(assignment.plan.sha256).of_round(assignment.round)
        self._parts.put(assignment.assignment, _Part(device, plan.report))

    @asynccontextmanager
    async def present(self, assignment: str, request: Request) -> AsyncIterator[ReportLayout]:
        """The layout of an assignment's report; its device counts as present while this request is answered.

        Raises UnknownAssignment; ForeignAssignment if it is another's.
        """
        layout = await self.layout(assignment, request)
        self._presence.begin(assignment)
        broken = False
        try:
            yield layout
        except (ClientDisconnect, asyncio.CancelledError):
            broken = True
            raise
        finally:
            self._presence.end(assignment, broken=broken)

    async def layout(self, assignment: str, request: Request) -> ReportLayout:
        """The layout of an assignment's report. Raises UnknownAssignment; ForeignAssignment if it is another's."""
        part = self._parts.get(assignment)
        if part is None:
            part = self._parts.put(assignment, await run_in_threadpool(self._find, assignment))
        if part.device != signed(request).keyid:
            raise ForeignAssignment("the assignment is another device's; check in for one of your own")
        return part.layout

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

    def _find(self, assignment: str) -> _Part:
        with self._store.database.reading() as records:
            record = records.assignment(assignment)
        return _Part(record.device, self._store.plan(record.plan_sha256).of_round(record.number).report)
