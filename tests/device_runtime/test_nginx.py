"""The reverse proxy of the examples, as nginx runs it, between real devices and a real coordinator."""

from __future__ import annotations

import re
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

import numpy as np
import pytest

from coordinator.settings import Settings
from coordinator.store.tasks import TaskSettings, open_coordinator_store
from device_runtime.session import DeviceConfig, run_session
from fedcore.bundle import Bundle
from simulator import datasets
from tests.coordinator.conftest import committed
from tests.coordinator.devices import speaking_to
from tests.coordinator.test_api import ask, check_in
from tests.device_runtime.nginx import CONFIGURATION, nginx_before
from tests.servers import serving

DATE = "Date: Thu, 01 Jan 1970 00:00:00 GMT"


@pytest.fixture
def behind_nginx(plans, tmp_path, monkeypatch):
    """A coordinator behind nginx, with a round for two devices: its store, its task, and nginx's URL."""
    place = {"database": f"sqlite:///{tmp_path}/state.db", "blobs": tmp_path / "blobs"}
    settings = Settings(
        **place, port=0, admin_port=0, accept_unattested=True, trusted_proxies="127.0.0.1", max_wait_s=20
    )
    with (
        open_coordinator_store(settings.database, settings.blobs) as store,
        serving(settings) as url,
        nginx_before(urlsplit(url).port, tmp_path) as (port, certificate),
    ):
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        bundle = Bundle(plans / "short")
        task = store.register_task(bundle, TaskSettings(population="phones", goal=2, rounds=1, over_selection=1.0)).id
        yield store, task, f"https://127.0.0.1:{port}"


def test_devices_go_through_a_round_behind_the_example_of_nginx(behind_nginx, tmp_path):
    store, task, url = behind_nginx
    configs = []
    for number in range(2):
        examples = tmp_path / f"{number}.npz"
        np.savez(examples, **datasets.load("digits").shard(number))
        configs.append(
            DeviceConfig(
                coordinator=url, population="phones", examples=examples, state=tmp_path / str(number), wait_s=15.0
            )
        )
    with ThreadPoolExecutor() as pool:
        outcomes = list(pool.map(run_session, configs))
    assert [one.outcome for one in outcomes] == ["reported", "reported"]
    assert np.any(committed(store, task, 1))


def test_a_device_that_hangs_up_at_nginx_stops_waiting_at_the_coordinator(behind_nginx):
    *_, url = behind_nginx
    with speaking_to(url, verify=ssl.create_default_context()) as client:
        session = check_in(client).json()["session"]
        with pytest.raises(Exception, match="timed out"):
            ask(client, session, headers={"Prefer": "wait=20"}, timeout=0.3)
        while (again := ask(client, session)).status_code == 404:  # it waits still: nobody has noticed yet
            pass
        assert again.json()["reason"] == "not-selected"


@contextmanager
def listening():
    """A server of the test's own, instead of a coordinator: gives its socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        yield listener


def read_head(connection):
    """The lines of a request's head, and the bytes that came after it."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1 << 16)
    head, _, rest = data.partition(b"\r\n\r\n")
    return head.decode().split("\r\n"), rest


def test_nginx_passes_on_what_is_signed_and_a_body_as_it_comes(tmp_path):
    with listening() as upstream, nginx_before(upstream.getsockname()[1], tmp_path) as (port, certificate):
        trust = ssl.create_default_context(cafile=certificate)
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10, source_address=("127.0.0.2", 0)) as plain,
            trust.wrap_socket(plain, server_hostname="127.0.0.1") as device,
        ):
            device.sendall(
                b"PUT /v1//a%2Fb/../c?d=%20 HTTP/1.1\r\nHost: fl.example.org:8443\r\nContent-Length: 10\r\n"
                b"X-Forwarded-For: 203.0.113.9\r\nMuster-Other: 1\r\n\r\nhalf "
            )
            connection, _ = upstream.accept()
            with connection:
                connection.settimeout(10)
                (first, *fields), body = read_head(connection)
                while len(body) < 5:
                    body += connection.recv(100)
                assert body == b"half "  # before the other half is sent
                device.sendall(b"other")
                assert connection.recv(100) == b"other"
                connection.sendall(
                    b"HTTP/1.1 200 OK\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\nContent-Length: 0\r\n\r\n"
                )
                answer, _ = read_head(device)
    assert first == "PUT /v1//a%2Fb/../c?d=%20 HTTP/1.1"
    found = dict(field.split(": ", 1) for field in fields)
    assert found["Host"] == "fl.example.org:8443"
    assert (found["X-Forwarded-For"], found["X-Forwarded-Proto"]) == ("127.0.0.2", "https")
    assert found["Muster-Other"] == "1"
    assert DATE in answer


def test_nginx_waits_longer_than_a_device_may():
    (seconds,) = re.findall(r"proxy_read_timeout (\d+)s;", CONFIGURATION.read_text())
    assert int(seconds) > Settings().max_wait_s
