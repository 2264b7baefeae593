"""HTTP/1.1 connections to one coordinator, by the standard library. Each carries one request at a time and is reused.

There are no redirects, cookies, compression or proxies: a device talks to one coordinator and signs each request to it.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from device_runtime.errors import ConfigError

PORTS = {"http": 80, "https": 443}
PIECE = 1 << 16
IDLE_S = 5.0
"""Seconds for which an idle connection is kept: after a change of network, a request on it would silently be lost."""
MOST_UNSEEN = 1 << 18
"""The most bytes of an answer outside its body: heads, lengths of chunks, trailers."""
_HOST = re.compile(r"[A-Za-z0-9._~%:-]+")
_BODILESS = frozenset({204, 304})
_BLANK = re.compile(r"[\x00-\x20\x7f]")


class ConnectionFailed(Exception):
    """There is no connection, it broke or was silent for too long, or the answer is not HTTP."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a coordinator, and the path of its routes."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """Host and port as in the Host field."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


def address_of(url: str, whose: str = "coordinator") -> Address:
    """The address in a base URL. Raises ConfigError when it is malformed, or names a user, which the error omits."""
    if isinstance(url, str) and "@" in url:
        raise ConfigError(f"{whose}: the URL names a user; leave out all up to the @: it would be written down")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
        parts.path.encode("ascii")
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{whose} {url!r} is not a URL: {error}") from error
    if parts.scheme not in PORTS or not _HOST.fullmatch(host):
        raise ConfigError(f"{whose} {url!r} must start with https:// or http://, and name a host")
    if port == 0 or parts.query or parts.fragment or _BLANK.search(parts.path):
        raise ConfigError(
            f"{whose} {url!r} may have a host, a port from 1 to 65535, a path without blanks, and no more"
        )
    return Address(parts.scheme, host, port or PORTS[parts.scheme], parts.path.rstrip("/"))


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request. `headers` state the length of the body, which comes in pieces.

    timeout_s: for each wait on the network, for the head of the answer, and for each piece of its body.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: Iterable[bytes]
    timeout_s: float


class HttpResponse(Protocol):
    """The head of an answer, and its body in pieces as they arrive. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]

    def __iter__(self) -> Iterator[bytes]:
        """The body, once. Raises ConnectionFailed."""

    def close(self) -> None:
        """Discard the rest of the body."""


class Carrier(Protocol):
    """Carries requests to a coordinator, from any thread."""

    def send(self, request: HttpRequest) -> HttpResponse:
        """The answer to a request, as soon as its head has arrived. Raises ConnectionFailed."""

    def close(self) -> None:
        """Close all connections, including those in use."""


class Connections:
    """A carrier with one connection for each concurrent request."""

    def __init__(self, address: Address) -> None:
        self._address = address
        # Loading trusted certificates takes more CPU than the rest of a session, so it is only done for TLS.
        self._trusted = ssl.create_default_context() if address.scheme == "https" else None
        self._lock = threading.Lock()
        self._idle: list[tuple[_Connection, float]] = []
        self._all: set[_Connection] = set()

    def send(self, request: HttpRequest) -> HttpResponse:
        """The answer to a request, as soon as its head is here. Raises ConnectionFailed."""
        connection = self._connection()
        try:
            with connection.failing():
                return _Response(connection.ask(request), connection, self._give_back)
        except BaseException:
            self._give_back(connection, reusable=False)
            raise

    def close(self) -> None:
        """End all connections, those in use too."""
        with self._lock:
            ended, self._idle, self._all = self._all, [], set()
        for connection in ended:
            connection.end()

    def _connection(self) -> _Connection:
        with self._lock:
            while self._idle:
                connection, since = self._idle.pop()
                if connection.alive and time.monotonic() - since < IDLE_S:
                    return connection
                self._all.discard(connection)
                connection.end()
            host, port = self._address.host, self._address.port
            opened = _TlsConnection(host, port, context=self._trusted) if self._trusted else _Connection(host, port)
            self._all.add(opened)
            return opened

    def _give_back(self, connection: _Connection, reusable: bool) -> None:
        with self._lock:
            if reusable and connection in self._all:
                self._idle.append((connection, time.monotonic()))
                return
            self._all.discard(connection)
        connection.end()


class _Source(io.RawIOBase):
    """The bytes of an answer: at most MOST_UNSEEN outside its body, and each piece of the body within the time-out.

    The library itself sets no limit to heads, lengths of chunks and trailers.
    """

    def __init__(self, raw: io.RawIOBase, timeout_s: float) -> None:
        self._raw = raw
        self._timeout_s = timeout_s
        self._left, self._until = MOST_UNSEEN, time.monotonic() + timeout_s

    def seen(self, count: int) -> None:
        """Note that `count` bytes were body, and restart the time-out for the next piece."""
        self._left, self._until = self._left + count, time.monotonic() + self._timeout_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if time.monotonic() > self._until:
            raise TimeoutError("the answer took too long")
        count = self._raw.readinto(buffer) or 0
        self._left -= count
        if self._left < 0:
            raise http.client.HTTPException("the answer is mostly not its body")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _BoundedResponse(http.client.HTTPResponse):
    """The library's answer, read from a `_Source`."""

    def __init__(self, sock: socket.socket, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp.close()
        self.source = _Source(sock.makefile("rb", buffering=0), sock.gettimeout() or 0.0)
        self.fp = io.BufferedReader(self.source, PIECE)


class _Connection(http.client.HTTPConnection):
    """The library's connection, but it sends the head of a request together with the first piece of its body."""

    response_class = _BoundedResponse
    _head: bytes | None = None
    _socket: socket.socket | None = None
    _ended = False

    @property
    def alive(self) -> bool:
        """Whether the connection is open. The other end sends nothing between answers, so any input means a close."""
        if self.sock is None:
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)

    def ask(self, request: HttpRequest) -> _BoundedResponse:
        """Send a request; answers with the head of the response."""
        self.timeout = request.timeout_s
        if self.sock is None:
            self.connect()
        else:
            self.sock.settimeout(request.timeout_s)
        self._socket = self.sock
        self.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            self.putheader(name, value)
        pieces = iter(request.body)
        self._head = b""
        self.endheaders()
        # The other end may have answered before it closed the connection. If not, reading the answer fails.
        with contextlib.suppress(ConnectionError):
            head, self._head = self._head, None
            self.send(head + next(pieces, b""))
            for piece in pieces:
                self.send(piece)
        answer = cast("_BoundedResponse", self.getresponse())
        while 100 <= answer.status < 200:
            # An interim answer: the final one follows.
            answer.headers = None  # type: ignore[assignment]  # as `begin` asks for
            answer.begin()
        return answer

    def send(self, data: bytes) -> None:  # type: ignore[override]  # nothing else is sent here
        """Send bytes, but hold a head back until its body. The time-out applies to each wait."""
        if self._head is not None:
            self._head += data
            return
        rest = memoryview(data)
        while rest:
            rest = rest[self.sock.send(rest) :]

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Turn network and HTTP errors in the block into ConnectionFailed."""
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            words = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ConnectionFailed(words) from error
        except (AttributeError, ValueError) as error:
            if not self._ended:
                raise
            # The library raises this when another thread closes the connection that this one reads.
            raise ConnectionFailed("the connection was closed") from error

    def end(self) -> None:
        """Close the connection, and wake a thread that waits for it."""
        self._ended = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self.close()


class _TlsConnection(_Connection, http.client.HTTPSConnection):
    """The same over TLS."""


class _Response:
    def __init__(
        self, answer: _BoundedResponse, connection: _Connection, give_back: Callable[[_Connection, bool], None]
    ) -> None:
        self.status = answer.status
        self.headers: Mapping[str, str] = {name.lower(): value for name, value in answer.getheaders()}
        self._answer = answer
        self._connection = connection
        self._give_back = give_back
        self._whole = False

    def __iter__(self) -> Iterator[bytes]:
        with self._connection.failing():
            while self.status not in _BODILESS and (piece := self._answer.read1(PIECE)):
                self._answer.source.seen(len(piece))
                yield piece
            if self._answer.length:
                raise http.client.IncompleteRead(b"", self._answer.length)
        self._whole = True

    def close(self) -> None:
        reusable = self._whole and not self._answer.will_close
        self._answer.close()
        self._give_back(self._connection, reusable)
