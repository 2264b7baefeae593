"""A connection of uvicorn that can receive a body straight into the memory where it stays."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from coordinator.api.limits import memory_of

FILL = "muster.fill"
"""Where a request's scope has what receives the rest of its body into a `Body`: a `Fill`."""
_PIECE = 1 << 14
"""Read at a time where a request may begin: its head, and the first of its body."""
_CHUNK = 1 << 19
"""Read at a time of a body: it is hashed next, out of the cache."""


class Body:
    """A body on its way into memory that is there already, and the SHA-256 of what has come.

    grew_at: when something came last, by time.monotonic.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._digest = hashlib.sha256()
        self.size = 0
        self.grew_at = time.monotonic()

    @property
    def data(self) -> memoryview:
        """What is there."""
        return self._memory[: self.size]

    @property
    def free_space(self) -> memoryview:
        """The memory for the next bytes, up to a chunk; empty when no more fit."""
        return self._memory[self.size : self.size + _CHUNK]

    def grow(self, count: int) -> None:
        """Take `count` bytes that were written to the beginning of `free_space`."""
        end = self.size + count
        self._digest.update(self._memory[self.size : end])
        self.size, self.grew_at = end, time.monotonic()

    def expect(self, size: int) -> None:
        """Let it be at most so many bytes, which is no more than its memory has."""
        self._memory = self._memory[:size]

    def append(self, data: bytes) -> bool:
        """Add bytes; false, and nothing done, when there is no room for them."""
        fits = len(data) <= len(self._memory) - self.size
        if fits:
            self._memory[self.size : self.size + len(data)] = data
            self.grow(len(data))
        return fits

    def digest(self) -> bytes:
        """The SHA-256."""
        return self._digest.digest()


Fill: TypeAlias = Callable[[Body], Awaitable[bool]]
"""Receives the rest of a body into one that is as large as Content-Length says, and answers whether all of it is there.

If not, ASGI's `receive` has more to say.
"""


class Together:
    """A transport for an answer that has a body: its head is sent with the first of it, which is one call less."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = b""

    def write(self, data: bytes) -> None:
        """Send, or wait for what belongs to it."""
        if self._head is None or (not self._head and data.startswith(b"HTTP/1.1 100 ")):
            self._transport.write(data)
        elif not self._head and b"\r\ncontent-length: " in data:
            self._head = data
        else:
            # A stream says what it is at once: its first piece may take long.
            self._transport.write(self._head + data)
            self._head = None

    def close(self) -> None:
        """Send what waits, and close."""
        if self._head:
            self._transport.write(self._head)
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether no more can be sent."""
        return self._transport.is_closing()


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """What uvicorn serves a connection with. Bodies without `FILL` come as ASGI has it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._body: Body | None = None
        self._piece = memoryview(b"")

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the transport reads to."""
        if self._body is not None:
            self._piece = self._body.free_space
        else:
            within = self.cycle is not None and self.cycle.more_body
            self._piece = memory_of(_CHUNK if within else _PIECE)
        return self._piece

    def buffer_updated(self, nbytes: int) -> None:
        """The transport has read so many bytes."""
        piece, self._piece = self._piece[:nbytes], memoryview(b"")
        if self._body is None:
            self.data_received(piece)  # type: ignore[arg-type]  # any bytes-like object will do
            return
        self._body.grow(nbytes)
        if not self._body.free_space:
            self._end()

    def on_headers_complete(self) -> None:
        """The parser has a request's head."""
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            cast("dict[str, Any]", self.scope)[FILL] = partial(self._fill, self.cycle)
            if self.scope["method"] != "HEAD":
                self.cycle.transport = cast("asyncio.Transport", Together(self.transport))

    def _end(self) -> None:
        """Go on behind a body that the parser has not seen, with another parser."""
        self._body, self.parser = None, httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.on_message_complete()

    async def _fill(self, cycle: RequestResponseCycle, body: Body) -> bool:
        if cycle.body or not cycle.more_body or cycle.disconnected:
            return False
        self._body = body
        self.flow.resume_reading()
        try:
            await cycle.message_event.wait()
        finally:
            if self._body is body:
                # Given up: what is still to come of it would be taken for a request.
                self._body, cycle.keep_alive = None, False
        return not (cycle.more_body or cycle.disconnected)
