"""Uploads of reports: one of each device at a time, in memory that is bounded in all. Spec: docs/spec/wire.md §6."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

from starlette.requests import Request

from coordinator.api.limits import MemoryBudget
from coordinator.errors import ConflictingReport, MalformedMessage, MismatchingOffset, NoLongerNeeded
from ingress.connection import hang_up, memory_of, stop_receiving


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
            raise MalformedMessage("the body reaches beyond Upload-Length")
        if not self.data:
            raise NoLongerNeeded("the round needs no report of this assignment any more")
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
            raise MismatchingOffset(f"{size} bytes of this report have arrived", size)
        if upload is None:
            self.drop_of(device)
            self._room.take(part.length)
            upload = self._held[device] = Upload(device, assignment, part)
        elif (upload.sha256, upload.length) != (part.sha256, part.length):
            raise ConflictingReport("another report has begun to arrive for this assignment; a device sends only one")
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
