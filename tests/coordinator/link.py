"""The way to a PostgreSQL server, over TCP. It can fall silent, be slow, break, and swallow what it is given."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy.engine import make_url

SLOW_S = 0.05


class Link:
    """A port that leads to the server whose socket is in a folder."""

    def __init__(self, server: Path) -> None:
        self.lead_to(server)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self._flowing, self._open = threading.Event(), []
        self._flowing.set()
        self._broken, self._delay_s = False, 0.0
        self._swallowing, self._lost = False, set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def url(self, database: str) -> str:
        """The URL of a database on that server, through this link."""
        host, port = self._listener.getsockname()
        return make_url(database).set(host=host, port=port, query={}).render_as_string(hide_password=False)

    def lead_to(self, server: Path) -> None:
        """From now on new connections lead to the server whose socket is in this folder."""
        self._server = str(server / ".s.PGSQL.5432")

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Bytes are accepted, and arrive only when this is over."""
        self._flowing.clear()
        yield
        self._flowing.set()

    @contextlib.contextmanager
    def slow(self) -> Iterator[None]:
        """Every piece takes a while."""
        self._delay_s = SLOW_S
        yield
        self._delay_s = 0.0

    @contextlib.contextmanager
    def broken(self) -> Iterator[None]:
        """Every connection ends, and new ones end at once."""
        self._broken = True
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        yield
        self._broken = False

    @contextlib.contextmanager
    def swallowing(self) -> Iterator[None]:
        """Bytes are accepted and never arrive, nor does any more, ever, on a connection that was open meanwhile."""
        self._swallowing = True
        self._lost.update(self._open)
        yield
        self._swallowing = False

    def close(self) -> None:
        """End everything."""
        self._flowing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._broken:
                    client.close()
                    continue
                server = socket.socket(socket.AF_UNIX)
                try:
                    server.connect(self._server)
                except OSError:  # it is down
                    client.close()
                    server.close()
                    continue
                self._open += [client, server]
                if self._swallowing:
                    self._lost |= {client, server}
                for pair in itertools.permutations((client, server)):
                    self._threads.append(threading.Thread(target=self._copy, args=pair, daemon=True))
                    self._threads[-1].start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                time.sleep(self._delay_s)
                if source not in self._lost:
                    target.sendall(data)
        if source in self._lost:
            return  # nor does the other end learn that this one is gone
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def link_to(server: Path) -> Iterator[Link]:
    """A link for as long as the block runs."""
    link = Link(server)
    try:
        yield link
    finally:
        link.close()
