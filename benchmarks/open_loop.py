"""Requests at fixed times that do not wait for answers. They are signed beforehand, so that only the server works."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_RETRY_AFTER = re.compile(rb"\r\nretry-after: *\d+\r\n", re.IGNORECASE)
_PATIENCE_S = 60.0


@dataclass(slots=True)
class Answers:
    """All answers: their milliseconds by status, from the time at which each request was due; broken connections.

    told_when: whether each 429 and 503 said when to come back. offered, wall_s: requests sent per second, and seconds
    until the last answer.
    """

    ms: dict[int, list[float]] = field(default_factory=dict)
    broken: int = 0
    told_when: bool = True
    offered: float = 0.0
    wall_s: float = 0.0

    @property
    def count(self) -> int:
        """Requests that were answered or broken."""
        return self.broken + sum(map(len, self.ms.values()))


async def send_evenly(host: str, port: int, requests: Sequence[bytes], rate: float) -> Answers:
    """Send these HTTP/1.1 requests, `rate` a second, on as many connections as needed; wait for all answers."""
    pool, began = _Pool(host, port), time.perf_counter()
    for number, request in enumerate(requests):
        due = began + number / rate
        if (wait_s := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        elif number % 16 == 0:
            await asyncio.sleep(0)  # late: answers must be received nevertheless
        pool.ask(request, due)
    answers = pool.answers
    answers.offered = len(requests) / (time.perf_counter() - began)
    until = time.perf_counter() + _PATIENCE_S
    while answers.count < len(requests) and time.perf_counter() < until:
        await asyncio.sleep(0.01)
    answers.wall_s = time.perf_counter() - began
    for connection in pool.free:
        connection.close()
    return answers


class _Pool:
    """Connections to one server, of which those in `free` are idle."""

    def __init__(self, host: str, port: int) -> None:
        self.answers = Answers()
        self.free: list[_Connection] = []
        self._host, self._port = host, port
        self._opening: set[asyncio.Task[None]] = set()

    def ask(self, request: bytes, due: float) -> None:
        """Send a request, on a connection of its own if none is idle."""
        while self.free and self.free[-1].closing:
            self.free.pop()
        if self.free:
            self.free.pop().ask(request, due)
            return
        task = asyncio.create_task(self._ask_on_a_new_one(request, due))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _ask_on_a_new_one(self, request: bytes, due: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(lambda: _Connection(self), self._host, self._port)
        except OSError:
            self.answers.broken += 1
        else:
            connection.ask(request, due)


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._due: float | None = None
        self._data = b""

    @property
    def closing(self) -> bool:
        """Whether no more requests can be sent."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    def ask(self, request: bytes, due: float) -> None:
        """Send a request."""
        self._due, self._data = due, b""
        self._transport.write(request)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - for the type checker
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take more of the answer. Once it is whole it counts, and the connection is free again."""
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        length = _LENGTH.search(head + b"\r\n")
        if not end or self._due is None or (length is not None and len(body) < int(length[1])):
            return
        status = int(head[9:12])
        self._pool.answers.ms.setdefault(status, []).append(1e3 * (time.perf_counter() - self._due))
        if status in (429, 503) and not _RETRY_AFTER.search(head + b"\r\n"):
            self._pool.answers.told_when = False
        self._due = None
        self._pool.free.append(self)

    def connection_lost(self, _: Exception | None) -> None:
        if self._due is not None:
            self._pool.answers.broken += 1
            self._due = None
