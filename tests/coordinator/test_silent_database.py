"""A database behind a network that swallows packets: everybody is answered, and all goes on once it is back."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.settings import Settings
from coordinator.store import database as database_engines
from coordinator.store.tasks import open_coordinator_store
from fedcore.wire.signatures import Signer
from tests.coordinator.bundles import report_body
from tests.coordinator.devices import SignedBy, enrol, speaking_to
from tests.coordinator.link import link_to
from tests.coordinator.replicas import until
from tests.coordinator.test_api import assign, blob, check_in, check_in_once, put, refused
from tests.servers import serving_both

pytestmark = [
    pytest.mark.promise("If the network swallows traffic to PostgreSQL, every request still gets an answer"),
    pytest.mark.parametrize("database", ["postgresql"], indirect=True),
]
MANY = 30
"""More than there are connections to the database; of all kinds together, more than there are threads."""


@pytest.fixture
def link(postgresql):
    with link_to(postgresql.folder) as made:
        yield made


@pytest.fixture
def coordinator(database, link, tmp_path, monkeypatch):
    """Serve with limits of time that a test can wait for; gives a client of devices and one of operators."""
    for name in ("REPLY_S", "CONNECT_S", "POOL_S"):
        monkeypatch.setattr(database_engines, name, raising=False, value=1.0 if name != "CONNECT_S" else 2)
    place = {"database": link.url(database), "keys": tmp_path / "keys", "blobs": tmp_path / "blobs"}
    settings = Settings(**place, port=0, admin_port=0, loopback_viewer=True)
    with (
        serving_both(settings) as urls,
        speaking_to(urls.devices, timeout=60) as devices,
        httpx2.Client(base_url=urls.admin, timeout=60) as operators,
    ):
        yield devices, operators


def stranger():
    """Signs as a device that nobody has enrolled."""
    return SignedBy(Signer("0" * 32, Ed25519PrivateKey.generate()))


def requests_of_all_kinds(devices, operators):
    """What each of these asks needs the database; by name."""
    return {
        "a device that is not known": lambda: devices.get(f"/v1/blobs/{'0' * 64}", auth=stranger()),
        "an enrolment": lambda: enrol(devices, Ed25519PrivateKey.generate()),
        "a blob": lambda: blob(devices, "0" * 64),
        "an assignment": lambda: put(devices, "f" * 30, report_body([1, 0, 0, 0], 1)),
        "a population": lambda: check_in_once(devices, population="nobody has made it"),
        "the admin API": lambda: operators.get("/admin/v1/tasks"),
        "a page": lambda: operators.get("/"),
    }


def test_everybody_is_answered_while_the_network_swallows(register, coordinator, link, caplog):
    devices, operators = coordinator
    register(goal=2, rounds=1)
    mine, _ = assign(devices, "a", "b")
    asks = requests_of_all_kinds(devices, operators)
    with ThreadPoolExecutor(MANY * len(asks) + 1) as pool, link.swallowing():
        asked = {name: [pool.submit(ask) for _ in range(MANY)] for name, ask in asks.items()}
        asked["a report"] = [pool.submit(put, devices, mine.assignment, report_body([1, 0, 0, 0], 1))]
        until(lambda: operators.get("/readyz").status_code == 503)
        answers = {name: [one.result() for one in several] for name, several in asked.items()}
        refused(devices.get("/readyz"), "unavailable")
        assert devices.get("/healthz").status_code == 200
        assert check_in(devices).status_code == 200  # the driver goes on, from memory
    for name, several in answers.items():
        for answer in several:
            assert refused(answer, "unavailable").retry, name
            assert answer.headers["retry-after"], name
    assert "Traceback" not in caplog.text
    assert not any(record.exc_info for record in caplog.records)


def test_all_goes_on_by_itself_after_the_network_swallowed(store, register, coordinator, link):
    devices, operators = coordinator
    task = register(goal=2, rounds=1)
    mine, theirs = assign(devices, "a", "b")
    with operators.stream("GET", "/events") as page:
        with link.swallowing():
            until(lambda: devices.get("/readyz").status_code == 503)
        until(lambda: devices.get("/readyz").status_code == 200)
        assert operators.get("/admin/v1/tasks").json()[0]["id"] == task
        body = report_body([1, 0, 0, 0], 1)
        for given in (mine, theirs):
            until(lambda given=given: put(devices, given.assignment, body).status_code == 200)
        until(lambda: store.task(task).state == "completed")
        assert any("completed" in line for line in page.iter_lines())


def test_a_connection_finds_out_that_its_peer_is_gone(database, link, tmp_path):
    names = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    with (
        open_coordinator_store(link.url(database), tmp_path / "blobs") as store,
        store.database.engine.connect() as one,
        socket.socket(fileno=os.dup(one.connection.driver_connection.fileno())) as opened,
    ):
        given_up_ms, *keep = (opened.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    idle_s, interval_s, count = keep
    assert 0 < given_up_ms < 1000 * database_engines.REPLY_S
    assert idle_s + interval_s * count < database_engines.REPLY_S
