"""Enrolment and signed requests over HTTP: who is let in, who is not, and that nothing changes for those."""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
import time

import httpx2
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings, strategies as st

from authority.attestation import Attestation
from coordinator.api.service import Service
from coordinator.settings import Settings
from coordinator.store.database import Database
from fedcore.signing import key_text
from fedcore.wire import messages
from fedcore.wire.signatures import PublicKey, SignableRequest, Signer, content_digest, device_id
from secagg.keys import issue
from tests.authority.android import Maker
from tests.coordinator.bundles import report_body
from tests.coordinator.devices import CAPABILITIES, SignedBy, enrol
from tests.coordinator.test_api import abort, ask, assign, check_in, put, refused
from tests.coordinator.test_secure_api import hear, say
from tests.servers import serving

CHECKINS = "/v1/populations/phones/checkins"
HELLO = messages.encode(messages.CheckIn(capabilities=CAPABILITIES, examples={"default": 10}))


@pytest.fixture
def rows(tmp_path, store):
    """What is in the tables that a request could change."""
    database = Database(f"sqlite:///{tmp_path}/state.db")

    def read():
        with database.engine.begin() as connection:
            tables = ("devices", "rounds", "assignments", "reports", "transitions")
            return [connection.exec_driver_sql(f"SELECT * FROM {name}").all() for name in tables]

    yield read
    database.close()


def fields(signer, method, url, body=b"", now=None):
    """The header fields of a signed request to a URL."""
    given = {"content-digest": content_digest(body)} if body else {}
    about = SignableRequest(method, f"{url.host}:{url.port}", url.raw_path.decode(), given.get)
    return given | signer.headers(about, int(time.time()) if now is None else now)


def signed_check_in(client, name="a", **changes):
    signer = client.devices[name].signer
    headers = fields(signer, "POST", client.base_url.join(CHECKINS), HELLO)
    return headers | changes


# --- enrolment


@pytest.mark.parametrize("key", [Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())])
def test_a_key_enrols_once_and_signs_from_then_on(register, client, rows, key):
    register()
    first, again = (messages.decode(enrol(client, key).content, messages.Enrolled) for _ in range(2))
    assert first == again
    assert first.device == device_id(PublicKey.of(key).text)
    ((row,), *_) = rows()
    assert f"{row.algorithm}:{row.public_key}" == PublicKey.of(key).text
    assert (row.id, row.attestation) == (first.device, "none")
    signed = SignedBy(Signer(first.device, key))
    assert client.post(CHECKINS, content=HELLO, auth=signed).json()["outcome"] == "accepted"


def test_only_who_holds_a_key_can_enrol_it(client, rows):
    mine, theirs = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    body = messages.encode(messages.Enrol(attestation=messages.Unattested()))
    stolen = SignedBy(Signer(PublicKey.of(theirs).text, mine))
    refused(client.post("/v1/devices", content=body, auth=stolen), "forged-signature")
    refused(
        client.post("/v1/devices", content=body, auth=SignedBy(Signer("ed25519:AAAA", mine))), "malformed-signature"
    )
    refused(client.post("/v1/devices", content=body, auth=SignedBy(Signer("d" * 32, mine))), "malformed-signature")
    refused(client.post("/v1/devices", content=body), "unsigned")
    assert rows()[0] == []


def test_an_enrolment_that_is_no_message_makes_no_device(client, rows):
    key = Ed25519PrivateKey.generate()
    signed = SignedBy(Signer(PublicKey.of(key).text, key))
    for body in (
        b"{",
        b"{}",
        b'{"attestation": {"kind": "magic"}}',
        b'{"attestation": {"kind": "credential", "secagg": "AA==", "credential": "AA=="}}',
    ):
        refused(client.post("/v1/devices", content=body, auth=signed), "malformed-message")
    assert rows()[0] == []


SECRET = b"a secret of the whole fleet"


def proof(key, at, secret=SECRET):
    return messages.Enrol(
        attestation=messages.SharedSecret(messages.shared_secret_proof(secret, PublicKey.of(key).text, at))
    )


def test_enrolment_secret_admits_only_devices_that_prove_it(store, tmp_path):
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    place = {"database": f"sqlite:///{tmp_path}/state.db", "blobs": tmp_path / "blobs", "port": 0}
    key, other, now = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate(), int(time.time())
    with (
        serving(Settings(**place, accept_unattested=False, enrolment_secret_file=tmp_path / "secret")) as url,
        httpx2.Client(base_url=url) as client,
    ):

        def attempt(message, key=key):
            signed = SignedBy(Signer(PublicKey.of(key).text, key), lambda: now)
            return client.post("/v1/devices", content=messages.encode(message), auth=signed)

        for wrong in (
            messages.Enrol(attestation=messages.Unattested()),
            proof(key, now, b"another secret, as long"),
            proof(other, now),
            proof(key, now - 1),
        ):
            refused(attempt(wrong), "not-attested")
        assert SECRET not in attempt(proof(key, now)).request.content
        assert attempt(proof(key, now)).status_code == 200
        with store.database.reading() as records:
            assert records.devices.find(device_id(PublicKey.of(key).text)).attestation == "shared-secret"
            assert records.devices.find(device_id(PublicKey.of(other).text)) is None


def test_a_coordinator_that_was_told_nothing_enrols_nobody(store, tmp_path):
    place = {"database": f"sqlite:///{tmp_path}/state.db", "blobs": tmp_path / "blobs", "port": 0}
    settings = Settings(**place, accept_unattested=False)
    key = Ed25519PrivateKey.generate()
    with serving(settings) as url, httpx2.Client(base_url=url) as client:
        refused(enrol(client, key), "not-attested")
        refused(enrol(client, key, proof(key, int(time.time()))), "not-attested")


def test_a_secret_that_is_missing_or_short_is_an_error_at_the_start(tmp_path):
    (tmp_path / "short").write_bytes(b"  hunter2  \n")
    for name, says in (("missing", "cannot be read"), ("short", "holds 7 bytes")):
        with pytest.raises(match=says):
            Attestation.of(False, tmp_path / name)
    assert SECRET.decode() not in repr(Attestation(False, SECRET))


def test_a_credential_of_the_authority_admits_its_device_and_no_other(store, tmp_path):
    place = {"database": f"sqlite:///{tmp_path}/state.db", "blobs": tmp_path / "blobs", "port": 0}
    authority, secagg = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    key, other, now = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate(), int(time.time())

    def held(of=key, signer=authority, until=now + 60):
        device = bytes.fromhex(device_id(PublicKey.of(of).text))
        return messages.Enrol(attestation=messages.HeldCredential(secagg, issue(signer, secagg, device, until)))

    named = {"authority": key_text(authority.public_key().public_bytes_raw()), "authority_url": "https://a.example"}
    with serving(Settings(**place, accept_unattested=False, **named)) as url, httpx2.Client(base_url=url) as client:
        for wrong in (
            messages.Enrol(attestation=messages.Unattested()),
            held(of=other),
            held(signer=other),
            held(until=now - 400),
        ):
            refused(enrol(client, key, wrong), "not-attested")
        assert enrol(client, key, held()).status_code == 200
    with store.database.reading() as records:
        assert records.devices.find(device_id(PublicKey.of(key).text)).attestation == "credential"
    with serving(Settings(**place, accept_unattested=False)) as url, httpx2.Client(base_url=url) as client:
        refused(enrol(client, other, held(of=other)), "not-attested")


@pytest.mark.security("there is a real one with the app behind a key")
def test_coordinator_enrols_phones_that_their_platform_attests(store, tmp_path):
    place = {"database": f"sqlite:///{tmp_path}/state.db", "blobs": tmp_path / "blobs", "port": 0}
    maker, now = Maker(dt.datetime.now(dt.UTC)), int(time.time())
    key, other = Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())
    chain = maker.chain(messages.attestation_challenge(PublicKey.of(key).text, now))
    evidence = messages.encode(messages.Enrol(attestation=messages.AndroidKey(chain)))
    settings = Settings(**place, accept_unattested=False, android_file=maker.settings(tmp_path))
    with serving(settings) as url, httpx2.Client(base_url=url) as client:

        def attempt(key, at=now):
            signed = SignedBy(Signer(PublicKey.of(key).text, key), lambda: at)
            return client.post("/v1/devices", content=evidence, auth=signed)

        refused(enrol(client, key), "not-attested")
        for answer in (attempt(other), attempt(key, now - 1)):
            refused(answer, "not-attested")
        assert attempt(key).status_code == 200
    with store.database.reading() as records:
        assert records.devices.find(device_id(PublicKey.of(key).text)).attestation == "android-key"


# --- who is let in


@pytest.mark.security("Every request of a device is signed, and refused by name")
def test_every_route_but_health_wants_a_signature(client):
    document = client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method in methods:
            address = re.sub(r"\{.*?\}", "7", path)
            answer = client.request(method, address, content=b"{}" if method[0] == "p" else None)
            if path in {"/healthz", "/readyz"}:
                assert answer.status_code == 200
            else:
                assert answer.status_code == 401
                if method != "head":
                    refused(answer, "unsigned")
                assert answer.headers["www-authenticate"] == "Signature"


@pytest.mark.promise("Unsigned, forged, replayed and stale requests, and those for another device, are refused")
@pytest.mark.security("Every request of a device is signed, and refused by name")
@pytest.mark.security("A process takes a request once")
def test_who_is_not_who_they_say_is_refused_by_name_and_nothing_changes(register, client, rows):
    register()
    assert check_in(client, "b").status_code == 200  # the population is driven from now on
    client.devices["a"]  # enrols it
    before = rows()
    url, now = client.base_url.join(CHECKINS), int(time.time())
    a, b = (client.devices[name].signer for name in "ab")
    other = client.base_url.join("/v1/populations/tablets/checkins")
    elsewhere = client.base_url.copy_with(host="fl.example.org")
    for slug, headers in [
        ("unsigned", {}),
        ("unsigned", {"Signature": "device=:AAAA:"}),
        ("malformed-signature", signed_check_in(client, Signature="device=:AAA:")),
        ("malformed-signature", fields(a, "POST", url)),
        ("unknown-device", fields(dataclasses.replace(a, keyid="f" * 32), "POST", url, HELLO)),
        ("unknown-device", fields(dataclasses.replace(a, keyid=PublicKey.of(a.key).text), "POST", url, HELLO)),
        ("forged-signature", fields(dataclasses.replace(a, keyid=b.keyid), "POST", url, HELLO)),
        ("forged-signature", fields(a, "PUT", url, HELLO)),
        ("forged-signature", fields(a, "POST", other, HELLO)),
        ("forged-signature", fields(a, "POST", elsewhere, HELLO)),
        ("stale-signature", fields(a, "POST", url, HELLO, now - 400)),
        ("stale-signature", fields(a, "POST", url, HELLO, now + 100)),
        ("digest-mismatch", fields(a, "POST", url, HELLO + b" ")),
    ]:
        answer = client.post(CHECKINS, content=HELLO, headers=headers)
        refused(answer, slug)
    assert rows() == before
    assert client.post(CHECKINS, content=HELLO, headers=fields(a, "POST", url, HELLO)).status_code == 200


@pytest.mark.promise("Unsigned, forged, replayed and stale requests, and those for another device, are refused")
@pytest.mark.security("Every request of a device is signed, and refused by name")
@pytest.mark.security("A process takes a request once")
def test_a_request_that_came_before_is_refused(register, client):
    register()
    assert check_in(client, "b").status_code == 200  # the population is driven from now on
    headers = signed_check_in(client)
    assert client.post(CHECKINS, content=HELLO, headers=headers).status_code == 200
    refused(client.post(CHECKINS, content=HELLO, headers=headers), "replayed-signature")


def test_an_enrolment_that_came_before_is_the_same_again(client, rows):
    key = Ed25519PrivateKey.generate()
    first = enrol(client, key)
    again = client.post("/v1/devices", content=first.request.content, headers=first.request.headers)
    assert (again.status_code, again.content) == (200, first.content)
    assert len(rows()[0]) == 1


def test_request_heard_by_the_last_driver_is_refused_by_the_next(store, tmp_path):
    place = {"database": f"sqlite:///{tmp_path}/state.db", "blobs": tmp_path / "blobs"}
    service = Service.open(Settings(**place))
    assert (
        service.membership.took_over == service.authenticator.begin
    )  # what calls it: test_leases.py; what it does: test_replays.py
    service.unmasker.close()
    service.store.close()


def test_a_stale_signature_is_told_the_time(register, client):
    register()
    signer, url = client.devices["a"].signer, client.base_url.join(CHECKINS)
    stale = client.post(CHECKINS, content=HELLO, headers=fields(signer, "POST", url, HELLO, 1_000_000_000))
    assert abs(time.time() - _seconds(stale.headers["date"])) < 5
    assert "retry-after" not in stale.headers


def _seconds(date):
    return time.mktime(time.strptime(date, "%a, %d %b %Y %H:%M:%S GMT")) - time.timezone


@pytest.mark.promise("Unsigned, forged, replayed and stale requests, and those for another device, are refused")
@pytest.mark.security("A session or an assignment is for the device that it was given to")
def test_session_and_assignment_belong_to_their_device(store, register, client, rows):
    task = register(goal=1)
    session = check_in(client, "a").json()["session"]
    refused(ask(client, session, "b"), "foreign-session")
    given = ask(client, session, "a", headers={"Prefer": "wait=4"}).json()["assignment"]
    client.devices.of[given] = "b"
    before = rows()
    for answer in (
        put(client, given, report_body([1, 0, 0, 0], 1)),
        abort(client, given),
        say(client, given, 1, b"\1"),
        hear(client, given, 2),
    ):
        refused(answer, "foreign-assignment")
    assert rows() == before
    client.devices.of[given] = "a"
    assert put(client, given, report_body([1, 0, 0, 0], 1)).status_code == 200
    assert [seat.device for seat in store.cohort(task, 1)] == [client.devices.id("a")]


def test_body_other_than_the_signed_one_is_refused_unread(register, client):
    register(goal=1)
    (given,) = assign(client, "a")
    url = f"/v1/assignments/{given.assignment}/report"
    signer, body = client.devices["a"].signer, report_body([1, 0, 0, 0], 1)
    headers = fields(signer, "PUT", client.base_url.join(url), body)
    refused(client.put(url, content=body[:-1] + b"\1", headers=headers), "digest-mismatch")
    refused(client.put(url, headers=fields(signer, "PUT", client.base_url.join(url), body)), "digest-mismatch")
    assert put(client, given.assignment, body).status_code == 200


@pytest.mark.promise("Bad input gets a problem document, never a 5xx, and changes nothing")
@pytest.mark.security("Bad input is answered with a problem and changes nothing")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["signature", "signature-input", "content-digest"]),
    # A client sends no value with spaces around it.
    value=st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=300).map(
        str.strip
    ),
    body=st.binary(max_size=200),
)
def test_no_header_and_no_body_makes_the_service_fail(client, name, value, body):
    headers = {**signed_check_in(client), name: value.encode("latin-1")}
    answer = client.post(CHECKINS, content=body, headers=headers)
    assert 400 <= answer.status_code < 500
    signer, url = client.devices["a"].signer, client.base_url.join(CHECKINS)
    answer = client.post(CHECKINS, content=body, headers=fields(signer, "POST", url, body))
    assert 400 <= answer.status_code < 500
