"""Forms as browsers send them: the fields of a URL-encoded body, and the errors that a page can tell of."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qsl

from starlette.requests import Request

from coordinator.errors import (
    InvalidTask,
    KeysDiffer,
    MalformedMessage,
    RoleLacking,
    StoreConflict,
    TaskEnded,
    TooLarge,
    UnknownBlob,
    UnknownRound,
    UnknownTask,
)
from fedcore.errors import FedcoreError

STATUS_OF: Mapping[type[Exception], int] = {
    RoleLacking: 403,
    UnknownTask: 404,
    UnknownRound: 404,
    UnknownBlob: 404,
    TaskEnded: 409,
    KeysDiffer: 409,
    StoreConflict: 409,
    InvalidTask: 422,
    MalformedMessage: 400,
    TooLarge: 413,
    FedcoreError: 422,
}
"""Statuses of pages that say why something was not done, by its error."""
SHOWN = tuple(STATUS_OF)


def status_of(error: Exception) -> int:
    """The status of a page that shows one of the errors in SHOWN."""
    return next(status for kind, status in STATUS_OF.items() if isinstance(error, kind))


async def read_fields(request: Request, limit: int) -> dict[str, str]:
    """The fields of a form, the last of each name. Raises TooLarge for one of more than `limit` bytes."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise TooLarge(f"this form is too long: at most {limit:,} bytes are read")
    return dict(parse_qsl(data.decode(errors="replace"), keep_blank_values=True))
