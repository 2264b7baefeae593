"""A listening socket whose connections are counted as soon as they are accepted, before a TLS handshake."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ingress.connection_limits import ConnectionLimits
from ingress.errors import CannotListen

BACKLOG = 2048
"""Connections that the system keeps for a listening socket until they are accepted."""
_AT_ONCE = 16
"""The most connections that a turn of the event loop accepts on a full port: they stay open until the next turn."""
_UNSENT_BYTES = 1 << 17
"""The most bytes of an answer that the kernel buffers for a full receiver; by default it would buffer megabytes."""


class Listener(socket.socket):
    """A listening socket. limits: of its port's connections; they are told of each accepted one."""

    def __init__(self, limits: ConnectionLimits, listening: socket.socket) -> None:
        super().__init__(listening.family, listening.type, listening.proto, listening.detach())
        self._limits = limits
        self._beyond = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection and its address, as of any socket. Raises BlockingIOError when the turn is to end."""
        if self._limits.full:
            self._beyond += 1
            if self._beyond > _AT_ONCE:
                self._beyond = 0
                raise BlockingIOError
        plain, address = super().accept()
        accepted = _Accepted(self._limits, plain, address[0])
        self._limits.accepted(accepted, accepted.fileno())
        return accepted, address


class _Accepted(socket.socket):
    """A connection that was accepted; the limits know it until its handshake ends."""

    moved = unread = 0

    def __init__(self, limits: ConnectionLimits, plain: socket.socket, address: str) -> None:
        super().__init__(plain.family, plain.type, plain.proto, plain.detach())
        self.address = address
        self._limits = limits

    def hang_up(self) -> None:
        """Shut the connection down: the next read meets its end."""
        with suppress(OSError):  # the other end was faster
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it, as any socket."""
        self._limits.ended(self.fileno())
        super().close()


@contextmanager
def listening(host: str, port: int, limits: ConnectionLimits, option: str = "--port") -> Iterator[Listener]:
    """A socket that listens while the block runs; port 0 takes a free one.

    option: the command-line option that chooses another port. Raises CannotListen.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        plain = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = f"port {port} is taken" if taken else f"cannot listen on port {port}: {error.strerror or error}"
        raise CannotListen(f"{host}: {why}; choose another with {option} (0 takes a free one)") from error
    with Listener(limits, plain) as listener:
        # Connections inherit it. asyncio sets it only on sockets that it made itself; without it the second half of an
        # answer waits for the acknowledgement of the first, which many systems hold back for 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        yield listener
