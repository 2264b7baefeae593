"""What needs somebody: stalled tasks, certificates that expire or are no good, and disks that are nearly full."""

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from coordinator.driver.watch import findings_here, findings_of_tasks
from coordinator.rules.alerts import AlertKind, of_disk, of_expiry, of_tasks
from coordinator.rules.progress import Progress, Reason
from coordinator.settings import Settings
from tests.coordinator.test_signed_release import SETTINGS, sign


def test_tasks_that_need_somebody_are_found_and_no_others():
    found = of_tasks(("its task", Progress("t", reason, "so it is", reason.stalled)) for reason in Reason)
    assert {one.task for one in found} == {"its task"}
    assert all(one.remedy for one in found)
    # One is paused as its operator wants it.
    assert {one.kind for one in found} == {reason for reason in Reason if reason.stalled} - {Reason.PAUSED}


def test_a_long_exception_makes_no_event_that_a_receiver_refuses():
    (found,) = of_tasks([("its task", Progress("t", Reason.DIVERGED, "paused: " + "x" * 10**6, True))])
    assert (found.text[:9], found.text[-2:], len(found.text)) == ("paused: x", "x…", 1000)


def test_what_expires_and_which_disk_is_nearly_full_is_found():
    assert of_expiry("the TLS certificate", 15 * 86_400, "then", 0.0) == []
    (soon,) = of_expiry("the TLS certificate", 7 * 86_400, "on 8 January", 0.0)
    assert soon.text == "the TLS certificate expires, on 8 January: renew it"
    assert "has expired" in of_expiry("the release", 1.0, "then", 2.0)[0].text
    assert of_disk("the blobs", 200 * 10**9, 10**12) == []
    (full,) = of_disk("the blobs", 5 * 10**9, 10**12)
    assert full.text == "5.0 of 1000.0 GB are free where the blobs are: make room"


def test_a_release_that_expires_soon_is_found(store, bundle):
    for days in (13, 15, 10**7):  # the last is after the year 9999
        store.register_task(bundle, SETTINGS, sign(bundle, days=days), name=f"for {days} days")
    with store.database.reading() as records:
        found = [one for one in findings_of_tasks(records) if one.kind == AlertKind.EXPIRES]
    assert [(one.task.name, one.subject) for one in found] == [("for 13 days", "the release")]


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_a_certificate_that_is_no_good_is_found(tmp_path, content):
    given, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    given.touch()
    key.touch()
    settings = Settings(tls_cert=given, tls_key=key, blobs=tmp_path / "none")
    given.unlink() if content is None else given.write_bytes(content)
    (found,) = [one for one in findings_here(settings, 0.0) if one.kind == AlertKind.UNREADABLE]
    assert found.text.startswith(f"the TLS certificate {given} cannot be read: ")


def test_a_place_that_cannot_be_read_is_found_and_hides_nothing_else(tmp_path):
    settings = Settings(blobs=tmp_path / ("b" * 300), database=f"sqlite:///{tmp_path}/state.db")
    (found,) = [one for one in findings_here(settings, 0.0) if one.kind == AlertKind.UNREADABLE]
    assert (found.subject, found.text.partition(": ")[0]) == ("the blobs", f"the blobs {settings.blobs} cannot be read")


def test_a_certificate_that_expires_is_found(tmp_path):
    key, now = Ed25519PrivateKey.generate(), datetime(2026, 1, 1, tzinfo=UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "muster.example")])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=3)).sign(key, None)
    (tmp_path / "cert.pem").write_bytes(made.public_bytes(Encoding.PEM))
    (tmp_path / "key.pem").touch()
    settings = Settings(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem", blobs=tmp_path / "none")
    found = [one.text for one in findings_here(settings, now.timestamp())]
    assert "the TLS certificate expires, 2026-01-04 00:00 UTC: renew it" in found
