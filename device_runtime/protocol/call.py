"""A call as one HTTP request: path, body, time, signature, and the bytes that it transfers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from device_runtime.errors import BadAnswer, Unreachable
from device_runtime.protocol.connection import PIECE, Address, HttpRequest, HttpResponse
from fedcore.wire.signatures import SignableRequest, Signer, content_digest, digest_field

TIMEOUT_S = 30.0
SLOWEST = 1000
"""The least bytes of a body per second; a slower peer counts as gone (docs/spec/wire.md §1)."""
LARGEST_MESSAGE = 1 << 20
JSON = {"content-type": "application/json"}
BYTES = {"content-type": "application/octet-stream"}
PARTIAL = {"content-type": "application/partial-upload"}


@dataclass(slots=True)
class BytesMoved:
    """Bytes of bodies, over all conversations on one connection."""

    up: int = 0
    down: int = 0

    def leaving(self, content: bytes | memoryview) -> Iterator[bytes]:
        """The pieces of a body, counted as they leave."""
        for start in range(0, len(content), PIECE):
            piece = bytes(content[start : start + PIECE])
            self.up += len(piece)
            yield piece

    def arriving(self, response: HttpResponse) -> Iterator[bytes]:
        """The pieces of an answer's body, counted as they arrive."""
        for piece in response:
            self.down += len(piece)
            yield piece


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the wire protocol. Without a signer the device signs it; without a time it is signed with the current
    one.

    timeout_s: for each wait on the network. created: in seconds since 1970. sha256: of the content, in hex, if already
    known.
    """

    method: str
    path: str
    content: bytes | memoryview = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S
    signer: Signer | None = None
    created: int | None = None
    sha256: str = ""

    @property
    def name(self) -> str:
        """Its name in errors."""
        return f"{self.method} {self.path}"

    def request(
        self, address: Address, signer: Signer | None, now: int, moved: BytesMoved, timeout_s: float
    ) -> HttpRequest:
        """The request, with a fresh signature if there is a signer.

        now: the time of the signature, if the call has none of its own. moved: counts the body as it leaves.
        """
        headers = {"host": address.authority, **self.headers, "content-length": str(len(self.content))}
        if self.content:
            digest = bytes.fromhex(self.sha256)
            headers["content-digest"] = digest_field(digest) if digest else content_digest(self.content)
        target = address.path + self.path
        if signer is not None:
            about = SignableRequest(self.method, address.authority, target, headers.get)
            headers |= signer.headers(about, now if self.created is None else self.created)
        return HttpRequest(self.method, target, headers, moved.leaving(self.content), timeout_s)

    def paced(self, pieces: Iterable[bytes], most: int) -> Iterator[bytes]:
        """The pieces of an answer of `most` bytes. Raises Unreachable once it took longer than at the least rate."""
        began, allowed_s = time.monotonic(), self.timeout_s + most / SLOWEST
        for piece in pieces:
            yield piece
            if time.monotonic() - began > allowed_s:
                raise Unreachable(f"{self.name}: the answer came too slowly")

    def body_of(self, pieces: Iterable[bytes], allowed_s: Callable[[], float]) -> bytes:
        """The body of an answer. Raises Unreachable after `allowed_s`, and BadAnswer above LARGEST_MESSAGE bytes."""
        body, began = bytearray(), time.monotonic()
        for piece in pieces:
            body += piece
            if time.monotonic() - began > allowed_s():
                raise Unreachable(f"{self.name}: the answer took too long")
            if len(body) > LARGEST_MESSAGE:
                raise BadAnswer(f"{self.name}: the answer is longer than {LARGEST_MESSAGE} bytes")
        return bytes(body)
