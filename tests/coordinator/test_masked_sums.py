"""Secure rounds whose masked reports come to several replicas: each sums its own, and the driver adds the sums."""

from __future__ import annotations

import hashlib
import signal
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.failpoints import VARIABLE
from coordinator.rules.states import AssignmentState, TaskState
from coordinator.store.tasks import Secagg
from fedcore.masking import layout_hash, model_hash, summed_values
from fedcore.signing import key_text
from secagg.client import Client, SessionInput
from secagg.client_state import AggregationPolicy
from secagg.encoding import MessageType
from secagg.keys import issue
from tests.coordinator.bundles import START, report_values
from tests.coordinator.conftest import AUTHORITY, AUTHORITY_KEY, PEM
from tests.coordinator.devices import speaking_to
from tests.coordinator.replicas import replicas_on, until
from tests.coordinator.test_api import assign, refused
from tests.coordinator.test_secure import BOUNDS, NEVER, PHASES, PLAN, Device, public, run
from tests.coordinator.test_secure_api import hear, say

NAMES = [f"d{number}" for number in range(10)]
SECURE = {"goal": 10, "minimum": 8, "rounds": 1}
SECURE |= {"secagg": Secagg(clip_norm=4.0, max_examples=10, phase_s=60.0)}
WAITING = SECURE | {"secagg": Secagg(clip_norm=4.0, max_examples=10, phase_s=12.0)}
"""Where half of a phase is waited for a sum."""
STEP = 2 * 4.0 / (2**20 - 1) * 10 / 2


class Phone(Device):
    """One seat of a secure round over HTTP. Its masked report goes to the replica `upload_at`, and all else `at`."""

    def __init__(self, at, given, number):
        self.at = self.upload_at = at
        self.given, self.delta = given, [number / 16, -number / 32, 0, 1]
        self.vector = summed_values(PLAN.report, BOUNDS, report_values(self.delta, 2, 0.0, PLAN))
        identity, id_ = Ed25519PrivateKey.generate(), bytes.fromhex(at.devices.owner(given.assignment).signer.keyid)
        policy = AggregationPolicy(given.server.current, AUTHORITY_KEY, 8)
        held = model_hash(given.plan, given.checkpoint), layout_hash(PLAN.report, given.seed)
        brought = SessionInput(self.vector, 2, *held, issue(AUTHORITY, public(identity), id_, NEVER))
        self.client, self.said = Client(identity, policy, brought), {}

    def say(self, number, message):
        self.said[number] = message
        answer = self.send(number, self.upload_at if number == MessageType.MASKED else self.at)
        assert answer.status_code in (200, 204), answer.text

    def send(self, number, at):
        """Say again what it said, until there is an answer that is final."""
        return final(lambda: say(at, self.given.assignment, number, self.said[number]))

    def hear(self, number, wait_s=9):
        answer = hear(self.at, self.given.assignment, number, wait_s)
        assert answer.status_code == 200, answer.text
        return answer.content

    def mask(self):
        """M7, which is not sent."""
        self.said[7] = self.client.receive(self.hear(6)).message
        return self.said[7]


def final(ask):
    """The answer to a request that is made again while it is unavailable."""
    deadline = time.monotonic() + 10
    while (answer := ask()).status_code == 503:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)
    return answer


@pytest.fixture
def replicas(coordinators, store, database, tmp_path):
    (tmp_path / "keys.lineage").write_bytes(PEM)
    with replicas_on(coordinators, tmp_path, store, database) as started:
        yield started


@contextmanager
def world(replicas, store, *environments):
    """Ten phones that have opened their shares; the clients of the driver, and of a replica for each environment."""
    settings = {"authority": key_text(AUTHORITY_KEY), "authority_url": "https://authority.example"}
    settings |= {"lease_s": 30, "silence_s": 60}  # a busy machine holds up a driver and silent phones
    driver = replicas.start(**settings)
    until(replicas.holder)
    others = [replicas.start(environment, role="api", **settings) for environment in environments]
    with ExitStack() as stack:
        here = stack.enter_context(speaking_to(driver.url))
        there = [stack.enter_context(speaking_to(one.url, devices=here.devices)) for one in others]
        phones = [Phone(here, given, number) for number, given in enumerate(assign(here, *NAMES))]
        run(phones, PHASES[:3])
        yield here, there, others, phones


def finish(store, task, phones):
    """Let these phones do their part after their masked reports, and the task be completed."""
    run(phones, PHASES[4:])
    until(lambda: store.task(task).state is TaskState.COMPLETED)


def expect_sum_of(store, task, phones):
    """The model is the mean of exactly these, and they have receipts, and no other phone."""
    expected = START + np.mean([phone.delta for phone in phones], axis=0)
    np.testing.assert_allclose(store.checkpoint(task, 1)["params"], expected, atol=STEP)
    (done,) = [one for one in store.rounds(task) if one.state.value == "committed"]
    counted = {one.id: one.report_sha256 for one in store.cohort(task, 1) if one.state is AssignmentState.REPORTED}
    assert counted == {phone.given.assignment: hashlib.sha256(phone.said[7]).hexdigest() for phone in phones}
    assert done.reported == len(phones)
    assert all(phone.result().summed for phone in phones)


@pytest.mark.every_engine
def test_masked_reports_at_three_replicas_are_in_one_sum(store, register, replicas):
    task = register(**SECURE)
    with world(replicas, store, {}, {}) as (here, there, _, phones):
        for number, phone in enumerate(phones):
            phone.upload_at = [here, *there][number % 3]
            phone.upload()
        finish(store, task, phones)
        expect_sum_of(store, task, phones)
    assert len(store.rounds(task)) == 1


def test_masked_report_that_comes_again_elsewhere_is_in_the_sum_once(store, register, replicas):
    task = register(**SECURE)
    with world(replicas, store, {}, {}) as (here, there, _, phones):
        first, *others = phones
        first.upload_at = there[0]
        first.upload()
        for at in (there[1], here, there[0], there[1]):
            assert first.send(7, at).status_code == 204
            another = first.said[7][:-1] + bytes([first.said[7][-1] ^ 1])
            refused(
                final(lambda at=at, message=another: say(at, first.given.assignment, 7, message)), "conflicting-report"
            )
        run(others, ["upload"])
        assert first.send(7, there[1]).status_code in (200, 204)
        finish(store, task, phones)
        expect_sum_of(store, task, phones)


def test_masked_report_that_is_false_or_anothers_is_added_nowhere(store, register, replicas):
    task = register(**SECURE)
    with world(replicas, store, {}) as (_, (there,), _, phones):
        first, second, *others = phones
        message, owners = first.mask(), there.devices.of
        altered = message[:-1] + bytes([message[-1] ^ 1])
        refused(final(lambda: say(there, first.given.assignment, 7, altered)), "unusable-message")
        refused(say(there, first.given.assignment, 7, bytes(100_000)), "too-large")
        forged = f"{first.given.assignment[:-1]}-"
        owner, owners[first.given.assignment] = owners[first.given.assignment], owners[second.given.assignment]
        owners[forged] = owner
        refused(say(there, first.given.assignment, 7, message), "foreign-assignment")
        refused(say(there, forged, 7, message), "unknown-assignment")
        owners[first.given.assignment] = owner
        assert first.send(7, there).status_code == 204
        run([second, *others], ["upload"])
        finish(store, task, phones)
        expect_sum_of(store, task, phones)


@pytest.mark.every_engine
def test_replica_that_dies_before_the_set_is_announced_loses_its_devices(store, register, replicas):
    task = register(**WAITING)
    with world(replicas, store, {}) as (here, (there,), (other,), phones):
        lost, *rest = phones
        lost.upload_at = there
        run([lost, *rest[1:]], ["upload"])
        assert lost.send(7, here).status_code == 204  # the driver has heard of it
        replicas.kill(other)
        run(rest[:1], ["upload"])
        finish(store, task, rest)
        refused(hear(lost.at, lost.given.assignment, 8), "no-longer-needed")
        expect_sum_of(store, task, rest)


def test_attempt_without_enough_devices_of_others_ends_as_replica_lost(store, register, replicas):
    task = register(**WAITING | {"minimum": 10})
    with world(replicas, store, {}) as (here, (there,), (other,), phones):
        phones[0].upload_at = there
        run(phones[:-1], ["upload"])
        assert phones[0].send(7, here).status_code == 204  # the driver has heard of it
        replicas.kill(other)
        run(phones[-1:], ["upload"])
        until(lambda: store.rounds(task)[0].reason)
    assert store.rounds(task)[0].reason == "replica-lost"
    assert {one.state for one in store.cohort(task, 1)} & {AssignmentState.REPORTED} == set()


@pytest.mark.parametrize("failpoint", ["masked.before-hand-over", "masked.after-hand-over"])
@pytest.mark.every_engine
def test_replica_that_dies_at_its_hand_over_is_in_the_sum_or_not(store, register, replicas, failpoint):
    task = register(**WAITING)
    with world(replicas, store, {VARIABLE: failpoint}) as (_, (there,), (other,), phones):
        for phone in phones[:2]:
            phone.upload_at = there
        run(phones, ["upload"])
        other.ended()
        replicas.alive.remove(other)
        counted = phones[2:] if failpoint == "masked.before-hand-over" else phones
        finish(store, task, counted)
        expect_sum_of(store, task, counted)


def test_replica_that_is_told_to_stop_costs_no_masked_report(store, register, replicas):
    task = register(**SECURE)
    with world(replicas, store, {}) as (_, (there,), (other,), phones):
        first, *others = phones
        first.upload_at = there
        first.upload()
        other.signal(signal.SIGTERM)
        other.ended()
        replicas.alive.remove(other)
        run(others, ["upload"])
        finish(store, task, phones)
        expect_sum_of(store, task, phones)
