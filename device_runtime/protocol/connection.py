"""HTTP/1.1 connections to one coordinator, by the standard library. Each carries one request at a time and is kept.

There are no redirects, cookies, compression or proxies: a device talks to one coordinator and signs each request to it.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from device_runtime.errors import ConfigError

PORTS = {"http": 80, "https": 443}
PIECE = 1 << 16
_HOST = re.compile(r"[A-Za-z0-9._~%:-]+")


class ConnectionFailed(Exception):
    """No connection, one that broke or was silent for too long, or an answer that is not HTTP."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a coordinator listens, and the path under which its routes are."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """Host and port as the Host field has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


def address_of(coordinator: str) -> Address:
    """The address in a base URL. Raises ConfigError when it is none, or names a user, without repeating that."""
    if isinstance(coordinator, str) and "@" in coordinator:
        raise ConfigError("the coordinator's URL names a user; leave out all up to the @: it would be written down")
    try:
        parts = urlsplit(coordinator)
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
        parts.path.encode("ascii")
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"coordinator {coordinator!r} is not a URL: {error}") from error
    if parts.scheme not in PORTS or not _HOST.fullmatch(host):
        raise ConfigError(f"coordinator {coordinator!r} must start with https:// or http://, and name a host")
    if port == 0 or parts.query or parts.fragment:
        raise ConfigError(f"coordinator {coordinator!r} may have a port from 1 to 65535 and a path, and no more")
    return Address(parts.scheme, host, port or PORTS[parts.scheme], parts.path.rstrip("/"))


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request. `headers` say how long the body is, which comes in pieces. timeout_s: for each wait on the network."""

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
        """Leave the rest of the body."""


class Carrier(Protocol):
    """Carries requests to a coordinator, from any thread."""

    def send(self, request: HttpRequest) -> HttpResponse:
        """The answer to a request, as soon as its head is here. Raises ConnectionFailed."""

    def close(self) -> None:
        """End all connections, those in use too."""


class Connections:
    """A carrier over as many connections as requests are under way."""

    def __init__(self, address: Address) -> None:
        self._address = address
        # Loading trusted certificates costs more CPU than the rest of a session: without TLS there are none.
        self._trusted = ssl.create_default_context() if address.scheme == "https" else None
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    def send(self, request: HttpRequest) -> HttpResponse:
        """The answer to a request, as soon as its head is here. Raises ConnectionFailed."""
        connection = self._connection()
        try:
            with _failing():
                return _Response(connection.ask(request), lambda kept: self._give_back(connection, kept))
        except BaseException:
            self._give_back(connection, kept=False)
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
                connection = self._idle.pop()
                if connection.alive:
                    return connection
                self._all.discard(connection)
                connection.end()
            host, port = self._address.host, self._address.port
            made = _TlsConnection(host, port, context=self._trusted) if self._trusted else _Connection(host, port)
            self._all.add(made)
            return made

    def _give_back(self, connection: _Connection, kept: bool) -> None:
        with self._lock:
            if kept and connection in self._all:
                self._idle.append(connection)
                return
            self._all.discard(connection)
        connection.end()


class _Connection(http.client.HTTPConnection):
    """The library's connection, but that the head of a request leaves with the first piece of its body."""

    _head: bytes | None = None

    @property
    def alive(self) -> bool:
        """Whether the other end has not closed it: between two answers it has nothing to say."""
        if self.sock is None:
            return False
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return not poll.poll(0)

    def ask(self, request: HttpRequest) -> http.client.HTTPResponse:
        """Send a request; answers with the head of the response."""
        self.timeout = request.timeout_s
        if self.sock is None:
            self.connect()
        else:
            self.sock.settimeout(request.timeout_s)
        self.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            self.putheader(name, value)
        pieces = iter(request.body)
        self._head = b""
        self.endheaders()
        # An answer that came before the connection was closed may say why. Without one, reading it fails.
        with contextlib.suppress(ConnectionError):
            head, self._head = self._head, None
            self.send(head + next(pieces, b""))
            for piece in pieces:
                self.send(piece)
        return self.getresponse()

    def send(self, data: bytes) -> None:  # type: ignore[override]  # nothing else is sent here
        """Send bytes, or keep them back when they are a head."""
        if self._head is None:
            super().send(data)
        else:
            self._head += data

    def end(self) -> None:
        """Close it, and let a thread that waits for it go on."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
        self.close()


class _TlsConnection(_Connection, http.client.HTTPSConnection):
    """The same over TLS."""


class _Response:
    def __init__(self, answer: http.client.HTTPResponse, done: Callable[[bool], None]) -> None:
        self.status = answer.status
        self.headers: Mapping[str, str] = {name.lower(): value for name, value in answer.getheaders()}
        self._answer = answer
        self._done = done
        self._whole = False

    def __iter__(self) -> Iterator[bytes]:
        with _failing():
            while piece := self._answer.read1(PIECE):
                yield piece
            if self._answer.length:
                raise http.client.IncompleteRead(b"", self._answer.length)
        self._whole = True

    def close(self) -> None:
        kept = self._whole and not self._answer.will_close
        self._answer.close()
        self._done(kept)


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionFailed(str(error) or type(error).__name__) from error
