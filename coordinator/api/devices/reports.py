"""Reports over HTTP: in one request, or in parts that survive a cut connection. Spec: docs/spec/wire.md §6."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from coordinator.api.authentication import demand_body, signed
from coordinator.api.devices.assignment_access import AssignmentAccess, Owned
from coordinator.api.devices.uploads import Part, Senders, Upload, Uploads
from coordinator.api.http import ONWARD, answer, aside, read_into
from coordinator.api.service import Service
from coordinator.commands import CountReport
from coordinator.errors import (
    ConflictingReport,
    InvalidReport,
    MalformedMessage,
    TooLarge,
    Unavailable,
    UnknownAssignment,
)
from coordinator.rules.states import AssignmentState
from coordinator.store.records.records import Records
from fedcore import checkpoint
from fedcore.errors import ReportError, SchemaError, WrongBody
from fedcore.params import FLOAT_BYTES, Float32
from fedcore.quantisation import dequantise, upload_bytes
from fedcore.report import ReportLayout, all_finite
from fedcore.wire.messages import Receipt
from fedcore.wire.signatures import sha256_in
from ingress.connection import Body

_LOG = logging.getLogger(__name__)
HEADER_BYTES = 4096
"""Room for a safetensors header around the one vector of a report."""
_CHECKED_TOGETHER = 1 << 16
"""Values that are checked together as they come."""
_SWEEP_S = 1.0
_NUMBER = re.compile(r"[0-9]{1,15}")
_Act: TypeAlias = Callable[[str, Request, Owned], Awaitable[Response]]
_LAST = {"?0": False, "?1": True}


class ReportApi:
    """The endpoints for the report of an assignment."""

    def __init__(self, service: Service, assignments: AssignmentAccess, senders: Senders) -> None:
        self._driver = service.driver
        self._store = service.store
        self._assignments = assignments
        self._room = service.limits.reports
        self._uploads = Uploads(self._room)
        self._senders = senders
        self._counting: dict[Upload, asyncio.Task[Receipt]] = {}

    async def put(self, assignment: str, request: Request) -> ASGIApp:
        """Deliver an assignment's report. Sending the same bytes again gives the same receipt."""
        return await self._where_it_counts(self._put, assignment, request)

    async def head(self, assignment: str, request: Request) -> ASGIApp:
        """Upload-Offset: the bytes of the report that have arrived. Upload-Complete: whether it was counted."""
        return await self._where_it_counts(self._head, assignment, request)

    async def patch(self, assignment: str, request: Request) -> ASGIApp:
        """Bring the next part of the report; the last one is answered with the receipt."""
        return await self._where_it_counts(self._patch, assignment, request)

    async def _where_it_counts(self, act: _Act, assignment: str, request: Request) -> ASGIApp:
        """Take a report here, also for a driver elsewhere with whom this replica shares the round; else pass it on."""
        onward: Callable[[bytes | None], ASGIApp] | None = request.scope.get(ONWARD)
        if onward is None:
            async with self._assignments.present(assignment, request) as owned:
                return await act(assignment, request, owned)
        shared = await self._assignments.shared(assignment, request)
        if shared is None:
            return onward(None)
        with self._driver.shared.expecting(assignment, shared.id):
            return await act(assignment, request, Owned(signed(request).keyid, shared.layout, shared))

    async def _put(self, assignment: str, request: Request, owned: Owned) -> Response:
        device, digest = signed(request).keyid, signed(request).digest
        if digest is None:
            raise MalformedMessage("a report needs a body, and its digest as Content-Digest")
        async with self._senders.one_at_a_time(device, request, assignment):
            counted = await self._counted(assignment, digest, owned)
            return answer(counted or await self._receive(assignment, request, digest, owned))

    async def _receive(self, assignment: str, request: Request, digest: bytes, owned: Owned) -> Receipt:
        """The receipt of a report that is waited for, once it has arrived. Room is reserved as long as that takes."""
        most = _most(owned.layout)
        self._uploads.drop_of(signed(request).keyid)
        with self._room.hold(most) as memory:
            body = ReportBody(memory, owned.layout)
            await read_into(body, request, most)
            demand_body(request, body.digest())
            return await self._count(assignment, digest, body.data, owned, finite=body.finite)

    async def _head(self, assignment: str, request: Request, _: Owned) -> Response:
        device, headers = signed(request).keyid, {"Cache-Control": "no-store", "Upload-Complete": "?1"}
        if await self._assignments.receipt(assignment) is None:
            async with self._senders.one_at_a_time(device, request, assignment):
                size = self._uploads.size(device, assignment)
            headers |= {"Upload-Complete": "?0", "Upload-Offset": str(size)}
        return Response(status_code=204, headers=headers)

    async def _patch(self, assignment: str, request: Request, owned: Owned) -> Response:
        part, device = _announced(request), signed(request).keyid
        if part.length > _most(owned.layout):
            raise TooLarge(f"this report has at most {_most(owned.layout)} bytes")
        async with self._senders.one_at_a_time(device, request, assignment):
            counted = await self._counted(assignment, part.sha256, owned)
            if counted is not None:
                return answer(counted, {"Upload-Complete": "?1"})
            upload = self._uploads.take(device, assignment, part)
            try:
                await _append(request, upload)
            except WrongBody:
                self._uploads.drop(upload)
                raise
        if not part.last:
            headers = {"Upload-Offset": str(upload.size), "Upload-Complete": "?0"}
            return Response(status_code=204, headers=headers)
        return await self._finish(upload, owned)

    async def _counted(self, assignment: str, sha256: bytes, owned: Owned) -> Receipt | None:
        """The receipt of a report with this digest that was counted; None while one is waited for.

        While this replica sums reports of the round for another one, the transaction that writes receipts finds it.
        Raises ConflictingReport or NoLongerNeeded.
        """
        if owned.shared is not None and self._driver.shared.takes(owned.shared.id):
            return None
        counted = await self._assignments.receipt(assignment)
        if counted is not None and counted.sha256 != sha256.hex():
            raise ConflictingReport(f"a report with digest {counted.sha256[:12]}… was accepted; this is another")
        return counted

    async def sweep_forever(self) -> None:
        """Forget parts of reports that nobody waits for any more, and hang up on those on their way, once a second."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                held = {*self._uploads.assignments, *self._senders.assignments} - self._driver.shared.awaits()
                if unsure := [one for one in held if not self._driver.presence.is_open(one)]:
                    over = await run_in_threadpool(self._over, unsure)
                    self._uploads.drop_for(over)
                    self._senders.cut_off(over)
            except Exception as error:
                _LOG.error("reports in parts could not be looked through: %s", error)

    async def _finish(self, upload: Upload, owned: Owned) -> Response:
        """The receipt of a report that has arrived. A second request for it waits for the same receipt."""
        counting = self._counting.get(upload)
        if counting is None:
            counting = self._counting[upload] = asyncio.create_task(self._settle(upload, owned))
        return answer(await asyncio.shield(counting), {"Upload-Complete": "?1"})

    async def _settle(self, upload: Upload, owned: Owned) -> Receipt:
        """Count a report that has arrived. It is kept only when it cannot be counted yet."""
        try:
            if not upload.arrived:
                raise WrongBody("the report does not have Upload-Length and Repr-Digest; send it again, from 0")
            receipt = await self._count(upload.assignment, upload.sha256, upload.data, owned)
        except Unavailable:
            raise
        except BaseException:
            self._uploads.drop(upload)
            raise
        else:
            self._uploads.drop(upload)
            return receipt
        finally:
            del self._counting[upload]

    async def _count(
        self, assignment: str, digest: bytes, data: memoryview, owned: Owned, *, finite: bool = False
    ) -> Receipt:
        report_L = await aside(len(data), parse_report, data, owned.layout, finite=finite)
        counting = CountReport(assignment, digest.hex(), report_L, owned.shared)
        return await asyncio.wrap_future(self._driver.submit(counting))

    def _over(self, assignments: Sequence[str]) -> list[str]:
        with self._store.database.reading() as records:
            return [one for one in assignments if not _waits(records, one)]


class ReportBody(Body):
    """A report that arrives, whose values are checked while they are in the cache.

    `finite` holds only for a report as `checkpoint.encode` makes it.
    """

    def __init__(self, memory: memoryview, layout: ReportLayout) -> None:
        super().__init__(memory)
        # Quantised values are looked at when all have come.
        self._checked = len(memory) if layout.bits else checkpoint.values_at(layout.wire[0])
        self._finite = True

    def grow(self, count: int) -> None:
        """Take `count` bytes that were written to the beginning of `free_space`."""
        super().grow(count)
        self._check(at_least=_CHECKED_TOGETHER)

    @property
    def finite(self) -> bool:
        """Whether all values that have come are finite."""
        self._check(at_least=1)
        return self._finite

    def _check(self, at_least: int) -> None:
        whole = (self.size - self._checked) // FLOAT_BYTES
        if whole >= at_least:
            values = np.frombuffer(self.data, np.float32, whole, self._checked)
            self._finite = self._finite and all_finite(values)
            self._checked += whole * FLOAT_BYTES


def parse_report(data: memoryview, layout: ReportLayout, *, finite: bool = False) -> Float32:
    """The report in a body: float32 (L,), checked against its layout. Raises InvalidReport.

    finite: whether its values are known to be, if it is as `checkpoint.encode` makes it.
    """
    spec = layout.wire[0]
    try:
        if layout.bits:
            report_L = dequantise(data, layout)
            layout.check(report_L)
            return report_L
        report_L = checkpoint.view(data, spec)
        layout.check(report_L, finite=finite and checkpoint.is_plain(data, spec))
    except (SchemaError, ReportError) as error:
        raise InvalidReport(str(error)) from error
    return report_L


def _waits(records: Records, assignment: str) -> bool:
    """Whether an assignment's report may still come. One without a row, as garbage collection leaves none, is over."""
    try:
        return records.assignment(assignment).state is AssignmentState.ASSIGNED
    except UnknownAssignment:
        return False


def _most(layout: ReportLayout) -> int:
    return upload_bytes(layout) + (0 if layout.bits else HEADER_BYTES)


def _announced(request: Request) -> Part:
    """The part that the header fields of a PATCH announce. Raises MalformedMessage."""
    offset, length = (request.headers.get(name, "") for name in ("upload-offset", "upload-length"))
    last, sha256 = _LAST.get(request.headers.get("upload-complete", "")), sha256_in(request.headers.get("repr-digest"))
    if not _NUMBER.fullmatch(offset) or not _NUMBER.fullmatch(length) or last is None or sha256 is None:
        raise MalformedMessage(
            "a part needs Upload-Offset, Upload-Length, Upload-Complete: ?0 or ?1, and Repr-Digest: sha-256=:<base64>:"
        )
    return Part(int(offset), last, int(length), sha256)


async def _append(request: Request, upload: Upload) -> None:
    """Add a request's body to an upload as it comes; bytes that came before a connection broke stay.

    Raises WrongBody when the body is not the signed one.
    """
    digest = hashlib.sha256()
    async for chunk in request.stream():
        upload.append(chunk)
        digest.update(chunk)
    demand_body(request, digest.digest())
