"""Findings of an audit, and its log."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import sqlalchemy
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from authority.attestation import Attestation
from coordinator.api.authentication import issue, revoke
from coordinator.api.service import Registry
from coordinator.driver.watch import findings_here, findings_of_tasks
from coordinator.errors import BrokenAudit
from coordinator.rules.alerts import Action, AlertKind, Head, of_disk, of_expiry, of_tasks, verify
from coordinator.rules.entities import Role
from coordinator.rules.progress import Progress, Reason
from coordinator.settings import Settings
from coordinator.store.tables import AUDIT
from fedcore.wire.messages import Enrol, Unattested
from tests.coordinator.test_release import SETTINGS, sign

BY = "operator alice, token 12345678"


def write(store, *statements):
    """Change rows behind the coordinator's back."""
    with store.database._engines.writer.begin() as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture
def log(store):
    """A log of nine entries."""
    for number in range(9):
        with store.database.writing() as records:
            records.audit.append(BY, Action.TASK_PAUSED, f"task {number}")
    return store.audit(0)


@pytest.mark.every_engine
def test_what_operators_tokens_and_devices_do_is_in_the_log(store, register, tmp_path):
    token, _ = issue(store.database, "alice", Role.OPERATOR)
    task = register()
    store.pause(task, BY)
    store.roll_back(task, 0, BY)
    store.resume(task, BY)
    store.model(task, None, BY)
    store.model(task, 0, BY)
    store.cancel(task, BY)
    registry = Registry(store, Attestation.of(True, None), lambda: None)
    for _ in range(2):
        device = registry.enrol(Enrol(attestation=Unattested()), "ed25519:AAAA", 0).device
    for _ in range(2):
        store.revoke_device(device, BY)
    store.allow_device(device, BY)
    for _ in range(2):
        revoke(store.database, token.id)
    here, found = "an operator on the store", store.audit(0)
    assert [(one.actor, one.action, one.subject) for one in found] == [
        (here, "token-made", token.id),
        (here, "task-created", task),
        (BY, "task-paused", task),
        (BY, "task-rolled-back", task),
        (BY, "task-resumed", task),
        (BY, "model-read", task),
        (BY, "model-read", task),
        (BY, "task-cancelled", task),
        ("a device", "device-enrolled", device),
        (BY, "device-revoked", device),
        (BY, "device-allowed", device),
        (here, "token-revoked", token.id),
    ]
    assert [one.detail for one in found if one.action == "model-read"] == ["the last", "round 0"]
    assert verify(found) == Head(12, found[-1].sha256)


def test_what_is_refused_leaves_no_entry(store, register):
    task = register()
    refusals = (
        lambda: store.roll_back(task, 0),
        lambda: store.revoke_device("nope"),
        lambda: store.model("nope"),
    )
    for refused in refusals:
        with pytest.raises(Exception, match=r"pause it|no device 'nope'|no task 'nope'"):
            refused()
    assert [one.action for one in store.audit()] == ["task-created"]


@pytest.mark.every_engine
@pytest.mark.parametrize("column", ["at", "actor", "action", "subject", "detail", "sha256"])
def test_changed_row_is_named(store, log, column):
    value = 5.0 if column == "at" else "changed"
    write(store, sqlalchemy.update(AUDIT).where(AUDIT.c.number == 4).values({column: value}))
    with pytest.raises(BrokenAudit, match="entry 4 of the audit log was changed"):
        verify(store.audit(0))


def test_removed_row_is_named(store, log):
    write(store, sqlalchemy.delete(AUDIT).where(AUDIT.c.number == 4))
    with pytest.raises(BrokenAudit, match="entry 4 of the audit log is missing"):
        verify(store.audit(0))


def test_rows_that_changed_places_are_named(store, log):
    here = AUDIT.c.number
    moves = [(4, -1), (5, 4), (-1, 5)]
    write(store, *(sqlalchemy.update(AUDIT).where(here == old).values(number=new) for old, new in moves))
    with pytest.raises(BrokenAudit, match="entry 4 of the audit log was changed or moved"):
        verify(store.audit(0))


def test_log_that_was_cut_or_made_anew_is_found_by_a_saved_head(store, log):
    saved = Head.parse(f"{verify(log)}\n")
    assert verify(store.audit(0), saved) == saved
    write(store, sqlalchemy.delete(AUDIT).where(AUDIT.c.number >= 7))
    assert verify(store.audit(0)).number == 6
    with pytest.raises(BrokenAudit, match="entry 7 of the audit log is missing, and all after it"):
        verify(store.audit(0), saved)
    for number in range(4):
        with store.database.writing() as records:
            records.audit.append("nobody", Action.TASK_PAUSED, f"made up {number}")
    assert verify(store.audit(0)).number == 10
    with pytest.raises(BrokenAudit, match="entry 9 of the audit log is not the one of the saved head"):
        verify(store.audit(0), saved)


@pytest.mark.parametrize("text", ["", "x", "12", "-1:ab", "9" * 30 + ":ab"])
def test_text_that_is_no_head_is_refused(log, text):
    with pytest.raises(BrokenAudit):
        verify(log, Head.parse(text))


@pytest.mark.every_engine
def test_many_writers_at_once_make_one_chain(store):
    def write_some(who):
        for number in range(10):
            with store.database.writing() as records:
                records.audit.append(who, Action.MODEL_READ, str(number))

    writers = [threading.Thread(target=write_some, args=(f"writer {number}",)) for number in range(4)]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    assert verify(store.audit(0)).number == 40
    assert [one.number for one in store.audit(limit=3)] == [38, 39, 40]


ITS_TASK = SimpleNamespace(id="its task", settings=SimpleNamespace(population="phones"))


def test_tasks_that_need_somebody_are_found_and_no_others():
    found = of_tasks((ITS_TASK, Progress("t", reason, "so it is", reason.stalled)) for reason in Reason)
    assert {one.task.id for one in found} == {"its task"}
    assert all(one.remedy for one in found)
    # One is paused as its operator wants it.
    assert {one.kind for one in found} == {reason for reason in Reason if reason.stalled} - {Reason.PAUSED}


def test_a_long_exception_makes_no_event_that_a_receiver_refuses():
    (found,) = of_tasks([(ITS_TASK, Progress("t", Reason.DIVERGED, "paused: " + "x" * 10**6, True))])
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
