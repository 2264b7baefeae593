"""A least-recently-used cache."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The `limit` pairs that were asked for last. For one thread, and for what never changes once it is known."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pairs: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value of a key, if it is still here."""
        found = self._pairs.get(key)
        if found is not None:
            self._pairs.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> V:
        """Remember a value, which is also the answer; the pair that was longest not asked for may go."""
        self._pairs[key] = value
        self._pairs.move_to_end(key)
        if len(self._pairs) > self._limit:
            self._pairs.popitem(last=False)
        return value
