"""Immutable blobs over HTTP: strong ETag, conditional requests, single ranges (RFC 9110 §13, §14)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AsyncExitStack

from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from coordinator.errors import RangeNotSatisfiable
from coordinator.store.blobs import Blobs
from fedcore.plan import BlobRef

BYTES = "application/octet-stream"
FOR_EVER = {"Cache-Control": "public, max-age=31536000, immutable"}
# Up to this size an answer is one piece: a thread fetches each piece of a stream, which costs more than the bytes.
PIECE_BYTES = 1 << 18
_RANGE = re.compile(r"bytes=(?:([0-9]+)-([0-9]+)?|-([0-9]+))", re.IGNORECASE)
_DIGITS = 18
_BEYOND = 10**_DIGITS


def serve_blob(request: Request, ref: BlobRef, blobs: Blobs) -> Response:
    """A blob, the part of it that was asked for, or 304. Raises RangeNotSatisfiable, or UnknownBlob."""
    etag = f'"{ref.sha256}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes", **FOR_EVER}
    held = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if held & {etag, "*"}:
        return Response(status_code=304, headers=headers)
    wanted = request.headers.get("range") if request.headers.get("if-range", etag) == etag else None
    part = requested_range(wanted, ref.size)
    status = 200
    if part is None:
        part = range(ref.size)
    else:
        status, headers["Content-Range"] = 206, f"bytes {part.start}-{part.stop - 1}/{ref.size}"
    pieces = blobs.read(ref.sha256, part)
    if len(part) <= PIECE_BYTES:
        return Response(b"".join(pieces), status, headers, media_type=BYTES)
    headers["Content-Length"] = str(len(part))
    return StreamingResponse(_as_taken(iterate_in_threadpool(pieces)), status, headers, media_type=BYTES)


class HeldAnswer(StreamingResponse):
    """Bytes in memory until they are sent. Then, or when their reader leaves, `held` is closed."""

    def __init__(self, data: bytes, held: AsyncExitStack) -> None:
        headers = {"Content-Length": str(len(data)), **FOR_EVER}
        super().__init__(_as_taken(_pieces(data)), headers=headers, media_type=BYTES)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        async with self._held:
            await super().__call__(scope, receive, send)


async def _pieces(data: bytes) -> AsyncIterator[memoryview]:
    for start in range(0, len(data), PIECE_BYTES):
        yield memoryview(data)[start : start + PIECE_BYTES]


async def _as_taken(pieces: AsyncIterable[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    """Pieces, each read only when the other end has taken the one before."""
    async for piece in pieces:
        yield piece
        del piece
        yield b""  # the server waits before it sends anything more


def requested_range(header: str | None, size: int) -> range | None:
    """The bytes that a Range header asks for; None for the whole, as for several ranges or a malformed header.

    Raises RangeNotSatisfiable when the range starts behind the end.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None:
        return None
    first, last, suffix = (None if digits is None else _position(digits) for digits in match.groups())
    if first is not None and last is not None and last < first:
        return None
    start = first if first is not None else max(0, size - (suffix or 0))
    if start >= size:
        raise RangeNotSatisfiable(size)
    return range(start, size if last is None else min(last + 1, size))


def _position(digits: str) -> int:
    """A position in a blob. One with more digits than Python converts is beyond every end, too (RFC 9110 §14.1.1)."""
    digits = digits.lstrip("0")
    return _BEYOND if len(digits) > _DIGITS else int(digits or "0")
