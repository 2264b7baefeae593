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

RECEIVE_INTO = "muster.receive_into"
"""The key of a request's scope for a `ReceiveInto`."""
_PIECE = 1 << 14
"""Bytes read at a time where a request may begin: its head, and the first of its body."""
_CHUNK = 1 << 19
"""Bytes read at a time of a body: they are hashed next, out of the cache."""


class Body:
    """A body that arrives in memory allocated before, and the SHA-256 of the bytes so far.

    grew_at: the time of the last bytes, by time.monotonic.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._digest = hashlib.sha256()
        self.size = 0
        self.grew_at = time.monotonic()

    @property
    def data(self) -> memoryview:
        """The bytes that have arrived."""
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
        """Limit the body to `size` bytes, at most those of its memory."""
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


ReceiveInto: TypeAlias = Callable[[Body], Awaitable[bool]]
"""Receives the rest of a request's body into a `Body` of Content-Length bytes; answers whether all of it arrived.

If not, ASGI's `receive` gives the rest.
"""


class HeadBufferingTransport:
    """A transport for an answer with a body: it sends the head with the first bytes of the body, in one call."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = b""

    def write(self, data: bytes) -> None:
        """Send `data`, or keep a head until its body follows."""
        if self._head is None or (not self._head and data.startswith(b"HTTP/1.1 100 ")):
            self._transport.write(data)
        elif not self._head and b"\r\ncontent-length: " in data:
            self._head = data
        else:
            # The head of a stream is sent at once: its first piece may take long.
            self._transport.write(self._head + data)
            self._head = None

    def close(self) -> None:
        """Send the rest, and close."""
        if self._head:
            self._transport.write(self._head)
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether no more can be sent."""
        return self._transport.is_closing()


class Connection(HttpToolsProtocol, asyncio.BufferedProtocol):
    """A protocol for uvicorn. A body that no route receives with `RECEIVE_INTO` comes through ASGI's `receive`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._body: Body | None = None
        self._piece = memoryview(b"")

    def get_buffer(self, sizehint: int) -> memoryview:
        """The memory that the transport reads into."""
        if self._body is not None:
            self._piece = self._body.free_space
        else:
            within = self.cycle is not None and self.cycle.more_body
            self._piece = memory_of(_CHUNK if within else _PIECE)
        return self._piece

    def buffer_updated(self, nbytes: int) -> None:
        """Take the bytes that the transport has read."""
        piece, self._piece = self._piece[:nbytes], memoryview(b"")
        if self._body is None:
            self.data_received(piece)  # type: ignore[arg-type]  # any bytes-like object will do
            return
        self._body.grow(nbytes)
        if not self._body.free_space:
            self._end()

    def on_headers_complete(self) -> None:
        """Offer RECEIVE_INTO to the request whose head was parsed."""
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            cast("dict[str, Any]", self.scope)[RECEIVE_INTO] = partial(self._receive_into, self.cycle)
            if self.scope["method"] != "HEAD":
                self.cycle.transport = cast("asyncio.Transport", HeadBufferingTransport(self.transport))

    def _end(self) -> None:
        """Go on after a body that the parser has not seen, with a new parser."""
        self._body, self.parser = None, httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.on_message_complete()

    async def _receive_into(self, cycle: RequestResponseCycle, body: Body) -> bool:
        if cycle.body or not cycle.more_body or cycle.disconnected:
            return False
        self._body = body
        self.flow.resume_reading()
        try:
            await cycle.message_event.wait()
        finally:
            if self._body is body:
                # Cancelled: the rest of the body would be parsed as a request.
                self._body, cycle.keep_alive = None, False
        return not (cycle.more_body or cycle.disconnected)
