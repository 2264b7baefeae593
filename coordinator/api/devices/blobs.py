"""Access of devices to their own assignments alone, to immutable blobs, and to deltas between checkpoints."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple, TypeAlias

from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from coordinator.api.authentication import LruCache, signed
from coordinator.api.http import while_connected
from coordinator.api.limits import MemoryBudget
from coordinator.api.service import Service
from coordinator.errors import ForeignAssignment, RangeNotSatisfiable, TooLarge, Unavailable, UnknownBlob
from coordinator.rules.buffers import refusal
from coordinator.rules.replicas import SharedRound, may_share, round_in
from coordinator.rules.states import AssignmentState
from coordinator.store.blobs import Blobs
from fedcore.checkpoint import delta_between
from fedcore.codecs import RoundKey
from fedcore.plan import BlobRef
from fedcore.report import ReportLayout
from fedcore.wire.messages import Assignment, Receipt

# Ownership of assignments: only the device that has an assignment may use its address.


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


# Immutable blobs over HTTP (RFC 9110 §13, §14), and deltas between checkpoints (docs/spec/wire.md §5).


BYTES = "application/octet-stream"
FOR_EVER = {"Cache-Control": "public, max-age=31536000, immutable"}
# Up to this size an answer is one piece: a thread fetches each piece of a stream, which costs more than the bytes.
PIECE_BYTES = 1 << 18
_RANGE = re.compile(r"bytes=(?:([0-9]+)-([0-9]+)?|-([0-9]+))", re.IGNORECASE)
_DIGITS = 18
_BEYOND = 10**_DIGITS


def serve_blob(request: Request, ref: BlobRef, blobs: Blobs) -> Response:
    """A blob, the part of it that was asked for, or 304. Raises RangeNotSatisfiable, or UnknownBlob."""
    etag = f'"{ref.sha256}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes", **FOR_EVER}
    held = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if held & {etag, "*"}:
        return Response(status_code=304, headers=headers)
    wanted = request.headers.get("range") if request.headers.get("if-range", etag) == etag else None
    part = requested_range(wanted, ref.size)
    status = 200
    if part is None:
        part = range(ref.size)
    else:
        status, headers["Content-Range"] = 206, f"bytes {part.start}-{part.stop - 1}/{ref.size}"
    pieces = blobs.read(ref.sha256, part)
    if len(part) <= PIECE_BYTES:
        return Response(b"".join(pieces), status, headers, media_type=BYTES)
    headers["Content-Length"] = str(len(part))
    return StreamingResponse(_as_taken(iterate_in_threadpool(pieces)), status, headers, media_type=BYTES)


class HeldAnswer(StreamingResponse):
    """Bytes in memory until they are sent. Then, or when their reader leaves, `held` is closed."""

    def __init__(self, data: bytes, held: AsyncExitStack) -> None:
        headers = {"Content-Length": str(len(data)), **FOR_EVER}
        super().__init__(_as_taken(_pieces(data)), headers=headers, media_type=BYTES)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        async with self._held:
            await super().__call__(scope, receive, send)


async def _pieces(data: bytes) -> AsyncIterator[memoryview]:
    for start in range(0, len(data), PIECE_BYTES):
        yield memoryview(data)[start : start + PIECE_BYTES]


async def _as_taken(pieces: AsyncIterable[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    """Pieces, each read only when the other end has taken the one before."""
    async for piece in pieces:
        yield piece
        del piece
        yield b""  # the server waits before it sends anything more


def requested_range(header: str | None, size: int) -> range | None:
    """The bytes that a Range header asks for; None for the whole, as for several ranges or a malformed header.

    Raises RangeNotSatisfiable when the range starts behind the end.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None:
        return None
    first, last, suffix = (None if digits is None else _position(digits) for digits in match.groups())
    if first is not None and last is not None and last < first:
        return None
    start = first if first is not None else max(0, size - (suffix or 0))
    if start >= size:
        raise RangeNotSatisfiable(size)
    return range(start, size if last is None else min(last + 1, size))


def _position(digits: str) -> int:
    """A position in a blob. One with more digits than Python converts is beyond every end, too (RFC 9110 §14.1.1)."""
    digits = digits.lstrip("0")
    return _BEYOND if len(digits) > _DIGITS else int(digits or "0")


Pair: TypeAlias = tuple[BlobRef, BlobRef]
MOST_BYTES = 1 << 25
"""The longest blob that has deltas."""
_OWN_BYTES = 1 << 10
"""What a delta takes beside its bytes."""


class Deltas:
    """Deltas of the blobs in a store, in memory of `room`. When that is full, devices fetch the whole blob.

    They are made one at a time, so that many different ones take neither all threads nor much memory. All requests for
    one share it: devices of a round mostly ask for the same ones. Those that were read last are kept for the next.
    """

    def __init__(self, blobs: Blobs, room: MemoryBudget) -> None:
        self._blobs = blobs
        self._room = room
        self._held: OrderedDict[Pair, _Delta] = OrderedDict()  # those read last are the last
        self._making = asyncio.Lock()

    @asynccontextmanager
    async def between(self, base: BlobRef, target: BlobRef, request: Request) -> AsyncIterator[bytes]:
        """The delta from `base` to `target`, for as long as the block runs.

        Raises UnknownBlob where the whole blob is the better answer; ClientDisconnect when nobody waits any more.
        """
        if base.size != target.size or target.size > MOST_BYTES:
            raise UnknownBlob(
                f"there is no delta from {base.sha256[:12]}… to {target.sha256[:12]}…: blobs with one are of the same "
                f"size, up to {MOST_BYTES:,} bytes"
            )
        pair = base, target
        entry = self._held.get(pair) or self._begin(pair)
        self._held.move_to_end(pair)
        entry.readers += 1
        try:
            delta = await while_connected(request, asyncio.shield(entry.making))
            if not delta:
                raise UnknownBlob(f"the delta to {target.sha256[:12]}… is no shorter than the blob")
            yield delta
        finally:
            entry.readers -= 1
            if not entry.readers and not entry.making.done():
                self._drop(pair, entry)

    def _begin(self, pair: Pair) -> _Delta:
        size = pair[1].size + _OWN_BYTES
        while True:
            try:
                self._room.take(size)
                break
            except (TooLarge, Unavailable) as error:
                idle = next((item for item in self._held.items() if not item[1].readers), None)
                if idle is None:
                    raise UnknownBlob("there is no room for another delta now; fetch the whole blob") from error
                self._drop(*idle)
        entry = self._held[pair] = _Delta(size)
        entry.making = asyncio.create_task(self._make(pair, entry))
        return entry

    async def _make(self, pair: Pair, entry: _Delta) -> bytes:
        """The delta; empty where it is no shorter than the blob."""
        try:
            async with self._making:
                if not entry.readers:
                    return b""  # all who asked have left
                delta = await run_in_threadpool(self._between, *pair)
        except Exception:
            self._drop(pair, entry)
            if entry.readers:
                raise
            return b""
        if len(delta) >= pair[1].size:
            delta = b""
        if self._held.get(pair) is entry:
            self._room.free(entry.size - len(delta) - _OWN_BYTES)
            entry.size = len(delta) + _OWN_BYTES
        return delta

    def _drop(self, pair: Pair, entry: _Delta) -> None:
        if self._held.get(pair) is entry:
            del self._held[pair]
            self._room.free(entry.size)

    def _between(self, base: BlobRef, target: BlobRef) -> bytes:
        return delta_between(*(self._blobs.get(ref.sha256) for ref in (base, target)))


class _Delta:
    """A delta, made or still to be made: its reserved memory, and the requests that wait for it or read it."""

    making: asyncio.Task[bytes]

    def __init__(self, size: int) -> None:
        self.size = size
        self.readers = 0
