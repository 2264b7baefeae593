"""HTTP servers on public ports: sockets, configuration, URLs, web pages that may call them, and signed requests."""

from __future__ import annotations

import errno
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp

from fedcore.errors import InvalidKey, MalformedSignature, Unsigned, WrongBody
from fedcore.wire.signatures import DIGEST, PublicKey, SignableRequest, Signature, read_signature, sha256_in
from ingress.connection import Connection
from ingress.limits import CannotListen, ConnectionLimits

_METHODS = ("GET", "HEAD", "PATCH", "POST", "PUT")
_REQUEST_FIELDS = (
    "Content-Digest", "Content-Type", "If-None-Match", "If-Range", "Prefer", "Range", "Repr-Digest", "Signature",
    "Signature-Input", "Upload-Complete", "Upload-Length", "Upload-Offset",
)  # fmt: skip
_ANSWER_FIELDS = (
    "Content-Range", "Date", "ETag", "Muster-Problem", "Preference-Applied", "Retry-After", "Upload-Complete",
    "Upload-Offset",
)  # fmt: skip
_PREFLIGHT_S = 7200
"""The time for which a browser caches a preflight answer: the most that Chromium accepts."""


def origins(text: str) -> tuple[str, ...]:
    """The origins of a text, such as `https://app.example, http://127.0.0.1:8000`.

    Raises ValueError naming the invalid part.
    """
    listed = tuple(filter(None, map(str.strip, text.split(","))))
    for origin in listed:
        parts = urlsplit(origin)
        if parts.scheme not in ("http", "https") or origin != f"{parts.scheme}://{parts.netloc}" or not parts.hostname:
            raise ValueError(f"{origin!r} is no origin; an origin is a scheme and a host, such as https://app.example")
    return listed


def open_to(allowed: tuple[str, ...], app: ASGIApp) -> ASGIApp:
    """Wrap an application so that pages of these origins may use it. This must be the outermost layer.

    A page cannot read an answer without the header fields that this adds, so a refusal by an outer layer would look
    like a broken connection.
    """
    if not allowed:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed,
        allow_methods=_METHODS,
        allow_headers=_REQUEST_FIELDS,
        expose_headers=_ANSWER_FIELDS,
        max_age=_PREFLIGHT_S,
    )


BACKLOG = 2048
"""Connections that the system keeps for a listening socket until they are accepted."""
_AT_ONCE = 16
"""The most connections that a turn of the event loop accepts on a full port: they stay open until the next turn."""
_UNSENT_BYTES = 1 << 17
"""The most bytes of an answer that the kernel buffers for a full receiver; by default it would buffer megabytes."""


class Listener(socket.socket):
    """A listening socket. limits: of its port's connections; they are told of each accepted one."""

    def __init__(self, limits: ConnectionLimits, listening: socket.socket) -> None:
        super().__init__(listening.family, listening.type, listening.proto, listening.detach())
        self._limits = limits
        self._beyond = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection and its address, as of any socket. Raises BlockingIOError when the turn is to end."""
        if self._limits.full:
            self._beyond += 1
            if self._beyond > _AT_ONCE:
                self._beyond = 0
                raise BlockingIOError
        plain, address = super().accept()
        accepted = _Accepted(self._limits, plain, address[0])
        self._limits.accepted(accepted, accepted.fileno())
        return accepted, address


class _Accepted(socket.socket):
    """A connection that was accepted; the limits know it until its handshake ends."""

    moved = unread = 0

    def __init__(self, limits: ConnectionLimits, plain: socket.socket, address: str) -> None:
        super().__init__(plain.family, plain.type, plain.proto, plain.detach())
        self.address = address
        self._limits = limits

    def hang_up(self) -> None:
        """Shut the connection down: the next read meets its end."""
        with suppress(OSError):  # the other end was faster
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it, as any socket."""
        self._limits.ended(self.fileno())
        super().close()


@contextmanager
def listening(host: str, port: int, limits: ConnectionLimits, option: str = "--port") -> Iterator[Listener]:
    """A socket that listens while the block runs; port 0 takes a free one.

    option: the command-line option that chooses another port. Raises CannotListen.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        plain = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = f"port {port} is taken" if taken else f"cannot listen on port {port}: {error.strerror or error}"
        raise CannotListen(f"{host}: {why}; choose another with {option} (0 takes a free one)") from error
    with Listener(limits, plain) as listener:
        # Connections inherit it. asyncio sets it only on sockets that it made itself; without it the second half of an
        # answer waits for the acknowledgement of the first, which many systems hold back for 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        yield listener


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """The HTTP settings of a port: HTTPS if it has a certificate. A stop waits `drain_s` seconds for open requests."""

    tls_cert: Path | None
    tls_key: Path | None
    drain_s: float

    def url(self, listener: socket.socket) -> str:
        """The URL of a listening socket."""
        scheme = "https" if self.tls_cert else "http"
        host, port = listener.getsockname()[:2]
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def uvicorn(self, app: ASGIApp, limits: ConnectionLimits) -> uvicorn.Config:
        """These settings for uvicorn, which serves `app` on a `Listener` with the same limits."""
        return uvicorn.Config(
            app,
            http=cast("type[Connection]", partial(Connection, limits)),
            ws="none",
            loop="asyncio",  # even if uvloop is installed, whose turns differ from what CheckInShedder assumes
            access_log=False,  # a path holds an assignment's secret id
            log_config=None,
            backlog=BACKLOG,
            proxy_headers=bool(limits.proxies),
            forwarded_allow_ips=list(map(str, limits.proxies)),
            server_header=False,
            ssl_certfile=self.tls_cert,
            ssl_keyfile=self.tls_key,
            timeout_graceful_shutdown=math.ceil(self.drain_s),
        )


# Signed requests over HTTP: reading and checking signatures and the bodies that they cover.
#
# Spec: docs/spec/wire.md §10.


class Signed(msgspec.Struct, frozen=True):
    """The signer of a request whose signature was checked. `digest`: of the body."""

    keyid: str
    created: int
    digest: bytes | None

    def check(self, sha256: bytes) -> None:
        """Raise WrongBody unless a body's SHA-256 is the signed one. Without a digest no body was signed."""
        if self.digest is not None and self.digest != sha256:
            raise WrongBody("the body is not the one that Content-Digest was made of; send it again")


def read(request: Request) -> tuple[Signature, SignableRequest]:
    """The signature of a request, and the request that it covers. The signature covers all that it must, and is not
    verified yet.

    Raises Unsigned or MalformedSignature.
    """
    fields = _fields(request)
    if "signature" not in fields or "signature-input" not in fields:
        raise Unsigned("sign the request with the device's key, as RFC 9421 and the device protocol say")
    return read_signature(request.method, _target(request), fields)


def named_key(signature: Signature) -> PublicKey:
    """The public key that a signature names as its keyid. Raises MalformedSignature when the keyid is no public key."""
    try:
        return PublicKey.parse(signature.keyid)
    except InvalidKey as error:
        raise MalformedSignature(f"here, keyid is the public key: {error}") from error


def signer_of(signature: Signature, about: SignableRequest, key: PublicKey) -> Signed:
    """The signer, if the holder of `key` signed this request. Raises ForgedSignature, MalformedSignature.

    This checks neither the time of the signature nor whether it came before.
    """
    signature.check(about, key)
    if DIGEST not in signature.covered:
        return Signed(signature.keyid, signature.created, None)
    digest = sha256_in(about.field(DIGEST))
    if digest is None:
        raise MalformedSignature("send the body's digest as Content-Digest: sha-256=:<base64>:")
    return Signed(signature.keyid, signature.created, digest)


def _target(request: Request) -> str:
    path, query = request.scope["raw_path"].decode("latin-1"), request.scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _fields(request: Request) -> dict[str, str]:
    """The header fields by lower-case name, lines of one name joined as RFC 9110 joins them."""
    fields: dict[str, str] = {}
    for name, value in request.scope["headers"]:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        fields[key] = f"{fields[key]}, {text}" if key in fields else text
    return fields
