"""Attacks on the authority by those who have no account: what they hold is bounded, and others are served."""

import socket
import ssl
from contextlib import ExitStack, contextmanager

import httpx2
import pytest

from authority.configuration import AuthorityConfig
from authority.service import MOST_BYTES
from fedcore.signing import SucceedingKey
from fedcore.wire.messages import Unattested
from fedcore.wire.signatures import Signer
from ingress import limits
from ingress.connection import HEAD_BYTES, HEAD_FIELDS
from tests.authority.test_service import Newcomer, refused
from tests.coordinator.connections import (
    be_impatient,
    begun,
    connect,
    drips,
    hung_up,
    rest_of,
    status_of,
    wait_until_closed,
)
from tests.coordinator.devices import SignedBy
from tests.coordinator.test_operations import self_made_certificate
from tests.servers import authority_serving

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def authority(tmp_path):
    """Serve with changes of the configuration; gives a client."""
    SucceedingKey.new("authority").save(tmp_path / "key")

    @contextmanager
    def run(trust=True, **changes):
        config = AuthorityConfig(key=tmp_path / "key", port=0, accept_unattested=True, **changes)
        with authority_serving(config) as url, httpx2.Client(base_url=url, trust_env=False, verify=trust) as client:
            yield client

    return run


@pytest.fixture
def impatient(monkeypatch):
    """Limits of time that a test can wait for."""
    be_impatient(monkeypatch)


def credential(client, stop, **headers):
    """A connection on which somebody unknown begins to ask for a credential."""
    newcomer = Newcomer()
    body = newcomer.request(attestation=Unattested())
    signed = SignedBy(Signer(newcomer.key, newcomer.device))
    return begun(client, signed, "POST", "/v1/credentials", body[:stop], body, **headers)


def is_served(client):
    return Newcomer().ask(client, attestation=Unattested()).status_code == 200


@pytest.mark.parametrize("head", [GET + b"X: " + b"x" * HEAD_BYTES, GET + b"X: x\r\n" * HEAD_FIELDS + b"\r\n"])
def test_a_head_that_is_too_large_is_refused_before_its_end(authority, head):
    with authority() as client, connect(client) as attacker:
        attacker.sendall(head)
        assert status_of(attacker) == 431


@pytest.mark.parametrize("said", [b"", GET])
def test_a_head_that_does_not_end_in_time_is_cut_off(authority, impatient, said):
    with authority() as client, connect(client) as attacker:
        attacker.sendall(said)
        assert hung_up(attacker)


@pytest.mark.parametrize("coding", [{}, {"Transfer-Encoding": "chunked"}])
def test_a_body_that_drips_is_cut_off(authority, impatient, coding):
    with authority() as client, credential(client, 0, **coding) as attacker:
        assert not drips(attacker, b"1\r\nx\r\n" if coding else b"x")


def test_a_body_without_end_is_answered_and_then_cut_off(authority, impatient):
    with authority() as client, credential(client, 0, **{"Transfer-Encoding": "chunked"}) as attacker:
        attacker.sendall(b"%x\r\n" % (MOST_BYTES + 1) + bytes(MOST_BYTES + 1) + b"\r\n")
        assert rest_of(attacker).startswith(b"HTTP/1.1 413")


def test_dripping_bodies_leave_room_for_newcomers(authority):
    with authority(connection_limit=4) as client, ExitStack() as open_:
        attackers = [open_.enter_context(credential(client, 9)) for _ in range(8)]
        assert is_served(client)
        assert wait_until_closed(attackers, 5)


def test_idle_connections_give_way_to_new_ones(authority):
    with authority(connection_limit=8) as client, ExitStack() as open_:
        attackers = [open_.enter_context(connect(client)) for _ in range(20)]
        assert wait_until_closed(attackers, 12)
        assert is_served(client)


def test_connections_of_one_address_are_limited_and_a_proxys_are_not(authority, monkeypatch):
    monkeypatch.setattr(limits, "caller_of", lambda address: address)
    with authority(address_connection_limit=3) as client, ExitStack() as open_:
        *_, fourth = [open_.enter_context(connect(client)) for _ in range(4)]
        assert hung_up(fourth)
    with authority(address_connection_limit=3, trusted_proxies=("127.0.0.0/8",)) as client, ExitStack() as open_:
        for _ in range(4):
            open_.enter_context(connect(client))
        assert is_served(client)


def test_an_address_that_asks_too_often_is_told_when_to_come_back(authority):
    here, elsewhere = ({"X-Forwarded-For": f"203.0.113.{number}"} for number in (1, 2))
    with authority(address_limit_per_minute=3, trusted_proxies=("127.0.0.0/8",)) as client:
        for _ in range(3):
            client.headers |= here
            assert is_served(client)
        answer = Newcomer().ask(client, attestation=Unattested())
        refused(answer, "too-many-requests")
        assert 0 < int(answer.headers["retry-after"]) <= 20
        unsigned = client.post("/v1/credentials", content=b"{}")
        refused(unsigned, "too-many-requests")
        assert client.get("/healthz").status_code == 200
        client.headers |= elsewhere
        assert is_served(client)


def test_an_address_that_asks_for_beacons_too_often_is_sent_away(authority):
    here, elsewhere = ({"X-Forwarded-For": f"203.0.113.{number}"} for number in (1, 2))
    with authority(address_limit_per_minute=3, trusted_proxies=("127.0.0.0/8",)) as client:
        for _ in range(3):
            refused(client.post("/v1/beacons", content=b"{}", headers=here), "malformed-signature")
        answer = client.post("/v1/beacons", content=b"{}", headers=here)
        refused(answer, "too-many-requests")
        assert 0 < int(answer.headers["retry-after"]) <= 20
        refused(client.post("/v1/beacons", content=b"{}", headers=elsewhere), "malformed-signature")
        client.headers |= here
        assert is_served(client)  # credentials have a count of their own


# --- TLS: these connections have not said hello


@pytest.fixture
def private(authority, tmp_path):
    """Serve HTTPS with changes of the configuration; gives a client that trusts the certificate."""
    certificate, key = self_made_certificate(tmp_path)
    trust = ssl.create_default_context(cafile=certificate)
    return lambda **changes: authority(trust, tls_cert=certificate, tls_key=key, **changes)


def test_a_handshake_that_does_not_end_in_time_is_cut_off(private, impatient):
    with private() as client, connect(client) as attacker:
        assert hung_up(attacker)


def test_unfinished_handshakes_give_way_to_new_ones(private):
    with private(connection_limit=8) as client, ExitStack() as open_:
        attackers = [open_.enter_context(connect(client)) for _ in range(20)]
        assert wait_until_closed(attackers, 12)
        assert is_served(client)


def test_unfinished_handshakes_of_one_address_are_limited_until_they_end(private, monkeypatch):
    monkeypatch.setattr(limits, "caller_of", lambda address: address)
    with private(address_connection_limit=3) as client, ExitStack() as open_:
        first, _, third, fourth = [open_.enter_context(connect(client)) for _ in range(4)]
        assert hung_up(fourth)
        first.shutdown(socket.SHUT_WR)
        third.sendall(b"this is no hello" * 2)
        assert hung_up(first)
        rest_of(third)
        open_.enter_context(connect(client))
        assert is_served(client)
