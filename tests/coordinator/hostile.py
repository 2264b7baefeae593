"""A hostile crowd: connections by the hundred that ask, begin to send, and never read."""

from __future__ import annotations

import itertools
import select
import socket
import threading
from collections.abc import Callable

import httpx2
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedcore.wire import messages
from fedcore.wire.messages import CheckIn, Enrol, Unattested
from tests.coordinator.connections import begun, connect
from tests.coordinator.devices import CAPABILITIES, newcomer

DEVICES = 16
MESSAGE = 1 << 16
HELLO = messages.encode(CheckIn(capabilities=CAPABILITIES, examples={"default": 10}))
NEXT = b"GET / HTTP/1.1\r\nHost:x\r\n" + b"a:b\r\n" * 98
"""The head of a request, but for its end, with as many header fields as there may be."""


class Swarm(threading.Thread):
    """Keeps `many` connections open that `begin` begins. None of them is ever read from."""

    def __init__(self, many: int, begin: Callable[[], socket.socket]) -> None:
        super().__init__()
        self._many, self._begin, self._over = many, begin, threading.Event()
        self.complete = threading.Event()

    def __enter__(self) -> Swarm:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Begin, and begin again what the other end has closed."""
        open_, poll = {}, select.poll()
        while not self._over.wait(0.01):
            for descriptor, _ in poll.poll(0):
                poll.unregister(descriptor)
                open_.pop(descriptor).close()
            while len(open_) < self._many and not self._over.is_set():
                try:
                    one = self._begin()
                except (OSError, httpx2.TransportError):
                    break
                poll.register(one, select.POLLRDHUP)
                open_[one.fileno()] = one
            else:
                self.complete.set()
        for one in open_.values():
            one.close()


class Strangers:
    """What a crowd at one address may begin, part of it with the keys of enrolled devices.

    versions: the digests of the checkpoints of a task. uploading: a population that gives every device an assignment.
    size: of the report that is uploaded there.
    """

    def __init__(self, client, address: str, versions: list[str], uploading: str, size: int) -> None:
        self._client, self._address, self._uploading = client, address, uploading
        self._report = bytes(size)
        self._names = itertools.cycle(f"at {address}, {number}" for number in range(DEVICES))
        self._versions = itertools.cycle(versions)
        self._pairs = itertools.cycle(itertools.permutations(versions, 2))

    def silence(self):
        """A connection, and nothing more."""
        return connect(self._client)

    def head(self):
        """A head of the largest size that does not end."""
        one = connect(self._client)
        one.sendall(NEXT + b"c:".ljust(15_000, b"x"))
        return one

    def document(self):
        """An answer that anybody gets."""
        one = connect(self._client, 4096)
        one.sendall(f"GET /openapi.json HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: {self._address}\r\n\r\n".encode())
        return one

    def enrolment(self):
        """An enrolment that does not end."""
        body = messages.encode(Enrol(attestation=Unattested())).ljust(MESSAGE)
        return self._begun(newcomer(Ed25519PrivateKey.generate()), "POST", "/v1/devices", body[:-1], body)

    def message(self):
        """A check-in that does not end."""
        body = bytes(MESSAGE)
        return self._begun(self._device(), "POST", "/v1/populations/phones/checkins", body[:-1], body)

    def blob(self):
        """A checkpoint."""
        return self._begun(self._device(), "GET", f"/v1/blobs/{next(self._versions)}")

    def delta(self):
        """A delta between any two checkpoints."""
        base, target = next(self._pairs)
        return self._begun(self._device(), "GET", f"/v1/blobs/{target}/deltas/{base}")

    def wait(self, behind=b""):
        """A wait for an assignment, of a device that nobody needs."""
        auth = self._device()
        path = f"/v1/sessions/{self._ask(auth, '/v1/populations/idle/checkins').get('session')}/assignments"
        return self._begun(auth, "POST", path, behind, Prefer="wait=5")

    def pipeline(self):
        """A wait, and as many requests behind it as there may be."""
        return self.wait((NEXT + b"\r\n") * 16)

    def upload(self):
        """A report that does not end."""
        auth = self._device()
        session = self._ask(auth, f"/v1/populations/{self._uploading}/checkins").get("session")
        path = f"/v1/assignments/{self._ask(auth, f'/v1/sessions/{session}/assignments').get('assignment')}/report"
        return self._begun(auth, "PUT", path, self._report[: len(self._report) // 2], self._report)

    def _device(self):
        return self._client.devices[next(self._names)]

    def _ask(self, auth, path):
        headers, content = {"X-Forwarded-For": self._address}, HELLO if path.endswith("checkins") else b""
        return self._client.post(path, content=content, auth=auth, headers=headers).json()

    def _begun(self, auth, method, path, sent=b"", body=b"", **headers):
        headers["X-Forwarded-For"] = self._address
        return begun(self._client, auth, method, path, sent, body, receive_bytes=4096, **headers)
