"""Input of browsers: numbers in addresses and fields of forms; and the errors that a page can tell of."""

from __future__ import annotations

from typing import Annotated, TypeAlias
from urllib.parse import parse_qsl

from pydantic import Field
from starlette.requests import Request

from coordinator.api.admin.problems import ADMIN_ERRORS, ADMIN_PROBLEMS, slug_of
from coordinator.errors import MalformedMessage, Refusal, StoreConflict, TooLarge, UnknownBlob
from fedcore.wire.problems import PROBLEMS

Number: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
"""The number of a round, or of an attempt at one, in an address."""
RowId: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
SHOWN: tuple[type[Exception], ...] = (*ADMIN_ERRORS.values(), StoreConflict, MalformedMessage, TooLarge, UnknownBlob)
"""The errors for which a page says why something was not done."""


def status_of(error: Exception) -> int:
    """The status of a page that shows one of the errors in SHOWN, as its problem type has it."""
    if isinstance(error, StoreConflict):
        return 409
    return PROBLEMS[error.slug].status if isinstance(error, Refusal) else ADMIN_PROBLEMS[slug_of(error)].status


async def read_fields(request: Request, limit: int) -> dict[str, str]:
    """The fields of a form, the last of each name. Raises TooLarge for one of more than `limit` bytes."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise TooLarge(f"this form is too long: at most {limit:,} bytes are read")
    return dict(parse_qsl(data.decode(errors="replace"), keep_blank_values=True))
