"""Deltas between blobs that devices may have, made when one is asked for. Spec: docs/spec/wire.md §5."""

from __future__ import annotations

import asyncio

from starlette.concurrency import run_in_threadpool

from coordinator.api.lru_cache import LruCache
from coordinator.errors import UnknownBlob
from coordinator.store.blobs import Blobs
from fedcore.deltas import delta_between
from fedcore.plan import BlobRef

MOST_BYTES, REMEMBERED = 1 << 25, 4
"""The longest blob that has deltas, and the deltas that are kept: devices of a round mostly ask for the same ones."""


class Deltas:
    """Deltas of the blobs in a store. They are made one at a time: many different ones must not take all threads."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._made: LruCache[tuple[BlobRef, BlobRef], bytes] = LruCache(REMEMBERED)
        self._making = asyncio.Lock()

    async def between(self, base: BlobRef, target: BlobRef) -> bytes:
        """The delta from `base` to `target`. Raises UnknownBlob where the whole blob is the better answer."""
        if base.size != target.size or target.size > MOST_BYTES:
            raise UnknownBlob(
                f"there is no delta from {base.sha256[:12]}… to {target.sha256[:12]}…: blobs with one are of the same "
                f"size, up to {MOST_BYTES:,} bytes"
            )
        async with self._making:
            delta = self._made.get((base, target))
            if delta is None:
                delta = self._made.put((base, target), await run_in_threadpool(self._make, base, target))
        if len(delta) >= target.size:
            raise UnknownBlob(f"the delta to {target.sha256[:12]}… is no shorter than the blob")
        return delta

    def _make(self, base: BlobRef, target: BlobRef) -> bytes:
        return delta_between(*(self._blobs.get(one.sha256) for one in (base, target)))
