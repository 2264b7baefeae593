"""Secure rounds over HTTP: addresses, bodies, waits and refusals. What they mean: test_secure.py."""

from __future__ import annotations

from time import monotonic

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from coordinator.keys import Keys
from fedcore.masking import layout_hash, model_hash
from fedcore.wire import messages
from fedcore.wire.messages import Enrolled, SecaggParties
from secagg.client import Client, SessionInput
from secagg.client_state import AggregationPolicy
from secagg.errors import BadSignature
from secagg.keys import check_credential, issue
from tests.coordinator.bundles import make_plan
from tests.coordinator.conftest import AUTHORITY, PEM
from tests.coordinator.devices import enrol
from tests.coordinator.test_api import assign, check_in, put, refused, report_body
from tests.coordinator.test_secure import NEVER, SECURE, public

NAMES = [f"d{number}" for number in range(8)]


def parties(client):
    """The parties of secure rounds, as a fresh device hears of them."""
    return messages.decode(enrol(client, Ed25519PrivateKey.generate()).content, Enrolled).secagg


def vouched(client, identity, owner):
    """The parties that a device hears of, and its credential for a key; `owner` signs for it."""
    return parties(client), issue(AUTHORITY, public(identity), bytes.fromhex(owner.signer.keyid), NEVER)


def say(client, assignment, number, message, wait_s=0):
    headers = {"Prefer": f"wait={wait_s}"}
    owner = client.devices.owner(assignment)
    return client.put(f"/v1/assignments/{assignment}/secagg/{number}", content=message, headers=headers, auth=owner)


def hear(client, assignment, number, wait_s=0):
    headers, owner = {"Prefer": f"wait={wait_s}"}, client.devices.owner(assignment)
    return client.get(f"/v1/assignments/{assignment}/secagg/{number}", headers=headers, auth=owner)


def advertisement(client, given, owner=None):
    identity = Ed25519PrivateKey.generate()
    enrolled, credential = vouched(client, identity, owner or client.devices.owner(given.assignment))
    held = model_hash(given.plan, given.checkpoint), layout_hash(make_plan().report, given.seed)
    brought = SessionInput(np.zeros(8, np.float32), 1, *held, credential)
    device = Client(identity, AggregationPolicy(given.server.current, enrolled.authority, 8), brought)
    return device.receive(given.secagg).message


def test_a_device_hears_who_the_parties_of_secure_rounds_are(client, tmp_path):
    server = Keys.load(tmp_path / "keys").server.succession
    assert parties(client) == SecaggParties(server, public(AUTHORITY), "https://authority.example")


def test_a_device_cannot_take_part_with_the_credential_of_another(register, client):
    register(**SECURE)
    first, second, *_ = assign(client, *NAMES)
    stolen = advertisement(client, first, client.devices.owner(second.assignment))
    refused(say(client, first.assignment, 1, stolen), "unusable-message")
    assert say(client, first.assignment, 1, advertisement(client, first)).status_code == 204


@pytest.mark.security("it cannot make up devices that others take for real")
def test_the_coordinator_has_no_key_that_could_enrol_a_device(client, tmp_path):
    kept = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) > 1
    assert not any(AUTHORITY.private_bytes_raw() in data for data in kept)
    identity = public(Ed25519PrivateKey.generate())
    for own in (Keys.load(tmp_path / "keys").server.private, load_pem_private_key(PEM, None)):
        with pytest.raises(BadSignature):
            check_credential(public(AUTHORITY), identity, issue(own, identity, bytes(16), NEVER), 0)


def test_a_message_is_answered_with_the_next_when_all_have_spoken(register, client):
    register(**SECURE)
    given = assign(client, *NAMES)
    first, *others = [(one.assignment, advertisement(client, one)) for one in given]
    assert say(client, first[0], 1, first[1]).status_code == 204
    assert say(client, first[0], 1, first[1]).status_code == 204
    refused(say(client, first[0], 1, b"\1another"), "conflicting-report")
    refused(say(client, first[0], 3, b"\3early"), "unusable-message")
    for assignment, message in others:
        last = say(client, assignment, 1, message, wait_s=0 if assignment != others[-1][0] else 4)
    assert (last.status_code, last.headers["content-type"], last.content[0]) == (200, "application/octet-stream", 2)
    assert hear(client, first[0], 2).content[0] == 2


def test_a_wait_for_a_message_lasts_as_long_as_was_asked_for(register, client):
    register(**SECURE)
    given = assign(client, *NAMES)
    started = monotonic()
    assert hear(client, given[0].assignment, 2, wait_s=1).status_code == 204
    assert monotonic() - started > 0.9


def test_only_assignments_of_secure_rounds_have_messages(register, client):
    register(goal=1)
    (plain,) = assign(client, "a")
    assert plain.secagg is None
    refused(hear(client, plain.assignment, 2), "no-longer-needed")
    refused(say(client, plain.assignment, 7, b"\7"), "no-longer-needed")
    refused(hear(client, "nobody", 2), "unknown-assignment")
    refused(say(client, "nobody", 1, b"\1"), "unknown-assignment")
    refused(hear(client, "nobody", "two"), "malformed-message")


@pytest.mark.security("The coordinator sees each report … unless the task asks for secure aggregation")
def test_a_secure_round_takes_no_clear_report_and_no_large_message(register, client):
    register(**SECURE)
    given = assign(client, *NAMES)
    refused(put(client, given[0].assignment, report_body([1, 0, 0, 0], 1)), "invalid-report")
    refused(say(client, given[0].assignment, 1, bytes(4096)), "too-large")
    assert msgspec.json.decode(check_in(client, "late").content)["outcome"] == "accepted"
