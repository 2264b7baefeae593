"""Newcomers: requests of unknown senders, while their bodies arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Newcomers:
    """Requests of unknown senders whose bodies are arriving. Beyond `most` at a time, the oldest is cut off.

    So slow requests cannot keep out new ones.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._cut_off: dict[object, Callable[[], None]] = {}

    @contextmanager
    def hold(self, cut_off: Callable[[], None]) -> Iterator[None]:
        """Count a request while the block runs. `cut_off` ends the request."""
        if len(self._cut_off) == self._most:
            self._cut_off.pop(next(iter(self._cut_off)))()
        me = object()
        self._cut_off[me] = cut_off
        try:
            yield
        finally:
            self._cut_off.pop(me, None)
