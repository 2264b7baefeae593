"""Uploads in parts: reports in memory, bounded in all, never on disk. Spec: docs/spec/wire.md §6."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.api.limits import MemoryBudget, memory_of
from coordinator.errors import ConflictingReport, MalformedMessage, MismatchingOffset


@dataclass(frozen=True, slots=True)
class Part:
    """What a request says that it brings: bytes from `offset` on, of a report of this digest and length.

    last: whether nothing comes after them.
    """

    offset: int
    last: bool
    length: int
    sha256: bytes


class Upload:
    """A report as far as it has arrived, hashed as it comes. One request at a time, its `writer`, adds to it."""

    def __init__(self, part: Part) -> None:
        self.sha256 = part.sha256
        self.length = part.length
        self.data = memory_of(part.length)
        self.size = 0
        self.writer: object | None = None
        self._digest = hashlib.sha256()

    @property
    def arrived(self) -> bool:
        """Whether all of it is here, with the digest that it was announced with."""
        return self.size == self.length and self._digest.digest() == self.sha256

    def append(self, writer: object, chunk: bytes) -> None:
        """Add what follows. Raises MismatchingOffset when another request took over, MalformedMessage past the end."""
        if self.writer is not writer:
            raise MismatchingOffset("another request took this upload over", self.size)
        end = self.size + len(chunk)
        if end > self.length:
            raise MalformedMessage("the body reaches beyond Upload-Length")
        self.data[self.size : end] = chunk
        self._digest.update(chunk)
        self.size = end

    def close(self) -> None:
        """Take no more, and let the memory go, whoever still holds this."""
        self.writer = None
        self.data = memoryview(b"")


class Uploads:
    """Every report that is half here, by assignment. It takes the bytes that were announced from `room`."""

    def __init__(self, room: MemoryBudget) -> None:
        self._room = room
        self._held: dict[str, Upload] = {}

    @property
    def assignments(self) -> list[str]:
        """Whose reports are half here."""
        return list(self._held)

    def size(self, assignment: str) -> int:
        """How many bytes of a report are here. Whoever was sending is cut off, so that this stays so."""
        upload = self._held.get(assignment)
        if upload is None:
            return 0
        upload.writer = None
        return upload.size

    def take(self, assignment: str, part: Part, writer: object) -> Upload:
        """Let `writer` bring a part; whoever was sending is cut off.

        Raises MismatchingOffset, ConflictingReport when another report is half here, TooLarge, or Unavailable when
        there is no room for one more.
        """
        size = self.size(assignment)
        if part.offset != size:
            raise MismatchingOffset(f"{size} bytes of this report are here", size)
        upload = self._held.get(assignment)
        if upload is None:
            self._room.take(part.length)
            upload = self._held[assignment] = Upload(part)
        elif (upload.sha256, upload.length) != (part.sha256, part.length):
            raise ConflictingReport("another report is half here for this assignment; a device sends one and no other")
        upload.writer = writer
        return upload

    def drop(self, assignments: Iterable[str]) -> None:
        """Forget reports that arrived, or that nobody waits for."""
        for assignment in assignments:
            upload = self._held.pop(assignment, None)
            if upload is not None:
                upload.close()
                self._room.free(upload.length)
