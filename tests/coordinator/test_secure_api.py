"""Secure rounds over HTTP: their messages, beacons, and unmasking."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import Future
from time import monotonic

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from coordinator.errors import BeaconUnavailable, NoLongerNeeded
from coordinator.keys import Keys
from coordinator.secure.group import Unmasker
from coordinator.store.tasks import Secagg
from fedcore.masking import layout_hash, model_hash
from fedcore.wire import messages
from fedcore.wire.messages import Accepted, Enrolled, SecaggParties
from secagg.client import Client, SessionInput
from secagg.client_state import AggregationPolicy
from secagg.errors import BadSignature, UnmaskCheckFailed
from secagg.keys import check_credential, issue
from secagg.messages import Invite, Roster
from secagg.packing import PackedSegment
from tests.coordinator.bundles import START, make_plan
from tests.coordinator.conftest import AUTHORITY, PEM, Desk, draw_at_once
from tests.coordinator.devices import enrol
from tests.coordinator.test_api import assign, check_in, put, refused, report_body
from tests.coordinator.test_secure import NEVER, PHASES, SECURE, public, run, seat, states
from tests.secagg.cohort import Cohort, integers, invitation

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


BEACON_NAMES = [f"e{number:02}" for number in range(65)]
DRAWN = {
    "goal": 65, "minimum": 60, "secagg": Secagg(clip_norm=4.0, max_examples=10, phase_s=5.0, bits=16), "rounds": 1
}  # fmt: skip


class Authority:
    """Draws that are answered when the test says so."""

    def __init__(self):
        self.asked = []

    def __call__(self, wanted):
        self.asked.append((wanted, Future()))
        return self.asked[-1][1]


@pytest.fixture
def authority():
    return Authority()


def test_a_round_waits_for_its_beacon_and_others_go_on(store, register, authority):
    task = register(**DRAWN)
    desk = Desk(store, draw=authority)
    devices = seat(desk, BEACON_NAMES)
    run(devices, PHASES[:1])
    ((wanted, future),) = authority.asked
    desk.pass_time(6)
    assert (states(store, task), devices[0].hear(2)) == (["reporting"], None)
    assert isinstance(desk.arrive("another"), Accepted)
    beacon = draw_at_once(wanted).result()
    future.set_result(beacon)
    desk.turn()
    found = Roster.decode(devices[0].hear(2), Invite.decode(wanted.invitation)[0].hash, 65)
    assert (found.n, found.k, found.beacon) == (65, wanted.neighbours, beacon)
    run(devices, PHASES[1:])
    assert states(store, task) == ["committed"]
    np.testing.assert_allclose(store.checkpoint(task, 1)["params"], START + np.array([0.5, -0.25, 0, 1]), atol=0.01)


@pytest.mark.security("draws the beacon … once for a device under an invitation")
@pytest.mark.parametrize(
    ("answer", "reason"),
    [(BeaconUnavailable("nobody is there"), "no-beacon"), (bytes(64), "secagg-failed")],
    ids=["unreachable", "another's"],
)
def test_a_round_without_a_beacon_of_the_authority_is_abandoned(store, register, authority, answer, reason):
    task = register(**DRAWN)
    desk = Desk(store, draw=authority)
    devices = seat(desk, BEACON_NAMES)
    run(devices, PHASES[:1])
    ((_, future),) = authority.asked
    if isinstance(answer, bytes):
        future.set_result(answer)
    else:
        future.set_exception(answer)
    desk.turn()
    assert [one.reason for one in store.rounds(task)][:1] == [reason]
    with pytest.raises(NoLongerNeeded):
        devices[0].hear(2)


def make_work(seed=0):
    """What is left to do of a session of nine, of whom one left after it shared."""
    vectors = {slot: vector / 256 for slot, vector in integers(range(10, 19), 10_001, seed).items()}
    cohort = Cohort(9, invitation(segments=(PackedSegment(10_001, 21, 8, -0.3, 0.7),), min_sum=8), vectors=vectors)
    cohort.reveal(cohort.confirm(cohort.upload(cohort.share(cohort.advertise()), without=(11,))))
    return cohort.server.advance().unmasking


@pytest.fixture
def unmasker():
    others, made = multiprocessing.active_children(), Unmasker()
    yield made
    made.close()
    assert set(multiprocessing.active_children()) <= set(others)


def test_processes_give_the_same_bits_and_survive_a_death(unmasker):
    others, work = multiprocessing.active_children(), make_work()
    expected = work.run()
    for _ in range(2):
        found = unmasker(work).result(timeout=30)
        assert (found.digest, found.total.weight) == (expected.digest, expected.total.weight)
        np.testing.assert_array_equal(found.total.sums, expected.total.sums)
        for worker in set(multiprocessing.active_children()) - set(others):
            os.kill(worker.pid, signal.SIGKILL)


def test_a_refusal_of_another_process_is_the_refusal_that_it_was(unmasker):
    work = make_work()
    work.words[3] += 1
    with pytest.raises(UnmaskCheckFailed):
        unmasker(work).result(timeout=30)


PARENT = textwrap.dedent("""
    import multiprocessing, time
    from coordinator.secure.group import Unmasker
    from tests.coordinator.test_secure_api import make_work

    if __name__ == "__main__":
        unmasker = Unmasker()
        unmasker(make_work()).result()
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        time.sleep(60)
""")


def test_processes_end_when_their_coordinator_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        workers = [int(word) for word in parent.stdout.readline().split()]
        assert workers
        parent.kill()
    until = time.monotonic() + 10
    while any(_lives(worker) for worker in workers):
        assert time.monotonic() < until
        time.sleep(0.01)


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False
