"""Limits of the connections of one port: how many wait for a request, and how slowly bytes may move on them."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from ingress.addresses import Network, caller_of

HEAD_S = 30.0
"""How long a TLS handshake may take, and then, or from the last answer on, the head of a request to its end."""
WINDOW_S = 60.0
"""How long a body, or an answer, may take to move by the least that is demanded of it."""
LEAST_BYTES_PER_S = 1000
"""The least rate of a body and of an answer, on the average of a window."""
LOOK_S = 1.0


class Limited(Protocol):
    """A connection as its limits see it."""

    @property
    def address(self) -> str | None:
        """The address of the other end; None when it has none."""

    @property
    def moved(self) -> int:
        """The bytes that came, less those that wait to be sent: it grows while anything moves."""

    @property
    def unread(self) -> int:
        """The bytes that wait to be sent, as the other end has not read what came before."""

    def hang_up(self) -> None:
        """Close the connection now, whatever is still to be sent."""


class ConnectionLimits:
    """The connections of a port, by what they wait for. Used by the event loop's thread only.

    A connection *waits* from its beginning, before a TLS handshake, until the head of a request has arrived, and again
    after each answer. Of those, `most` may be open, and `most_of_address` of one address (0 is no limit). For one more
    in all, the one that has waited longest is closed: so connections that ask for nothing keep nobody out. A connection
    is *moving* while a body arrives, or while its other end does not take an answer as fast as it comes. What such
    answers hold is `most_unread` bytes at most, in all: for more, the connection is closed that has taken nothing for
    the longest time. An answer that is larger by itself is sent when it is the only one.

    proxies: the networks whose addresses stand for many callers, and are not limited. count_closed: called with the
    limit that was reached, for each connection that is closed: `address`, `crowded`, `head`, `rate` or `unread`.
    """

    def __init__(
        self,
        most: int,
        most_of_address: int,
        proxies: tuple[Network, ...] = (),
        count_closed: Callable[[str], None] = lambda limit: None,
        *,
        most_unread: int = 1 << 26,
    ) -> None:
        self.proxies = proxies
        self._most = most
        self._most_of_address = most_of_address
        self._count_closed = count_closed
        self._open = 0
        self._handshakes: dict[int, Limited] = {}  # by their descriptors
        self._waiting: dict[Limited, float] = {}  # the longest first
        self._waiting_of: Counter[str] = Counter()
        self._moving: dict[Limited, tuple[float, int]] = {}
        self._most_unread = most_unread
        self._unread: dict[Limited, int] = {}  # the longest first
        self._unread_bytes = 0
        self._looking = False
        self._caller_of = lru_cache(1 << 14)(self._find_caller)

    @property
    def full(self) -> bool:
        """Whether as many wait as may, or as many are open: `most` that wait, and as many that ask for something."""
        return len(self._waiting) >= self._most or self._open >= 2 * self._most

    def accepted(self, connection: Limited, descriptor: int) -> None:
        """Admit a new connection to its TLS handshake, where there is one, or close it or another one."""
        self._open += 1
        caller = self._caller_of(connection.address)
        if caller is not None and 0 < self._most_of_address <= self._waiting_of[caller]:
            self._close(connection, "address")
            return
        self._handshakes[descriptor] = connection
        self.waits(connection)
        if len(self._waiting) > self._most:
            self._close(next(iter(self._waiting)), "crowded")

    def opened(self, connection: Limited, descriptor: int) -> None:
        """Let a connection take the place of the one that was accepted, unless that was closed meanwhile."""
        accepted = self._handshakes.pop(descriptor, None)
        if accepted in self._waiting:
            self.closed(accepted)
            self.waits(connection)
        else:
            connection.hang_up()

    def ended(self, descriptor: int) -> None:
        """An accepted connection is closed. Its descriptor is negative when it was closed before."""
        self._open -= descriptor >= 0
        accepted = self._handshakes.pop(descriptor, None)
        if accepted is not None:
            self.closed(accepted)

    def waits(self, connection: Limited) -> None:
        """A connection waits for a request from now on."""
        self._waiting[connection] = time.monotonic()
        caller = self._caller_of(connection.address)
        if caller is not None:
            self._waiting_of[caller] += 1
        self._look_soon()

    def works(self, connection: Limited) -> None:
        """The head of a request has arrived."""
        if self._waiting.pop(connection, None) is None:
            return
        caller = self._caller_of(connection.address)
        if caller is not None:
            self._waiting_of[caller] -= 1
            if not self._waiting_of[caller]:
                del self._waiting_of[caller]

    def moves(self, connection: Limited) -> None:
        """A body is arriving, or an answer is taken slowly."""
        if connection not in self._moving:
            self._moving[connection] = (time.monotonic(), connection.moved)
            self._look_soon()

    def stalls(self, connection: Limited) -> None:
        """An answer waits for its reader."""
        self.moves(connection)
        self._unread[connection] = size = connection.unread
        self._unread_bytes += size
        while len(self._unread) > 1 and self._unread_bytes > self._most_unread:
            self._close(next(iter(self._unread)), "unread")

    def flows(self, connection: Limited) -> None:
        """The reader of an answer has taken all that waited."""
        self._unread_bytes -= self._unread.pop(connection, 0)
        self.rests(connection)

    def rests(self, connection: Limited) -> None:
        """Nothing has to move any more."""
        self._moving.pop(connection, None)

    def closed(self, connection: Limited) -> None:
        """Forget a connection."""
        self.works(connection)
        self.flows(connection)

    def _close(self, connection: Limited, reason: str) -> None:
        self._count_closed(reason)
        self.closed(connection)
        connection.hang_up()

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """Close what takes too long."""
        now = time.monotonic()
        while self._waiting and now - next(iter(self._waiting.values())) > HEAD_S:
            self._close(next(iter(self._waiting)), "head")
        for connection, (since, before) in list(self._moving.items()):
            if now - since > WINDOW_S:
                if connection.moved - before < LEAST_BYTES_PER_S * (now - since):
                    self._close(connection, "rate")
                else:
                    self._moving[connection] = (now, connection.moved)
        self._looking = False
        if self._waiting or self._moving:
            self._look_soon()

    def _find_caller(self, address: str | None) -> str | None:
        """The caller that an address counts for; None, and no limit, for loopback and proxies."""
        if address is None:
            return None
        ip = ipaddress.ip_address(address.partition("%")[0])
        return None if any(ip in network for network in self.proxies) else caller_of(address)
