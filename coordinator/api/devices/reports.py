"""Reports over HTTP: in one request, or in parts that survive a cut connection. Spec: docs/spec/wire.md §6."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from coordinator import errors
from coordinator.api.authentication import demand_body, signed
from coordinator.api.devices.blobs import AssignmentAccess, Owned
from coordinator.api.http import ONWARD, answer, in_thread_if_large, read_into
from coordinator.api.limits import MemoryBudget
from coordinator.api.service import Service
from coordinator.commands import CountReport
from coordinator.rules.states import AssignmentState
from coordinator.store.records.records import Records
from fedcore import checkpoint
from fedcore.compression import dequantise, upload_bytes
from fedcore.errors import ReportError, SchemaError, WrongBody
from fedcore.params import FLOAT_BYTES, Float32
from fedcore.report import ReportLayout, all_finite
from fedcore.wire.messages import Receipt
from fedcore.wire.signatures import sha256_in
from ingress.connection import Body, hang_up, memory_of, stop_receiving


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a report, as its request announces it: bytes from `offset` on, and the report's digest and length.

    last: whether no part follows.
    """

    offset: int
    last: bool
    length: int
    sha256: bytes


class Upload:
    """A report that arrives in parts, hashed as it comes."""

    def __init__(self, device: str, assignment: str, part: Part) -> None:
        self.device = device
        self.assignment = assignment
        self.sha256 = part.sha256
        self.length = part.length
        self.data = memory_of(part.length)
        self.size = 0
        self._digest = hashlib.sha256()

    @property
    def arrived(self) -> bool:
        """Whether all of it has arrived, with the announced digest."""
        return self.size == self.length and self._digest.digest() == self.sha256

    def append(self, chunk: bytes) -> None:
        """Add bytes. Raises MalformedMessage past the end, NoLongerNeeded once it was dropped."""
        end = self.size + len(chunk)
        if end > self.length:
            raise errors.MalformedMessage("the body reaches beyond Upload-Length")
        if not self.data:
            raise errors.NoLongerNeeded("the round needs no report of this assignment any more")
        self.data[self.size : end] = chunk
        self._digest.update(chunk)
        self.size = end

    def close(self) -> None:
        """Take no more, and release the memory, though a request may still refer to this."""
        self.data = memoryview(b"")


class Uploads:
    """Unfinished reports, one of each device. Their announced bytes are reserved in `room`."""

    def __init__(self, room: MemoryBudget) -> None:
        self._room = room
        self._held: dict[str, Upload] = {}

    @property
    def assignments(self) -> list[str]:
        """The assignments with an unfinished report."""
        return [upload.assignment for upload in self._held.values()]

    def size(self, device: str, assignment: str) -> int:
        """Bytes of a report that have arrived."""
        upload = self._of(device, assignment)
        return upload.size if upload else 0

    def take(self, device: str, assignment: str, part: Part) -> Upload:
        """The upload to which a part is to be added. What the device has sent for another assignment is dropped.

        Raises MismatchingOffset, ConflictingReport when another report has begun to arrive, TooLarge, or Unavailable
        when there is no memory for one more.
        """
        upload, size = self._of(device, assignment), self.size(device, assignment)
        if part.offset != size:
            raise errors.MismatchingOffset(f"{size} bytes of this report have arrived", size)
        if upload is None:
            self.drop_of(device)
            self._room.take(part.length)
            upload = self._held[device] = Upload(device, assignment, part)
        elif (upload.sha256, upload.length) != (part.sha256, part.length):
            raise errors.ConflictingReport(
                "another report has begun to arrive for this assignment; a device sends only one"
            )
        return upload

    def drop(self, upload: Upload) -> None:
        """Forget an upload, if it is still kept."""
        if self._held.get(upload.device) is upload:
            del self._held[upload.device]
            upload.close()
            self._room.free(upload.length)

    def drop_of(self, device: str) -> None:
        """Forget what a device has sent."""
        if (upload := self._held.get(device)) is not None:
            self.drop(upload)

    def drop_for(self, assignments: Collection[str]) -> None:
        """Forget reports that are needed no more."""
        for upload in [one for one in self._held.values() if one.assignment in assignments]:
            self.drop(upload)

    def _of(self, device: str, assignment: str) -> Upload | None:
        upload = self._held.get(device)
        return upload if upload is not None and upload.assignment == assignment else None


class _Sending(NamedTuple):
    """A request that brings something for an assignment, and the event of its end."""

    assignment: str
    request: Request
    over: asyncio.Event


class Senders:
    """Requests that bring a report or a part of one, say, one of each device: a newer one cuts off the one before."""

    def __init__(self) -> None:
        self._of: dict[str, _Sending] = {}

    @property
    def assignments(self) -> list[str]:
        """The assignments for which something is on its way."""
        return [sending.assignment for sending in self._of.values()]

    @asynccontextmanager
    async def one_at_a_time(self, device: str, request: Request, assignment: str = "") -> AsyncIterator[None]:
        """Run the block once no older request of the device is in one."""
        while (older := self._of.get(device)) is not None:
            hang_up(older.request.scope)
            await older.over.wait()
        self._of[device] = sending = _Sending(assignment, request, asyncio.Event())
        try:
            yield
        finally:
            del self._of[device]
            sending.over.set()

    def cut_off(self, assignments: Collection[str]) -> None:
        """Hang up on what is on its way for these. What has arrived is being counted, and gets its answer."""
        for sending in self._of.values():
            if sending.assignment in assignments:
                stop_receiving(sending.request.scope)


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
            raise errors.MalformedMessage("a report needs a body, and its digest as Content-Digest")
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
            raise errors.TooLarge(f"this report has at most {_most(owned.layout)} bytes")
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
            raise errors.ConflictingReport(f"a report with digest {counted.sha256[:12]}… was accepted; this is another")
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
        except errors.Unavailable:
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
        report_L = await in_thread_if_large(len(data), parse_report, data, owned.layout, finite=finite)
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
        raise errors.InvalidReport(str(error)) from error
    return report_L


def _waits(records: Records, assignment: str) -> bool:
    """Whether an assignment's report may still come. One without a row, as garbage collection leaves none, is over."""
    try:
        return records.assignment(assignment).state is AssignmentState.ASSIGNED
    except errors.UnknownAssignment:
        return False


def _most(layout: ReportLayout) -> int:
    return upload_bytes(layout) + (0 if layout.bits else HEADER_BYTES)


def _announced(request: Request) -> Part:
    """The part that the header fields of a PATCH announce. Raises MalformedMessage."""
    offset, length = (request.headers.get(name, "") for name in ("upload-offset", "upload-length"))
    last, sha256 = _LAST.get(request.headers.get("upload-complete", "")), sha256_in(request.headers.get("repr-digest"))
    if not _NUMBER.fullmatch(offset) or not _NUMBER.fullmatch(length) or last is None or sha256 is None:
        raise errors.MalformedMessage(
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
