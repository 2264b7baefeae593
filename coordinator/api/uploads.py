"""Uploads in parts: reports in memory, bounded in all, never on disk. Spec: docs/spec/wire.md §6."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.api.limits import MemoryBudget, memory_of
from coordinator.errors import ConflictingReport, MalformedMessage, MismatchingOffset


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
    """A report that arrives in parts, hashed as it comes. Only one request at a time, its `writer`, adds to it."""

    def __init__(self, part: Part) -> None:
        self.sha256 = part.sha256
        self.length = part.length
        self.data = memory_of(part.length)
        self.size = 0
        self.writer: object | None = None
        self._digest = hashlib.sha256()

    @property
    def arrived(self) -> bool:
        """Whether all of it has arrived, with the announced digest."""
        return self.size == self.length and self._digest.digest() == self.sha256

    def append(self, writer: object, chunk: bytes) -> None:
        """Add bytes. Raises MismatchingOffset when another request took over, MalformedMessage past the end."""
        if self.writer is not writer:
            raise MismatchingOffset("another request took this upload over", self.size)
        end = self.size + len(chunk)
        if end > self.length:
            raise MalformedMessage("the body reaches beyond Upload-Length")
        self.data[self.size : end] = chunk
        self._digest.update(chunk)
        self.size = end

    def close(self) -> None:
        """Take no more, and release the memory, though a request may still refer to this."""
        self.writer = None
        self.data = memoryview(b"")


class Uploads:
    """Unfinished reports by assignment. Their announced bytes are reserved in `room`."""

    def __init__(self, room: MemoryBudget) -> None:
        self._room = room
        self._held: dict[str, Upload] = {}

    @property
    def assignments(self) -> list[str]:
        """The assignments with an unfinished report."""
        return list(self._held)

    def size(self, assignment: str) -> int:
        """Bytes of a report that have arrived. A request that was sending is cut off, so that no more come."""
        upload = self._held.get(assignment)
        if upload is None:
            return 0
        upload.writer = None
        return upload.size

    def take(self, assignment: str, part: Part, writer: object) -> Upload:
        """Let `writer` add a part; a request that was sending is cut off.

        Raises MismatchingOffset, ConflictingReport when another report has begun to arrive, TooLarge, or Unavailable
        when there is no memory for one more.
        """
        size = self.size(assignment)
        if part.offset != size:
            raise MismatchingOffset(f"{size} bytes of this report have arrived", size)
        upload = self._held.get(assignment)
        if upload is None:
            self._room.take(part.length)
            upload = self._held[assignment] = Upload(part)
        elif (upload.sha256, upload.length) != (part.sha256, part.length):
            raise ConflictingReport("another report has begun to arrive for this assignment; a device sends only one")
        upload.writer = writer
        return upload

    def drop(self, assignments: Iterable[str]) -> None:
        """Forget reports that were counted or are needed no more."""
        for assignment in assignments:
            upload = self._held.pop(assignment, None)
            if upload is not None:
                upload.close()
                self._room.free(upload.length)
