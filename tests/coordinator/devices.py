"""Devices that a test speaks for: their keys, their enrolment, and signatures over whatever the test sends."""

from __future__ import annotations

import time
from contextlib import contextmanager

import httpx2
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedcore.wire import messages
from fedcore.wire.messages import Enrol, Enrolled, StatedCapabilities, Unattested
from fedcore.wire.signatures import PublicKey, SignableRequest, Signer, content_digest

CAPABILITIES = StatedCapabilities(runtime="test", version="1", engine="none", formats=("onnx",))


class SignedBy(httpx2.Auth):
    """Signs every request, as the device protocol wants it."""

    def __init__(self, signer, now=lambda: int(time.time())):
        self.signer, self.now = signer, now

    def auth_flow(self, request):
        # A body that is still to be made has its digest given.
        if "content-digest" not in request.headers and request.read():
            request.headers["Content-Digest"] = content_digest(request.content)
        for _ in range(3):
            self.sign(request)
            response = yield request
            if response.status_code != 401 or "retry-after" not in response.headers:
                return
            # The coordinator has begun anew. A busy one reads its two clocks at different moments, and so takes another
            # moment for its beginning at every look: the time that it named may be a little too early.
            time.sleep(int(response.headers["retry-after"]))

    def sign(self, request):
        about = SignableRequest(
            request.method, request.headers["host"], request.url.raw_path.decode(), request.headers.get
        )
        request.headers.update(self.signer.headers(about, self.now()))


def newcomer(key):
    """Signs as a key that is not enrolled yet."""
    return SignedBy(Signer(PublicKey.of(key).text, key))


def enrol(client, key, message=None):
    """The answer to an enrolment of a key."""
    content = messages.encode(message or Enrol(attestation=Unattested()))
    return client.post("/v1/devices", content=content, auth=newcomer(key))


@contextmanager
def speaking_to(url, timeout=10, devices=None, verify=False):
    """An HTTP client of a coordinator, with devices of its own or those of another client.

    `verify` is for TLS: reading the certificates that the system trusts takes as long as a hundred requests.
    """
    with httpx2.Client(base_url=url, timeout=timeout, trust_env=False, verify=verify) as client:
        client.devices = devices or Devices(client)
        yield client


class Devices:
    """Devices by name, each enrolled when a test first speaks for it."""

    def __init__(self, client):
        self._client = client
        self._known = {}
        self.of = {}  # whose an assignment is

    def __getitem__(self, name):
        """What signs for a device; give it as `auth`."""
        if name not in self._known:
            key = Ed25519PrivateKey.generate()
            enrolled = messages.decode(enrol(self._client, key).content, Enrolled)
            self._known[name] = SignedBy(Signer(enrolled.device, key))
        return self._known[name]

    def id(self, name):
        return self[name].signer.keyid

    def owner(self, assignment):
        """What signs for the device whose assignment it is; any device's for an unknown one."""
        return self[self.of.get(assignment, "a")]
