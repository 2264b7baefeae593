"""Deltas between checkpoints of a task, made when one is asked for. Spec: docs/spec/wire.md §5."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from coordinator.api.http import while_connected
from coordinator.api.limits import MemoryBudget
from coordinator.errors import TooLarge, Unavailable, UnknownBlob
from coordinator.store.blobs import Blobs
from fedcore.deltas import delta_between
from fedcore.plan import BlobRef

Pair: TypeAlias = tuple[BlobRef, BlobRef]
MOST_BYTES = 1 << 25
"""The longest blob that has deltas."""
_OWN_BYTES = 1 << 10
"""What a delta takes beside its bytes."""


class Deltas:
    """Deltas of the blobs in a store, in memory of `room`. When that is full, devices fetch the whole blob.

    They are made one at a time, so that many different ones take neither all threads nor much memory. All requests for
    one share it: devices of a round mostly ask for the same ones. Those that were read last are kept for the next.
    """

    def __init__(self, blobs: Blobs, room: MemoryBudget) -> None:
        self._blobs = blobs
        self._room = room
        self._held: OrderedDict[Pair, _Delta] = OrderedDict()  # those read last are the last
        self._making = asyncio.Lock()

    @asynccontextmanager
    async def between(self, base: BlobRef, target: BlobRef, request: Request) -> AsyncIterator[bytes]:
        """The delta from `base` to `target`, for as long as the block runs.

        Raises UnknownBlob where the whole blob is the better answer; ClientDisconnect when nobody waits any more.
        """
        if base.size != target.size or target.size > MOST_BYTES:
            raise UnknownBlob(
                f"there is no delta from {base.sha256[:12]}… to {target.sha256[:12]}…: blobs with one are of the same "
                f"size, up to {MOST_BYTES:,} bytes"
            )
        pair = base, target
        entry = self._held.get(pair) or self._begin(pair)
        self._held.move_to_end(pair)
        entry.readers += 1
        try:
            delta = await while_connected(request, asyncio.shield(entry.making))
            if not delta:
                raise UnknownBlob(f"the delta to {target.sha256[:12]}… is no shorter than the blob")
            yield delta
        finally:
            entry.readers -= 1
            if not entry.readers and not entry.making.done():
                self._drop(pair, entry)

    def _begin(self, pair: Pair) -> _Delta:
        size = pair[1].size + _OWN_BYTES
        while True:
            try:
                self._room.take(size)
                break
            except (TooLarge, Unavailable) as error:
                idle = next((item for item in self._held.items() if not item[1].readers), None)
                if idle is None:
                    raise UnknownBlob("there is no room for another delta now; fetch the whole blob") from error
                self._drop(*idle)
        entry = self._held[pair] = _Delta(size)
        entry.making = asyncio.create_task(self._make(pair, entry))
        return entry

    async def _make(self, pair: Pair, entry: _Delta) -> bytes:
        """The delta; empty where it is no shorter than the blob."""
        try:
            async with self._making:
                if not entry.readers:
                    return b""  # all who asked have left
                delta = await run_in_threadpool(self._between, *pair)
        except Exception:
            self._drop(pair, entry)
            if entry.readers:
                raise
            return b""
        if len(delta) >= pair[1].size:
            delta = b""
        if self._held.get(pair) is entry:
            self._room.free(entry.size - len(delta) - _OWN_BYTES)
            entry.size = len(delta) + _OWN_BYTES
        return delta

    def _drop(self, pair: Pair, entry: _Delta) -> None:
        if self._held.get(pair) is entry:
            del self._held[pair]
            self._room.free(entry.size)

    def _between(self, base: BlobRef, target: BlobRef) -> bytes:
        return delta_between(*(self._blobs.get(ref.sha256) for ref in (base, target)))


class _Delta:
    """A delta, made or still to be made: its reserved memory, and the requests that wait for it or read it."""

    making: asyncio.Task[bytes]

    def __init__(self, size: int) -> None:
        self.size = size
        self.readers = 0
