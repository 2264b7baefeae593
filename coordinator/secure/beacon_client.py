"""BeaconClient: asks the enrolment authority for beacons, on threads of its own, so that no round waits for it.

Spec: docs/spec/wire.md §9.
"""

from __future__ import annotations

import functools
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx2
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.errors import BeaconUnavailable
from coordinator.keys import Keys
from fedcore.errors import WireError
from fedcore.wire import messages
from fedcore.wire.messages import PROBLEM_FIELD, DrawnBeacon, RequestBeacon
from fedcore.wire.signatures import DIGEST, PublicKey, SignableRequest, Signer, content_digest
from ingress.limits import past_proxies

_THREADS = 4
_TIMEOUT_S = 10.0


class BeaconClient:
    """Draws at the authority with this URL; None where the coordinator has no authority."""

    def __init__(self, url: str | None, keys: Keys) -> None:
        self._url, self._keys = url, keys
        self._queue = ThreadPoolExecutor(_THREADS, "beacon")

    def __call__(self, asked: RequestBeacon) -> Future[bytes]:
        """The beacon, 64 bytes and not yet checked, or BeaconUnavailable. After `close` there is none."""
        return self._queue.submit(self._draw, asked)

    def close(self) -> None:
        """End the threads. Draws that have not begun are cancelled, which is an exception in their future."""
        self._queue.shutdown(cancel_futures=True)

    @functools.cached_property
    def _trusted(self) -> ssl.SSLContext:
        """The authorities that the system trusts. Read once: it takes some 25 ms."""
        return ssl.create_default_context()

    def _draw(self, asked: RequestBeacon) -> bytes:
        if self._url is None:
            raise BeaconUnavailable("this coordinator has no enrolment authority: set authority and authority_url")
        where = f"{self._url.rstrip('/')}/v1/beacons"
        try:
            with httpx2.Client(timeout=_TIMEOUT_S, verify=self._trusted, mounts=past_proxies(where)) as client:
                signed = _Signed(self._keys.server.private)
                answer = client.post(where, content=messages.encode(asked), auth=signed)
            if answer.status_code == httpx2.codes.OK:
                return messages.decode(answer.content, DrawnBeacon).beacon
        except (httpx2.HTTPError, WireError) as error:
            raise BeaconUnavailable(f"{where} gave no beacon: {type(error).__name__}: {error}") from error
        problem = answer.headers.get(PROBLEM_FIELD, "no problem of this protocol")
        raise BeaconUnavailable(f"{where} answered {answer.status_code}, {problem}: {answer.text[:500]}")


class _Signed(httpx2.Auth):
    """Signs a request with the server's key, which names itself."""

    requires_request_body = True

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._signer = Signer(PublicKey.of(key).text, key)

    def auth_flow(self, request: httpx2.Request) -> Iterator[httpx2.Request]:  # type: ignore[override]
        request.headers[DIGEST] = content_digest(request.content)
        target = request.url.raw_path.decode()
        about = SignableRequest(request.method, request.headers["host"], target, request.headers.get)
        request.headers.update(self._signer.headers(about, int(time.time())))
        yield request
