"""A least-recently-used cache."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """At most `limit` pairs, those used last. For one thread, and for values that never change."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._pairs: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """The value of a key; None when it is not cached."""
        value = self._pairs.get(key)
        if value is not None:
            self._pairs.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> V:
        """Cache a value and answer it; the pair that was used longest ago may go."""
        self._pairs[key] = value
        self._pairs.move_to_end(key)
        if len(self._pairs) > self._limit:
            self._pairs.popitem(last=False)
        return value
