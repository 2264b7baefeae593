"""A receiver of alerts on loopback: it keeps what it is sent, and answers as it is told."""

import contextlib
import itertools
import socket
import threading
import time
from collections import deque
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Sent(NamedTuple):
    """A request that came."""

    path: str
    headers: dict
    body: bytes


class Receiver(ThreadingHTTPServer):
    """Answers each request by the next of `answers`, and by 200 without one: a status, "slow" or "endless".

    came: is released once for each request. cut: set once a slow or endless answer was given up by the other end.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sent, self.answers = [], deque()
        self.came, self.cut = threading.Semaphore(0), threading.Event()
        self.address = f"127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        server.sent.append(Sent(self.path, dict(self.headers), body))
        answer = server.answers.popleft() if server.answers else 200
        server.came.release()
        if answer in ("slow", "endless"):
            self._go_on(answer)
            return
        self.send_response(answer)
        self.send_header("Location", f"http://{server.address}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self):
        self.server.sent.append(Sent(self.path, dict(self.headers), b""))

    def _go_on(self, answer):
        """Send a status line and then headers, or a whole head and then a body, until nobody reads any more."""
        piece = b"X-More: 1\r\n" if answer == "slow" else bytes(1 << 16)
        with contextlib.suppress(OSError):
            self.wfile.write(b"HTTP/1.1 200 OK\r\n" + (b"" if answer == "slow" else b"\r\n"))
            for _ in itertools.takewhile(lambda _: not self.server.cut.is_set(), itertools.count()):
                self.wfile.write(piece)
                time.sleep(0.01)
        self.server.cut.set()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_):
        """Say nothing."""


@contextmanager
def receiving():
    """A receiver."""
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.cut.set()
        server.shutdown()
        thread.join()
