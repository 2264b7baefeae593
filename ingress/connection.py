"""A uvicorn connection that checks heads, bounds what it reads, and can receive a body into its final memory."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from http import HTTPStatus
from typing import Any, TypeAlias, cast

import httptools
import numpy as np
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ingress.limits import ConnectionLimits, RefusedRequest

HEAD_BYTES = 1 << 14
"""The largest head of a request, and the most bytes around a body in chunked coding, including trailers."""
HEAD_FIELDS = 100
"""The most header fields of a request, and the most trailers."""
_HOST = re.compile(rb"(\[[0-9a-f:.]+\]|[\w.~!$&'()*+,;=%-]+)(:\d*)?", re.ASCII | re.IGNORECASE)
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)(/[^?#]*)?(\?[^#]*)?", re.IGNORECASE)
_HANDSHAKE = b"\x16\x03"
"""How a TLS handshake begins, of any version."""
_OTHER_VERSION = ("Invalid HTTP version", "Pause on PRI/Upgrade")
"""The parser's words about a version that it does not know, and about that of HTTP/2's preface."""


def _wrong_version() -> RefusedRequest:
    return RefusedRequest(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "use HTTP/1.1")


def too_large(target: bytes) -> RefusedRequest:
    """The refusal of a head with this target that is larger than HEAD_BYTES or has more fields than HEAD_FIELDS."""
    if len(target) > HEAD_BYTES // 2:
        return RefusedRequest(
            HTTPStatus.REQUEST_URI_TOO_LONG, f"a head, with its target, has less than {HEAD_BYTES} bytes"
        )
    return RefusedRequest(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        f"the head of a request has less than {HEAD_BYTES} bytes and at most {HEAD_FIELDS} header fields",
    )


def refusal_of(error: httptools.HttpParserError, data: bytes) -> RefusedRequest:
    """The refusal of `data` that the parser cannot read, or of what one of its callbacks refused."""
    if isinstance(error.__context__, RefusedRequest):
        return error.__context__
    if data[:2] == _HANDSHAKE:
        return RefusedRequest(HTTPStatus.BAD_REQUEST, "this is TLS, and the port speaks plain HTTP: use an http:// URL")
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return RefusedRequest(HTTPStatus.NOT_IMPLEMENTED, "unknown method")
    if str(error) in _OTHER_VERSION:
        return _wrong_version()
    return RefusedRequest(HTTPStatus.BAD_REQUEST, "this is not a request of HTTP/1.1")


def check_fields(version: str, fields: list[tuple[bytes, bytes]]) -> None:
    """Raise RefusedRequest unless there is one host, and every coding and expectation is supported.

    Otherwise a proxy might see another request than the application does.
    """
    if version not in ("1.0", "1.1"):
        raise _wrong_version()
    hosts = 0
    for name, value in fields:
        if name == b"host":
            hosts += 1 if _HOST.fullmatch(value) else 2
        elif name == b"transfer-encoding" and version == "1.0":
            raise RefusedRequest(HTTPStatus.BAD_REQUEST, "HTTP/1.0 has no transfer codings; use HTTP/1.1")
        elif name == b"transfer-encoding" and value.lower() != b"chunked":
            raise RefusedRequest(HTTPStatus.NOT_IMPLEMENTED, "the only supported transfer coding is chunked")
        elif name == b"expect" and value.lower() != b"100-continue":
            raise RefusedRequest(HTTPStatus.EXPECTATION_FAILED, "the only supported expectation is 100-continue")
    if hosts > 1 or (not hosts and version == "1.1"):
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, "send one Host header field, with a name or an address")


def path_of(method: bytes, target: bytes, fields: list[tuple[bytes, bytes]]) -> bytes:
    """The path and query of a target. The host of an absolute one replaces that of the field Host (RFC 9112 3.2.2).

    Raises RefusedRequest.
    """
    if method == b"CONNECT":
        raise RefusedRequest(HTTPStatus.NOT_IMPLEMENTED, "this server is not a proxy")
    if target.startswith(b"/") and b"#" not in target:
        return target
    if target == b"*" and method == b"OPTIONS":
        return target
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or not _HOST.fullmatch(absolute[1]):
        raise RefusedRequest(
            HTTPStatus.BAD_REQUEST, "a target is a path and query, or an http(s) URL with a host, without a fragment"
        )
    fields[:] = [(name, absolute[1] if name == b"host" else value) for name, value in fields]
    return (absolute[2] or b"/") + (absolute[3] or b"")


RECEIVE_INTO = "muster.receive_into"
"""The key of a request's scope for a `ReceiveInto`."""
_HANG_UP, _STOP_RECEIVING = "muster.hang_up", "muster.stop_receiving"
_PIPELINED = 16
"""The most requests of one connection that wait for the answer to an earlier one."""
_CHUNK = 1 << 19
"""Bytes read at a time of a body that arrives in its final memory: they are hashed while still in the cache."""
_PIECE = 1 << 16
"""Bytes read at a time of any other body. A connection may exceed its limits by this much before they apply."""


def hang_up(scope: MutableMapping[str, Any]) -> None:
    """Close the connection of a request. The request ends as if its sender had hung up."""
    scope.get(_HANG_UP, lambda: None)()


def stop_receiving(scope: MutableMapping[str, Any]) -> None:
    """Close the connection of a request whose body is still arriving. One whose body is complete gets its answer."""
    scope.get(_STOP_RECEIVING, lambda: None)()


def memory_of(size: int) -> memoryview:
    """Memory of `size` bytes, not zeroed: zeroing takes as long as a copy."""
    return np.empty(size, np.uint8).data


class Body:
    """A body that arrives in preallocated memory, and the SHA-256 of its bytes so far."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._digest = hashlib.sha256()
        self.size = 0

    @property
    def data(self) -> memoryview:
        """The bytes that have arrived."""
        return self._memory[: self.size]

    @property
    def free_space(self) -> memoryview:
        """The memory for the next bytes, up to a chunk; empty when no more fit."""
        return self._memory[self.size : self.size + _CHUNK]

    def grow(self, count: int) -> None:
        """Count `count` bytes that were written to the start of `free_space`."""
        end = self.size + count
        self._digest.update(self._memory[self.size : end])
        self.size = end

    def expect(self, size: int) -> None:
        """Limit the body to `size` bytes, at most those of its memory."""
        self._memory = self._memory[:size]

    def append(self, data: bytes) -> bool:
        """Add bytes. If there is no room for them, do nothing and return false."""
        fits = len(data) <= len(self._memory) - self.size
        if fits:
            self._memory[self.size : self.size + len(data)] = data
            self.grow(len(data))
        return fits

    def digest(self) -> bytes:
        """The SHA-256."""
        return self._digest.digest()


ReceiveInto: TypeAlias = Callable[[Body], Awaitable[bool]]
"""Receives the rest of a request's body into a `Body` of Content-Length bytes; returns whether all of it arrived.

If not, ASGI's `receive` gives the rest.
"""


async def _answer(app: ASGI3Application, scope: Any, receive: Any, send: Any) -> None:
    """Answer a request, and empty its scope, which refers to itself: so its memory is free at once."""
    try:
        await app(scope, receive, send)
    finally:
        scope.clear()


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
    """A protocol for uvicorn. A body that no route receives with `RECEIVE_INTO` comes through ASGI's `receive`.

    limits: of the connections of its port. This connection tells them what it waits for.
    """

    def __init__(self, limits: ConnectionLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._body: Body | None = None
        self._piece = memoryview(b"")
        self._received = 0
        self._unparsed = 0
        """Bytes since the last head or piece of a body: of the next head, or around the pieces of chunked coding."""
        self._in_body = False
        self._running: RequestResponseCycle | None = None
        """The request that is being answered."""
        self._last_answer: bytes | None = None
        """What the connection ends with, once earlier requests are answered. What comes in meanwhile is ignored."""
        self.url = b""

    @property
    def address(self) -> str | None:
        """The address of the other end."""
        return self.client[0] if self.client else None

    @property
    def moved(self) -> int:
        """The bytes received, minus those waiting to be sent."""
        return self._received - self.unread

    @property
    def unread(self) -> int:
        """The bytes waiting to be sent."""
        size: int = self.transport.get_write_buffer_size()
        return size

    def hang_up(self) -> None:
        """Close the connection now. A request in progress ends as if its sender had hung up."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, within the limits."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(1)  # count whatever is not sent at once; with 0, TLS would wait forever
        self._limits.opened(self, transport.get_extra_info("socket").fileno())

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._limits.closed(self)
        if (running := self._running) is not None and not running.response_complete:
            # uvicorn tells only the latest request of a connection, and earlier ones may still be running.
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The other end reads an answer more slowly than it is produced."""
        super().pause_writing()
        self._limits.stalls(self)

    def resume_writing(self) -> None:
        """The other end has read what was sent."""
        super().resume_writing()
        self._limits.flows(self)
        self._wait()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The memory that the transport reads into."""
        if self._last_answer is not None:
            self._piece = memory_of(_PIECE)
        elif self._body is not None:
            self._piece = self._body.free_space
        else:
            within = self.cycle is not None and self.cycle.more_body
            self._piece = memory_of(_PIECE if within else HEAD_BYTES - self._unparsed)
        return self._piece

    def buffer_updated(self, nbytes: int) -> None:
        """Take the bytes that the transport has read."""
        piece, self._piece = self._piece[:nbytes], memoryview(b"")
        self._received += nbytes
        if self._last_answer is not None:
            return
        if self._body is None:
            self._unparsed += nbytes
            self.data_received(piece)  # type: ignore[arg-type]  # any bytes-like object will do
            return
        self._body.grow(nbytes)
        if not self._body.free_space:
            self._end()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. Refuse what is not a request, or has too many bytes around its body."""
        self._unset_keepalive_if_required()
        refusal: RefusedRequest | None = None
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            refusal = refusal_of(error, data)
        if self._unparsed >= HEAD_BYTES or len(self.headers or ()) > HEAD_FIELDS:
            refusal = too_large(self.url)
        if refusal is not None:
            self._refuse(refusal)
        elif self._in_body:
            self._limits.moves(self)

    def _parse(self, data: bytes) -> None:
        """Parse, and decline every upgrade to another protocol: what follows is a request."""
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as declined:
                data = data[declined.args[0] :]
                self._renew_parser()

    def on_headers_complete(self) -> None:
        """Start the request whose head was parsed, and offer RECEIVE_INTO to it."""
        self._check_head()  # what it raises ends the parsing; `data_received` refuses
        before = self.cycle
        super().on_headers_complete()
        self._limits.works(self)
        # Trailers are parsed like header fields: they must not be among those that were signed.
        self._unparsed, self._in_body, self.headers = 0, True, []
        if self.cycle is not before:
            scope = cast("dict[str, Any]", self.scope)
            scope[RECEIVE_INTO] = partial(self._receive_into, self.cycle)
            scope[_HANG_UP], scope[_STOP_RECEIVING] = self.hang_up, partial(self._stop_receiving, self.cycle)
            if self.scope["method"] != "HEAD":
                self.cycle.transport = cast("asyncio.Transport", HeadBufferingTransport(self.transport))

    def _check_head(self) -> None:
        """Raise RefusedRequest for a head that must not be taken, or must not be taken now."""
        version = self.parser.get_http_version()
        if len(self.headers) > HEAD_FIELDS:
            raise too_large(b"")
        check_fields(version, self.headers)
        self.url = path_of(self.parser.get_method(), self.url, self.headers)
        if len(self.pipeline) == _PIPELINED:
            raise RefusedRequest(
                HTTPStatus.TOO_MANY_REQUESTS, f"at most {_PIPELINED} requests may wait for an earlier answer"
            )
        if self.parser.should_upgrade() and {b"content-length", b"transfer-encoding"} & dict(self.headers).keys():
            # The parser would take the body for the other protocol.
            raise RefusedRequest(HTTPStatus.NOT_IMPLEMENTED, "a request with a body cannot ask for an upgrade")
        if version == "1.0":
            self.expect_100_continue = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, partial(_answer, app))

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a body."""
        self._unparsed, self._in_body = 0, False
        if not self.flow.write_paused:
            self._limits.rests(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it has come already, or the connection ends here."""
        super().on_response_complete()
        if self._last_answer is not None:
            self._end_refused(self._last_answer)
        self._wait()

    def _wait(self) -> None:
        """Start the time limit of the next request's head, if no answer is due and the last one was read."""
        if self.transport.is_closing() or self.flow.write_paused or self.cycle is None:
            return
        if self.cycle.response_complete and self._last_answer is None:
            self._limits.waits(self)

    def _refuse(self, refusal: RefusedRequest) -> None:
        """End the connection with an answer, after all others that are due. A request whose body is broken gets it."""
        broken, self._last_answer = self.cycle if self._in_body else None, refusal.answer()
        if broken is not None and broken.response_started:
            self.hang_up()
            return
        if broken is not None:
            broken.disconnected = broken.response_complete = True
            broken.message_event.set()
            if self._running is not None and broken is not self._running:  # its turn had not come
                self.pipeline.popleft()
                self.cycle = self._running
        self._limits.rests(self)
        self._end_refused(self._last_answer)

    def _end_refused(self, answer: bytes) -> None:
        """Send the last answer, unless another is due, and read on until the other end has read it and hangs up."""
        if self.transport.is_closing() or not (self._running is None or self._running.response_complete):
            return
        self.transport.write(answer)
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self._limits.works(self)
        self._limits.waits(self)

    def _end(self) -> None:
        """Go on after a body that the parser has not seen."""
        self._body = None
        self._renew_parser()
        self.on_message_complete()

    def _renew_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def _stop_receiving(self, cycle: RequestResponseCycle) -> None:
        if cycle.more_body:
            self.hang_up()

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
