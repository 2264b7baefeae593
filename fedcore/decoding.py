"""Decoders and converters of structs. Modules build them only at import.

msgspec inspects a type when it first meets it, and keeps the result with the type. If several threads do that at once
for one type, the process ends in a segmentation fault (msgspec 0.22). Two modules that share a type may be imported at
the same time, so a lock lets one thread build at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors that a decoder raises for bytes that it cannot decode."""
_building = Lock()


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """A decoder of JSON. Its `decode` raises one of UNDECODABLE, or an error of the type's own checks."""
    with _building:
        return msgspec.json.Decoder(kind)


def decoded(
    data: str | bytes, kind: msgspec.json.Decoder[T], noun: str, error: type[Exception], version: int | None = None
) -> T:
    """What JSON says, such as a signed statement whose signature the caller has checked.

    noun: what it is, for messages. version: the only one that this side knows, if things of this kind have one.
    Raises `error` for what is malformed or of another version.
    """
    try:
        found = kind.decode(data)
    except UNDECODABLE as reason:
        raise error(f"malformed {noun}: {reason}") from reason
    if (found_version := getattr(found, "version", version)) != version:
        raise error(f"{noun} of version {found_version}, this side knows {version}")
    return found


def converter(
    kind: type[T], *, strict: bool = True, dec_hook: Callable[[type, Any], Any] | None = None
) -> Callable[[object], T]:
    """A function from plain values (dicts, lists, numbers, text) to a `kind`; it raises msgspec.ValidationError.

    strict, dec_hook: as in `msgspec.convert`.
    """
    decoder(kind)  # which describes the type and all that it holds
    return partial(msgspec.convert, type=kind, strict=strict, dec_hook=dec_hook)
