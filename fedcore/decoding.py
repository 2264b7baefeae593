"""Decoders and converters of structs, built when the module that uses them is imported, and nowhere else.

msgspec describes a type to itself when it first meets it, and keeps the description with the type. When several threads
do that at once for one type, the process ends in a segmentation fault (msgspec 0.22). Imports of two modules may run at
the same time and share a type, so the building itself is for one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""The errors of a decoder on bytes that are no such value."""
_building = Lock()


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """A decoder of JSON; its `decode` raises one of UNDECODABLE, and what the type's own checks raise."""
    with _building:
        return msgspec.json.Decoder(kind)


def converter(
    kind: type[T], *, strict: bool = True, dec_hook: Callable[[type, Any], Any] | None = None
) -> Callable[[object], T]:
    """A function from plain values (dicts, lists, numbers, text) to a `kind`; it raises msgspec.ValidationError.

    strict, dec_hook: those of `msgspec.convert`.
    """
    decoder(kind)  # which describes the type and all that it holds
    return partial(msgspec.convert, type=kind, strict=strict, dec_hook=dec_hook)
