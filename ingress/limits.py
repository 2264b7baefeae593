"""Limits of a port, callers' addresses, request rates, newcomers and connections, and errors of ports."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol, TypeAlias
from urllib.parse import urlsplit

# Errors of ports.
#
# IngressError
# ├── CannotListen      a port is taken, or cannot be opened for another reason
# └── RefusedRequest    a request breaks HTTP's rules, or a limit


class IngressError(Exception):
    """Base of every error raised by `ingress`."""


class CannotListen(IngressError):
    """A port is taken, or cannot be opened for another reason; the message names the option that changes it."""


class RefusedRequest(IngressError):
    """A request breaks HTTP's rules, or a limit. It is answered with `status`, and its connection is closed."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status = status

    def answer(self) -> bytes:
        """The whole answer."""
        head = f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\ncontent-type: text/plain\r\n"
        return f"{head}content-length: {len(str(self))}\r\nconnection: close\r\n\r\n{self}".encode()


# Limits of a port: callers' addresses, request rates, newcomers, and connections.


Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks(text: str) -> tuple[Network, ...]:
    """The networks of a text, such as `10.0.0.1, 10.1.0.0/16`. Raises ValueError naming the invalid part."""
    return tuple(ipaddress.ip_network(part) for part in filter(None, map(str.strip, text.split(","))))


def is_this_machine(host: str) -> bool:
    """Whether a host, by name or address, is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def past_proxies(url: str) -> dict[str, None]:
    """The `mounts` of an httpx2 client for `url`: no proxy that the environment names leads to this machine."""
    place = urlsplit(url).netloc.rpartition("@")[2]
    return {f"all://{place}": None} if is_this_machine(urlsplit(url).hostname or "") else {}


@lru_cache(maxsize=1 << 14)
def caller_of(address: str) -> str | None:
    """The caller for an address: itself, or the /64 network of an IPv6 subscriber. None for loopback: no limit.

    Loopback is this machine: a fleet of emulated devices, or a proxy in front of all devices.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return None if ip.is_loopback else ip.exploded[:19]
        ip = ip.ipv4_mapped
    return None if ip.is_loopback else str(ip)


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


_WINDOW_S = 60.0
_MOST_CALLERS = 500_000
"""The most callers that are remembered, about 100 MB; beyond it the least recent one is forgotten."""


class RateLimit:
    """At most `per_minute` requests of each caller in any minute, by the generic cell rate algorithm (ITU-T I.371).

    Each caller is stored as one number, the time at which its whole allowance is free again. So a request takes
    constant time and memory, even with a million callers. 0 per minute is no limit.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = _WINDOW_S / per_minute if per_minute else 0.0
        self._clock = clock
        self._free_at: OrderedDict[str, float] = OrderedDict()

    def wait_s(self, caller: str) -> float:
        """Count a request and return 0. Beyond the limit, return the seconds until it is admitted, uncounted."""
        if not self._interval_s:
            return 0.0
        now = self._clock()
        free_at = max(now, self._free_at.get(caller, now)) + self._interval_s
        # The margin is for rounding: the last request of a full minute is allowed.
        if free_at - now > _WINDOW_S + 1e-6:
            return free_at - now - _WINDOW_S
        self._free_at[caller] = free_at
        self._free_at.move_to_end(caller)
        if len(self._free_at) > _MOST_CALLERS:
            self._free_at.popitem(last=False)
        return 0.0


HEAD_S = 30.0
"""The longest time for a TLS handshake, and from there, or from the last answer, to the end of a request's head."""
WINDOW_S = 60.0
"""The window over which the rate of a body or an answer is measured."""
LEAST_BYTES_PER_S = 1000
"""The least mean rate of a body and of an answer in a window."""
LOOK_S = 1.0


class Limited(Protocol):
    """The part of a connection that its limits use."""

    @property
    def address(self) -> str | None:
        """The address of the other end; None when it has none."""

    @property
    def moved(self) -> int:
        """The bytes received, minus those waiting to be sent: it grows while anything moves."""

    @property
    def unread(self) -> int:
        """The bytes waiting to be sent, because the other end has not read earlier ones."""

    def hang_up(self) -> None:
        """Close the connection now, even if bytes are waiting to be sent."""


class ConnectionLimits:
    """The connections of a port, by state. Only the event loop's thread uses it.

    A connection *waits* from its beginning, before a TLS handshake, until the head of a request has arrived, and again
    after each answer. At most `most` connections may wait, and at most `most_of_address` of one address (0 is no
    limit). If one more waits, the one that has waited longest is closed, so idle connections cannot keep others out. A
    connection is *moving* while a body arrives, or while its other end reads an answer more slowly than it is produced.
    Such answers may hold at most `most_unread` bytes together. Beyond that, the connection is closed whose reader has
    read nothing for the longest time. A single larger answer is sent if it is the only one.

    proxies: the networks whose addresses stand for many callers, and are not limited. count_closed: called for each
    closed connection with the limit that it reached: `address`, `crowded`, `head`, `rate` or `unread`.
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
        """Whether the most connections wait, or the most are open: `most` that wait and `most` with requests."""
        return len(self._waiting) >= self._most or self._open >= 2 * self._most

    def accepted(self, connection: Limited, descriptor: int) -> None:
        """Admit a new connection (to its TLS handshake, if any), or close it or another one."""
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
        """Replace an accepted connection by its opened one, unless it was closed meanwhile."""
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
        """The reader of an answer has stopped reading."""
        self.moves(connection)
        self._unread[connection] = size = connection.unread
        self._unread_bytes += size
        while len(self._unread) > 1 and self._unread_bytes > self._most_unread:
            self._close(next(iter(self._unread)), "unread")

    def flows(self, connection: Limited) -> None:
        """The reader of an answer has read all that waited."""
        self._unread_bytes -= self._unread.pop(connection, 0)
        self.rests(connection)

    def rests(self, connection: Limited) -> None:
        """Nothing is moving any more."""
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
        """Close connections that take too long."""
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
