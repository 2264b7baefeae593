"""Immutable blobs over HTTP: strong ETag, conditional requests, single ranges (RFC 9110 §13, §14)."""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from coordinator.errors import RangeNotSatisfiable
from coordinator.store.blobs import Blobs
from fedcore.plan import BlobRef

BYTES = "application/octet-stream"
FOR_EVER = {"Cache-Control": "public, max-age=31536000, immutable"}
# So much is answered in one piece: every piece of a stream is fetched by a thread, which costs more than the bytes.
WHOLE_BYTES = 1 << 18
_RANGE = re.compile(r"bytes=(?:([0-9]+)-([0-9]+)?|-([0-9]+))", re.IGNORECASE)
_DIGITS = 18
_BEYOND = 10**_DIGITS


def serve_blob(request: Request, ref: BlobRef, blobs: Blobs) -> Response:
    """A blob, the part of it that was asked for, or 304. Raises RangeNotSatisfiable, or UnknownBlob."""
    etag = f'"{ref.sha256}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes", **FOR_EVER}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if known & {etag, "*"}:
        return Response(status_code=304, headers=headers)
    wanted = request.headers.get("range") if request.headers.get("if-range", etag) == etag else None
    part = requested_range(wanted, ref.size)
    status = 200
    if part is None:
        part = range(ref.size)
    else:
        status, headers["Content-Range"] = 206, f"bytes {part.start}-{part.stop - 1}/{ref.size}"
    pieces = blobs.read(ref.sha256, part)
    if len(part) <= WHOLE_BYTES:
        return Response(b"".join(pieces), status, headers, media_type=BYTES)
    headers["Content-Length"] = str(len(part))
    return StreamingResponse(pieces, status, headers, media_type=BYTES)


def requested_range(header: str | None, size: int) -> range | None:
    """The bytes that a Range header asks for; None for the whole, as for several ranges or a malformed header.

    Raises RangeNotSatisfiable when the range starts behind the end.
    """
    found = _RANGE.fullmatch(header.strip()) if header else None
    if found is None:
        return None
    first, last, suffix = (None if digits is None else _position(digits) for digits in found.groups())
    if first is not None and last is not None and last < first:
        return None
    start = first if first is not None else max(0, size - (suffix or 0))
    if start >= size:
        raise RangeNotSatisfiable(size)
    return range(start, size if last is None else min(last + 1, size))


def _position(digits: str) -> int:
    """A position in a blob: one of more digits than Python converts is behind every end, too (RFC 9110 §14.1.1)."""
    digits = digits.lstrip("0")
    return _BEYOND if len(digits) > _DIGITS else int(digits or "0")
