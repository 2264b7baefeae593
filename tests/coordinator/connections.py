"""Connections of a test's own, on which it sends what no HTTP client would."""

from __future__ import annotations

import select
import socket
import time
from contextlib import suppress

from fedcore.wire.signatures import content_digest
from ingress import limits


def connect(client, receive_bytes=1 << 16):
    """A connection to the coordinator of a client, which receives so many bytes at most that nobody has read."""
    connection = socket.socket()
    connection.settimeout(10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((client.base_url.host, client.base_url.port))
    return connection


def begun(client, auth, method, path, sent=b"", body=b"", *, receive_bytes=1 << 16, **headers):
    """A connection on which the head of a signed request was sent, and of its body what is `sent`."""
    request = client.build_request(method, path, content=body, headers=headers)
    if body:
        request.headers["Content-Digest"] = content_digest(body)
    auth.sign(request)
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items())]
    connection = connect(client, receive_bytes)
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + sent)
    return connection


def status_of(connection):
    """The status of the next answer on a connection, whose rest is left unread."""
    return int(connection.makefile("rb").readline().split()[1])


def rest_of(connection):
    """All that comes before the other end closes a connection."""
    pieces = []
    with suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            pieces.append(piece)
    return b"".join(pieces)


def hung_up(connection):
    """Whether the other end closes a connection, without another word, within its timeout."""
    try:
        return connection.recv(1 << 16) == b""
    except ConnectionResetError:
        return True


def drips(connection, piece=b"x", times=30):
    """Whether a body may come byte by byte: the other end still listens after so many, one in 50 ms."""
    connection.settimeout(0.05)
    for _ in range(times):
        try:
            connection.sendall(piece)
            if hung_up(connection):
                return False
        except (BrokenPipeError, ConnectionResetError):
            return False
        except TimeoutError:
            continue
    return True


def be_impatient(monkeypatch):
    """Have all ports of this process limit times to what a test can wait for."""
    for name, seconds in (("HEAD_S", 0.4), ("WINDOW_S", 0.4), ("LOOK_S", 0.05)):
        monkeypatch.setattr(limits, name, seconds)


def wait_until_closed(connections, count):
    """Whether the other end closes so many of these connections in time, without a word."""
    until, closed = time.monotonic() + 10, []
    while len(closed) < count and time.monotonic() < until:
        closed, _, _ = select.select(connections, [], [], 0.1)
    return len(closed) >= count and all(map(hung_up, closed))
