"""The audit log has what operators, tokens and devices did, and shows whoever changed it behind their backs."""

from __future__ import annotations

import threading

import pytest
import sqlalchemy

from authority.attestation import Attestation
from coordinator.api.service import Registry
from coordinator.api.tokens import issue, revoke
from coordinator.errors import BrokenAudit
from coordinator.rules.audit import Action, Head, verify
from coordinator.rules.entities import Role
from coordinator.store.tables import AUDIT
from fedcore.wire.messages import Enrol, Unattested

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
