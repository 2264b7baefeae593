"""What an operator sees and decides of a running service: logs, metrics, limits, readiness, how it stops."""

import datetime
import ipaddress
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.api import authentication
from coordinator.api.authentication import issue
from coordinator.api.limits import admit
from coordinator.errors import TooManyRequests
from coordinator.rules.entities import Role
from coordinator.settings import Settings
from ingress.limits import RateLimit, caller_of
from tests.coordinator.bundles import report_body
from tests.coordinator.conftest import committed
from tests.coordinator.connections import begun
from tests.coordinator.devices import speaking_to
from tests.coordinator.replicas import until
from tests.coordinator.test_api import abort, assign, blob, check_in, check_in_once, digest_of, put, refused, wait
from tests.servers import serving_both

_GIVEN_UP_S = 60.0
"""How long what a test sends slowly goes on, so that a failure is told and not waited on."""


@pytest.fixture
def service(tmp_path):
    """Serve with settings; gives clients of devices and of operators."""

    @contextmanager
    def run(**settings):
        fixed = {"database": f"sqlite:///{tmp_path}/state.db", "blobs": tmp_path / "blobs", "port": 0, "admin_port": 0}
        with (
            serving_both(Settings(**fixed, **{"max_wait_s": 5, "loopback_viewer": True} | settings)) as urls,
            speaking_to(urls.devices) as devices,
            httpx2.Client(base_url=urls.admin, timeout=10) as admin,
        ):
            yield devices, admin

    return run


@contextmanager
def process(tmp_path, **environment):
    """`muster coordinator serve` as a process; gives it, its clients, and the file of its log."""
    log = tmp_path / "coordinator.log"
    command = [sys.executable, "-m", "muster", "coordinator", "serve", "--port", "0"]
    command += ["--db", f"sqlite:///{tmp_path}/state.db", "--blobs", str(tmp_path / "blobs")]
    environment = {**os.environ, "MUSTER_LOG_LEVEL": "debug", "MUSTER_LOOPBACK_VIEWER": "1", **environment}
    with log.open("w") as output, subprocess.Popen(command, stderr=output, env=environment) as child:
        try:
            urls = None
            while urls is None:
                assert child.poll() is None, log.read_text()
                urls = re.search(r"devices at (\S+), operators at ([^\s\"]+)", log.read_text())
                time.sleep(0.01)
            with speaking_to(urls[1]) as devices, httpx2.Client(base_url=urls[2]) as admin:
                yield child, devices, admin, log
        finally:
            child.kill()


def samples(admin):
    """Every sample of /metrics, as text to number."""
    lines = admin.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_metrics_count_what_happened_and_name_no_device(store, register, service):
    task = register(goal=2, rounds=1, over_selection=1.5)
    with service() as (devices, admin):
        cohort = assign(devices, "phone-a", "phone-b", "phone-c")
        check_in(devices, formats=("executorch",))
        assert abort(devices, cohort[0].assignment).status_code == 204
        assert abort(devices, cohort[0].assignment).status_code == 204
        body = report_body([1, 0, 0, 0], 1)
        for one in cohort[1:]:
            put(devices, one.assignment, body)
        put(devices, cohort[1].assignment, body)
        refused(put(devices, cohort[0].assignment, body), "no-longer-needed")
        size = len(blob(devices, cohort[0].plan.sha256).content)
        committed(store, task, 1)
        found = samples(admin)
        text = admin.get("/metrics").text
    route = "/v1/assignments/{assignment}/report"
    assert found['muster_check_ins_total{outcome="accepted",reason=""}'] == 3
    assert found['muster_check_ins_total{outcome="rejected",reason="unsupported-format"}'] == 1
    assert found["muster_reports_total"] == 2
    assert found['muster_aborts_total{reason="runtime-failed"}'] == 1
    assert found['muster_rounds_total{reason="",state="committed"}'] == 1
    assert found['muster_round_duration_seconds_count{state="committed"}'] == 1
    assert found[f'muster_problems_total{{problem="no-longer-needed",route="{route}"}}'] == 1
    assert found[f'muster_request_duration_seconds_count{{route="{route}",status="200"}}'] == 3
    # A report that was counted, or comes late, is answered before its body is read.
    assert found[f'muster_received_bytes_total{{route="{route}"}}'] == 2 * len(body)
    assert found['muster_sent_bytes_total{route="/v1/blobs/{sha256}"}'] == size
    assert found["muster_transaction_seconds_count"] > 0
    secrets = {devices.devices.id("phone-a"), task, cohort[0].plan.sha256} | {one.assignment for one in cohort}
    assert [secret for secret in secrets if secret in text] == []


def test_waiting_sessions_and_open_requests_are_seen_while_they_wait(register, service):
    register(goal=2)
    with service(max_wait_s=60) as (devices, admin), ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait, devices, "a", 60)
        while not (found := samples(admin))["muster_sessions_waiting"]:
            assert not waiting.done()
        assert found["muster_requests_in_progress"] == 1
        assert wait(devices, "b").json()["outcome"] == waiting.result().json()["outcome"] == "assigned"
        assert samples(admin)["muster_requests_in_progress"] == 0


def test_who_hangs_up_with_another_request_behind_waits_no_more(register, service):
    register(goal=2, selection_timeout_s=60)
    with service(max_wait_s=60) as (devices, admin):
        path = f"/v1/sessions/{check_in(devices, 'a').json()['session']}/assignments"
        behind = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        with begun(devices, devices.devices["a"], "POST", path, behind, Prefer="wait=60"):
            until(lambda: samples(admin)["muster_sessions_waiting"] == 1)
        until(lambda: samples(admin)["muster_sessions_waiting"] == 0)


def test_logs_are_json_with_request_ids_and_no_secret(store, register, tmp_path):
    task = register(goal=1, rounds=1)
    with process(tmp_path, MUSTER_LOG_FORMAT="json") as (child, devices, _, log):
        (one,) = assign(devices, "phone-a")
        session = check_in(devices, "phone-b").json()["session"]
        answer = put(devices, one.assignment, b"junk")
        put(devices, one.assignment, report_body([1, 0, 0, 0], 1))
        devices.get(f"/v1/sessions/{session}/assignments", auth=devices.devices["phone-b"])
        device = devices.devices.id("phone-a")
        committed(store, task, 1)
        child.send_signal(signal.SIGTERM)
        child.wait(10)
    lines = [json.loads(line) for line in log.read_text().splitlines() if not line.startswith("coordinator ready")]
    assert {"coordinator.server", "uvicorn.error", "coordinator.api.http"} <= {line["logger"] for line in lines}
    (refusal,) = [line for line in lines if line.get("request_id") == answer.headers["x-request-id"]]
    assert (refusal["route"], refusal["status"], refusal["level"]) == (
        "/v1/assignments/{assignment}/report",
        422,
        "debug",
    )
    assert [secret for secret in (one.assignment, session, device) if secret in log.read_text()] == []


def test_other_libraries_tell_no_url_at_any_level(service):
    program = "import sys, httpx2; from coordinator.monitoring import configure_logs; configure_logs('debug', 'json'); "
    program += "httpx2.get(sys.argv[1])"
    with service() as (devices, _):
        url = f"{devices.base_url}/v1/assignments/secret/report"
        done = subprocess.run([sys.executable, "-c", program, url], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.promise("SIGTERM loses nothing, and the process ends within its bound")
def test_stop_waits_for_uploads_in_progress_and_logs_text(store, register, tmp_path):
    register(goal=1, rounds=1)
    body = report_body([1, 0, 0, 0], 1)
    quiet = {"MUSTER_LOG_FORMAT": "text", "MUSTER_LOG_LEVEL": "info"}
    with process(tmp_path, **quiet) as (child, devices, admin, log), ThreadPoolExecutor() as pool:
        (one,) = assign(devices, "a")
        told = threading.Event()

        def slowly():
            yield body[:100]
            told.wait(_GIVEN_UP_S)
            yield body[100:]

        headers = {"Content-Digest": digest_of(body), "Content-Length": str(len(body))}
        url = f"/v1/assignments/{one.assignment}/report"
        upload = pool.submit(devices.put, url, content=slowly(), headers=headers, auth=devices.devices["a"])
        while samples(admin)["muster_requests_in_progress"] < 1:
            assert not upload.done(), upload.result()
            time.sleep(0.005)
        assert admin.get("/readyz").status_code == 200
        child.send_signal(signal.SIGTERM)
        while (ready := admin.get("/readyz")).status_code == 200:
            time.sleep(0.005)
        assert "about to stop" in refused(ready, "unavailable").detail
        told.set()
        assert upload.result(5).status_code == 200
        assert child.wait(10) in (0, -signal.SIGTERM)
    text = log.read_text()
    assert "devices at http" in text
    assert [sign for sign in ("milliseconds", "{", "Traceback") if sign in text] == []


@pytest.mark.promise("SIGTERM loses nothing, and the process ends within its bound")
def test_stop_ends_within_its_bound_whatever_a_device_or_an_operator_does(store, register, tmp_path):
    register(goal=1)
    operator = {"Authorization": f"Bearer {issue(store.database, 'alice', Role.OPERATOR)[1]}", "Content-Length": "100"}
    with process(tmp_path, MUSTER_DRAIN_S="2") as (child, devices, admin, _), ThreadPoolExecutor() as pool:
        (one,) = assign(devices, "a")
        over, given_up = threading.Event(), time.monotonic() + _GIVEN_UP_S

        def never():
            while time.monotonic() < given_up and not over.wait(0.05):
                yield b"x"

        headers = {"Content-Digest": digest_of(b""), "Content-Length": "100"}
        url = f"/v1/assignments/{one.assignment}/report"
        upload = pool.submit(devices.put, url, content=never(), headers=headers, auth=devices.devices["a"])
        put_blob = pool.submit(admin.put, f"/admin/v1/blobs/{'0' * 64}", content=never(), headers=operator)
        while samples(admin)["muster_requests_in_progress"] < 1:
            time.sleep(0.005)
        began = time.monotonic()
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) in (0, -signal.SIGTERM)
        assert time.monotonic() - began > 1.9
        over.set()
        upload.exception(5)
        put_blob.exception(5)


def test_address_over_its_limit_is_told_when_to_return(service):
    with service(address_limit_per_minute=3, trusted_proxies="127.0.0.1") as (devices, admin):
        asked = [devices.get("/openapi.json", headers={"X-Forwarded-For": "198.51.100.7"}) for _ in range(4)]
        assert [answer.status_code for answer in asked[:3]] == [200] * 3
        problem = refused(asked[3], "too-many-requests")
        assert 0 < problem.retry.min_s <= 20
        assert 0 < int(asked[3].headers["retry-after"]) <= 20
        assert devices.get("/openapi.json", headers={"X-Forwarded-For": "198.51.100.8"}).status_code == 200
        assert devices.get("/healthz", headers={"X-Forwarded-For": "198.51.100.7"}).status_code == 200
        assert samples(admin)['muster_shed_requests_total{limit="address"}'] == 1


def test_forwarded_address_is_believed_of_no_stranger(service):
    with service(address_limit_per_minute=1) as (devices, _):
        for _ in range(3):
            assert devices.get("/openapi.json", headers={"X-Forwarded-For": "198.51.100.7"}).status_code == 200


@pytest.mark.security("An enrolled device can check in as often as the limits allow")
def test_device_that_asks_too_often_is_told_when_to_come_back(register, service):
    register()
    with service(device_limit_per_minute=2) as (devices, admin):
        assert check_in(devices, "a").status_code == 200
        refused(blob(devices, "0" * 64), "unknown-blob")
        answer = check_in(devices, "a")
        problem = refused(answer, "too-many-requests")
        assert 0 < problem.retry.min_s <= int(answer.headers["retry-after"]) <= 30
        assert check_in(devices, "b").status_code == 200
        assert samples(admin)['muster_shed_requests_total{limit="device"}'] == 1


def test_what_others_repeat_of_a_device_is_not_counted_against_it(register, service):
    register()
    with service(device_limit_per_minute=2) as (devices, _):
        first = check_in(devices, "a").request
        for _ in range(3):
            again = devices.post(first.url, content=first.content, headers=first.headers)
            refused(again, "replayed-signature")
        assert check_in(devices, "a").status_code == 200


def test_more_signatures_than_can_be_remembered_are_sent_away(register, service, monkeypatch):
    monkeypatch.setattr(authentication, "REQUESTS", 2)
    register()
    with service() as (devices, admin):
        assert [check_in(devices, name).status_code for name in "ab"] == [200, 200]
        assert refused(check_in_once(devices, "c"), "unavailable").retry is not None
        assert samples(admin)['muster_shed_requests_total{limit="signatures"}'] == 1


@pytest.mark.promise("Overload is shed, with the time to come back")
def test_more_requests_than_may_be_in_progress_are_sent_away_at_once(store, register, service):
    task = register(goal=3)
    with service(connection_limit=2, max_wait_s=60) as (devices, admin), ThreadPoolExecutor() as pool:
        waiting = [pool.submit(wait, devices, name, 60) for name in ("a", "b")]
        while samples(admin)["muster_sessions_waiting"] < 2:
            assert not any(one.done() for one in waiting)
        answer = devices.get("/openapi.json")
        assert refused(answer, "unavailable").retry
        assert answer.headers["retry-after"]
        assert devices.get("/readyz").status_code == 200
        assert samples(admin)['muster_shed_requests_total{limit="connections"}'] == 1
        store.cancel(task)
        for one in waiting:
            assert one.result().status_code == 200
        assert devices.get("/openapi.json").status_code == 200


def test_rate_limit_gives_a_minutes_worth_at_once_and_then_its_rate():
    now = [0.0]
    limit = RateLimit(3, clock=lambda: now[0])
    for _ in range(3):
        admit(limit, "a")
    for _ in range(2):  # a refused request does not count: whoever keeps asking is not shut out for ever
        with pytest.raises(TooManyRequests) as refusal:
            admit(limit, "a")
        assert refusal.value.wait_s == pytest.approx(20)
    admit(limit, "b")
    now[0] = 20.0
    admit(limit, "a")
    with pytest.raises(TooManyRequests):
        admit(limit, "a")
    now[0] = 1000.0
    for _ in range(3):
        admit(limit, "a")


def self_made_certificate(folder):
    """A certificate for 127.0.0.1 and its key, as PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    began = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(began).not_valid_after(began + datetime.timedelta(days=1))
    for_address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    signed = made.add_extension(for_address, critical=False).sign(key, hashes.SHA256())
    (folder / "cert.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(key.private_bytes(*plain))
    return folder / "cert.pem", folder / "key.pem"


def test_both_ports_speak_tls_with_a_certificate_of_ones_own(tmp_path):
    certificate, key = self_made_certificate(tmp_path)
    settings = {"database": f"sqlite:///{tmp_path}/s.db", "blobs": tmp_path / "b", "port": 0, "admin_port": 0}
    trust = ssl.create_default_context(cafile=certificate)
    with serving_both(Settings(**settings, tls_cert=certificate, tls_key=key)) as urls:
        for url in urls:
            assert url.startswith("https://")
            assert httpx2.get(f"{url}/healthz", verify=trust).json() == {"status": "ok"}
            with pytest.raises(httpx2.ConnectError, match="self-signed"):
                httpx2.get(f"{url}/healthz")


@pytest.mark.security("The service speaks plain HTTP on 127.0.0.1 by default")
def test_by_default_the_service_is_there_for_this_machine_alone(tmp_path):
    place = {"database": f"sqlite:///{tmp_path}/s.db", "blobs": tmp_path / "b", "port": 0, "admin_port": 0}
    with serving_both(Settings(**place)) as urls:
        for url in urls:
            assert httpx2.get(f"{url}/healthz").status_code == 200
            assert url.startswith("http://127.0.0.1:")
            with pytest.raises(httpx2.ConnectError):
                httpx2.get(f"{url.replace('127.0.0.1', '127.0.0.2')}/healthz")


@pytest.mark.parametrize(
    ("address", "caller"),
    [
        ("127.0.0.1", None),
        ("::1", None),
        ("::ffff:127.0.0.1", None),
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:0db8:0001:0002"),
        ("fe80::1%eth0", "fe80:0000:0000:0000"),
    ],
)
def test_caller_is_an_ipv4_address_or_an_ipv6_subscriber(address, caller):
    assert caller_of(address) == caller
