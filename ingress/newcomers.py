"""Newcomers: requests that anybody may begin, while their bodies are on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Newcomers:
    """Requests of anybody whose bodies are on their way, `most` at a time: for one more, the oldest is cut off.

    So those that take long keep out nobody, not even each other's latest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._cut_off: dict[object, Callable[[], None]] = {}

    @contextmanager
    def hold(self, cut_off: Callable[[], None]) -> Iterator[None]:
        """Count a request while the block runs, which `cut_off` ends."""
        if len(self._cut_off) == self._most:
            self._cut_off.pop(next(iter(self._cut_off)))()
        me = object()
        self._cut_off[me] = cut_off
        try:
            yield
        finally:
            self._cut_off.pop(me, None)
