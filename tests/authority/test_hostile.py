"""Hostile callers of an authority all at once, under a ceiling of memory: whoever has a device is served throughout."""

import base64
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import cbor2
import httpx2
import pytest

from authority.service import MOST_BYTES
from fedcore.signing import SucceedingKey
from fedcore.wire.messages import AndroidKey, AppAttest, Unattested
from fedcore.wire.signatures import Signer
from ingress.connection import HEAD_BYTES
from tests.authority.test_service import Newcomer
from tests.coordinator.connections import begun, connect
from tests.coordinator.devices import SignedBy
from tests.coordinator.replicas import until

pytestmark = pytest.mark.promise("An enrolment authority under attack serves devices, within its limits")

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
CEILING = 256 << 20
"""Bytes of address space that the authority may take beyond those with which it served its first device."""
FILES = 1024
"""Open files that a process may usually have."""
EACH = 600
"""Connections of each kind of attack: more than there may be in all."""


def memory_of(pid):
    """The address space of a process, and what of it is in memory."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[:2]
    return [int(count) * os.sysconf("SC_PAGE_SIZE") for count in pages]


def faults(log):
    """The exceptions that a service logs, and what there is besides its log."""
    ready, *lines = sorted(log.read_text().splitlines(), key=lambda line: line.startswith("{"))
    assert ready.startswith("authority ready at")
    said = [json.loads(line) for line in lines]
    return {one["exception"].rpartition("\n")[2] for one in said if "exception" in one}


@pytest.fixture
def authority(tmp_path):
    """An authority in a process of its own, which has served a device and may not grow beyond the ceiling."""
    SucceedingKey.new("authority").save(tmp_path / "key")
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "muster", "authority", "serve", "--accept-unattested", "--port", "0"]
    command += ["--key", str(tmp_path / "key"), "--ready-file", str(ready)]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            until(ready.exists)
            with httpx2.Client(base_url=ready.read_text(), trust_env=False, timeout=60) as client:
                for _ in range(20):
                    assert is_served(client)
                space, _ = memory_of(process.pid)
                resource.prlimit(process.pid, resource.RLIMIT_AS, (space + CEILING, space + CEILING))
                resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
                yield client, process
        finally:
            process.terminate()
    assert faults(tmp_path / "log") == set()


def is_served(client):
    """Whether a device gets a credential, on a connection of its own: those that are kept give way to new ones."""
    with httpx2.Client(base_url=client.base_url, trust_env=False, timeout=60) as fresh:
        return Newcomer().ask(fresh, attestation=Unattested()).status_code == 200


def silent(client):
    return connect(client)


def endless_head(client):
    attacker = connect(client)
    attacker.sendall(GET + b"X: " + b"x" * (HEAD_BYTES - 100))
    return attacker


def credential(body, sent, **headers):
    """An attack: a request for a credential of whose body so much comes."""
    newcomer = Newcomer()
    whole = body(newcomer)
    return lambda client: begun(
        client,
        SignedBy(Signer(newcomer.key, newcomer.device)),
        "POST",
        "/v1/credentials",
        sent(whole),
        whole,
        **headers,
    )


unfinished = credential(lambda one: bytes(MOST_BYTES - 10), lambda body: body[:-1])
too_large = credential(lambda one: bytes(1 << 22), lambda body: body[: 1 << 20])
in_pieces = credential(
    lambda one: bytes(1 << 22), lambda body: b"%x\r\n" % len(body) + body[: 1 << 20], **{"Transfer-Encoding": "chunked"}
)
false_chain = credential(
    lambda one: one.request(attestation=AndroidKey((b"\x30\x82\xff\xff" * 1000,) * 6)), lambda body: body
)
false_statement = credential(
    lambda one: one.request(attestation=AppAttest(cbor2.dumps([[[]] * 5000]))), lambda body: body
)


def unread(client):
    """Answers that nobody takes, to requests that come one after the other."""
    attacker = connect(client, receive_bytes=4096)
    with suppress(OSError):
        attacker.sendall((GET + b"\r\n") * 12)
    return attacker


def junk(client):
    attacker = connect(client)
    with suppress(OSError):
        attacker.sendall(base64.b85encode(os.urandom(2000)))
    return attacker


ATTACKS = (
    silent, endless_head, unfinished, too_large, in_pieces, false_chain, false_statement, unread, junk
)  # fmt: skip


@contextmanager
def under(attack, client):
    """Attackers come, eight at a time, and stay as long as the authority lets them, while the block runs."""
    over, coming = threading.Event(), iter(range(EACH))

    def come():
        with ExitStack() as held:
            for _ in coming:
                with suppress(OSError):
                    attacker = held.enter_context(attack(client))
                    attacker.settimeout(0.2)
            over.wait()

    with ThreadPoolExecutor(8) as pool:
        attackers = [pool.submit(come) for _ in range(8)]
        try:
            yield lambda: next(coming, None) is not None
        finally:
            over.set()
            for one in attackers:
                one.result()


@pytest.mark.long
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda one: getattr(one, "__name__", "body"))
def test_devices_are_served_while_strangers_attack(authority, attack):
    client, process = authority
    with under(attack, client) as goes_on:
        served = 0
        while goes_on() or served < 5:
            assert is_served(client)
            served += 1
    assert process.poll() is None


def test_devices_are_served_while_strangers_attack_in_every_way_at_once(authority):
    client, process = authority
    with ExitStack() as all_of_them:
        going = [all_of_them.enter_context(under(attack, client)) for attack in ATTACKS]
        while any(goes_on() for goes_on in going):
            assert is_served(client)
    assert is_served(client)
    assert process.poll() is None


def test_a_stranger_gets_no_descriptor_that_a_device_needs(authority):
    client, process = authority
    url = urlsplit(str(client.base_url))
    with ExitStack() as held:
        for _ in range(2 * FILES):
            with suppress(OSError):
                held.enter_context(socket.create_connection((url.hostname, url.port), timeout=5))
        assert is_served(client)
    assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) < FILES
