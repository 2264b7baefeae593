"""Errors of ports.

IngressError
├── CannotListen      a port is taken, or cannot be opened for another reason
└── RefusedRequest    a request breaks HTTP's rules, or a limit
"""

from __future__ import annotations

from http import HTTPStatus


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
