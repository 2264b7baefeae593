"""Attacks by those who have no account, and by one device: what they hold is bounded, and others are served."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from benchmarks.load import null_bundle
from coordinator.api.devices.reports import HEADER_BYTES
from coordinator.settings import Settings
from fedcore.wire import messages
from fedcore.wire.messages import Enrol, Unattested
from ingress import connection, limits
from ingress.connection import HEAD_BYTES, HEAD_FIELDS
from secagg.encoding import MessageType
from tests.coordinator import connections
from tests.coordinator.bundles import report_body
from tests.coordinator.devices import enrol, newcomer, speaking_to
from tests.coordinator.test_api import abort, ask, assign, check_in, put, refused
from tests.servers import serving

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
BODY = report_body([1, 0, 0, 0], 1)
MASKED = f"secagg/{MessageType.MASKED}"
ROOM = 4 * 7 + HEADER_BYTES
"""Bytes that are reserved for one report of the task of these tests, as it comes."""


@pytest.fixture
def coordinator(database, tmp_path):
    """Serve with settings; gives a client."""

    @contextmanager
    def run(**settings):
        place = {"database": database, "keys": tmp_path / "keys", "blobs": tmp_path / "blobs", "port": 0}
        chosen = Settings(**place, admin_port=0, accept_unattested=True, **settings)
        with serving(chosen) as url, speaking_to(url) as client:
            yield client

    return run


@pytest.fixture
def impatient(monkeypatch):
    """Limits of time that a test can wait for."""
    connections.be_impatient(monkeypatch)


def enrolment(client, stop, **headers):
    """A connection on which somebody unknown begins to enrol."""
    key = Ed25519PrivateKey.generate()
    body = messages.encode(Enrol(attestation=Unattested()))
    return connections.begun(client, newcomer(key), "POST", "/v1/devices", body[:stop], body, **headers)


# --- heads


@pytest.mark.parametrize(
    ("status", "head"),
    [
        (431, GET + b"X: " + b"x" * HEAD_BYTES),
        (414, b"GET /" + b"x" * HEAD_BYTES),
        (431, GET + b"X: x\r\n" * HEAD_FIELDS + b"\r\n"),
    ],
)
def test_a_head_that_is_too_large_is_refused_before_its_end(coordinator, status, head):
    with coordinator() as client:
        with connections.connect(client) as attacker:
            attacker.sendall(head)
            assert connections.status_of(attacker) == status
        assert client.get("/healthz", headers={"X": "x" * 15_000}).status_code == 200


def test_trailers_without_end_close_their_connection(coordinator):
    with coordinator() as client, enrolment(client, 0, **{"Transfer-Encoding": "chunked"}) as attacker:
        attacker.sendall(b"1\r\nx\r\n0\r\n" + b"X: x\r\n" * 5000)
        assert connections.status_of(attacker) == 431


def test_chunk_extensions_without_end_close_their_connection(coordinator):
    with coordinator() as client, enrolment(client, 0, **{"Transfer-Encoding": "chunked"}) as attacker:
        attacker.sendall(b"1;x=" + b"x" * 4 * HEAD_BYTES)
        assert connections.status_of(attacker) == 431


@pytest.mark.parametrize("said", [b"", GET])
def test_a_head_that_does_not_end_in_time_is_cut_off(coordinator, impatient, said):
    with coordinator() as client, connections.connect(client) as attacker:
        attacker.sendall(said)
        assert connections.hung_up(attacker)


def test_a_request_is_forgotten_without_the_garbage_collector(coordinator):
    with coordinator() as client:
        gc.collect()
        gc.disable()
        try:
            for _ in range(10):
                client.get("/healthz")
            assert sum(type(kept) is RequestResponseCycle for kept in gc.get_objects()) < 5
        finally:
            gc.enable()


def test_requests_without_end_on_one_connection_are_cut_off(coordinator):
    with coordinator() as client, connections.connect(client) as attacker:
        attacker.sendall((GET + b"\r\n") * 400)
        assert connections.rest_of(attacker).count(b"HTTP/1.1 200") < 400


# --- bodies


@pytest.mark.parametrize("coding", [{}, {"Transfer-Encoding": "chunked"}])
def test_a_body_that_drips_is_cut_off(coordinator, impatient, coding):
    with coordinator() as client, enrolment(client, 0, **coding) as attacker:
        assert not connections.drips(attacker, b"1\r\nx\r\n" if coding else b"x")


def test_an_answer_that_is_not_taken_is_cut_off(coordinator, register, tmp_path, impatient, monkeypatch):
    closed, hang_up = threading.Event(), connection.Connection.hang_up

    def watched(one):
        if one.flow.write_paused:
            closed.set()
        hang_up(one)

    monkeypatch.setattr(connection.Connection, "hang_up", watched)
    size = 4_000_000
    register(null_bundle(tmp_path / "large", size), goal=1, rounds=1)
    with coordinator() as client:
        (given,) = assign(client, "a")
        path = f"/v1/blobs/{given.checkpoint.sha256}"
        with connections.begun(client, client.devices["a"], "GET", path, receive_bytes=4096) as attacker:
            assert closed.wait(10)
            assert len(connections.rest_of(attacker)) < 4 * size


def test_an_answer_that_is_taken_slowly_is_sent_to_its_end(coordinator, register, tmp_path, impatient, monkeypatch):
    monkeypatch.setattr(limits, "WINDOW_S", 60.0)
    size = 60_000
    register(null_bundle(tmp_path / "large", size), goal=1, rounds=1)
    with coordinator() as client:
        (given,) = assign(client, "a")
        path = f"/v1/blobs/{given.checkpoint.sha256}"
        with connections.begun(client, client.devices["a"], "GET", path, receive_bytes=4096) as slow:
            got = 0
            while got < 4 * size:
                time.sleep(limits.HEAD_S / 20)
                got += len(piece := slow.recv(4000))
                assert piece


# --- connections


def test_dripping_enrolments_leave_room_for_devices_and_newcomers(coordinator, register):
    register()
    with coordinator(connection_limit=16) as client, ExitStack() as open_:
        client.devices["a"]
        attackers = []
        for _ in range(20):
            # One after the other: of many at once some are answered with 503, and idle connections close for them.
            attackers.append(open_.enter_context(enrolment(client, 9)))
            assert len(attackers) <= 2 or connections.hung_up(attackers[-3])
        assert check_in(client, "a").status_code == 200
        assert enrol(client, Ed25519PrivateKey.generate()).status_code == 200


def test_idle_connections_give_way_to_new_ones(coordinator):
    with coordinator(connection_limit=8) as client, ExitStack() as open_:
        attackers = [open_.enter_context(connections.connect(client)) for _ in range(20)]
        assert connections.hung_up(attackers[0])
        assert client.get("/healthz").status_code == 200


def test_connections_of_one_address_are_limited(coordinator, monkeypatch):
    monkeypatch.setattr(limits, "caller_of", lambda address: address)
    with coordinator(address_connection_limit=3) as client, ExitStack() as open_:
        *_, fourth = [open_.enter_context(connections.connect(client)) for _ in range(4)]
        assert connections.hung_up(fourth)
    with coordinator(address_connection_limit=3, trusted_proxies="127.0.0.0/8") as client, ExitStack() as open_:
        for _ in range(4):
            open_.enter_context(connections.connect(client))
        assert client.get("/healthz").status_code == 200


def test_requests_in_progress_of_one_address_are_limited_behind_a_proxy(coordinator, register):
    register(goal=9, selection_timeout_s=60)
    here, elsewhere = ({"X-Forwarded-For": f"203.0.113.{number}"} for number in (1, 2))
    with (
        coordinator(address_connection_limit=2, trusted_proxies="127.0.0.1") as client,
        ThreadPoolExecutor() as pool,
    ):
        for device in "ab":
            session = check_in(client, device).json()["session"]
            pool.submit(ask, client, session, device, headers={"Prefer": "wait=3", **here})
        until = time.monotonic() + 3
        while (answer := client.get("/openapi.json", headers=here)).status_code == 200:
            assert time.monotonic() < until
        refused(answer, "too-many-requests")
        assert client.get("/openapi.json", headers=elsewhere).status_code == 200


# --- reports


@pytest.mark.parametrize("path", ["report", MASKED])
def test_an_assignment_that_was_given_up_reserves_no_room(coordinator, register, path):
    register(goal=3, minimum=1, rounds=1)
    with coordinator(reports_bytes=2 * ROOM - 1) as client:
        mine, theirs, _ = (one.assignment for one in assign(client, "a", "b", "c"))
        abort(client, mine)
        with connections.begun(
            client, client.devices.owner(mine), "PUT", f"/v1/assignments/{mine}/{path}", BODY[:40], BODY
        ) as attacker:
            assert connections.status_of(attacker) == 410
            assert put(client, theirs, BODY).status_code == 200


@pytest.mark.parametrize("path", ["report", MASKED])
def test_a_device_has_room_for_one_report_however_often_it_sends(coordinator, register, path):
    register(goal=2, rounds=1)
    with coordinator(reports_bytes=2 * ROOM + 100) as client, ExitStack() as open_:
        mine, theirs = (one.assignment for one in assign(client, "a", "b"))
        auth, url = client.devices.owner(mine), f"/v1/assignments/{mine}/{path}"
        attackers = [
            open_.enter_context(connections.begun(client, auth, "PUT", url, BODY[:40], BODY)) for _ in range(6)
        ]
        assert connections.wait_until_closed(attackers, 5)
        assert put(client, theirs, BODY).status_code == 200


def test_report_that_was_counted_needs_no_room_to_be_sent_again(coordinator, register):
    register(goal=3, rounds=1)
    with coordinator(reports_bytes=2 * ROOM - 1) as client:
        mine, theirs, _ = (one.assignment for one in assign(client, "a", "b", "c"))
        receipt = put(client, mine, BODY)
        url = f"/v1/assignments/{theirs}/report"
        with connections.begun(client, client.devices.owner(theirs), "PUT", url, BODY[:40], BODY):
            assert put(client, mine, BODY).content == receipt.content
            refused(put(client, mine, report_body([2, 0, 0, 0], 1)), "conflicting-report")


@pytest.mark.parametrize("path", ["report", MASKED])
def test_a_report_that_comes_too_slowly_for_its_round_is_cut_off(coordinator, register, path):
    register(goal=1, rounds=1, over_selection=2)
    with coordinator() as client:
        mine, theirs = (one.assignment for one in assign(client, "a", "b"))
        url = f"/v1/assignments/{mine}/{path}"
        with connections.begun(client, client.devices.owner(mine), "PUT", url, BODY[:40], BODY) as attacker:
            assert put(client, theirs, BODY).status_code == 200
            assert connections.hung_up(attacker)
