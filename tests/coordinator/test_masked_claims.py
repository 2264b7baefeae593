"""Claims of replicas to masked reports, and the sums that a secure round waits for, on a clock that the test moves."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from coordinator.commands import ExchangeMasked
from coordinator.errors import ConflictingReport, MalformedMessage, NoLongerNeeded, Unavailable
from coordinator.rules import replicas
from coordinator.rules.states import AssignmentState
from secagg.session import ExpectedVector, MaskedSum, no_words
from tests.coordinator.test_secure import LENIENT, NAMES, PHASES, run, seat, states
from tests.coordinator.test_secure_groups import COHORT, DIVIDED, mean_of, seat_all

TEN = [*NAMES, "d8", "d9"]
STEP = 2 * 4.0 / (2**20 - 1) * 10 / 2


class Elsewhere:
    """A replica that adds masked reports for the driver at a desk."""

    def __init__(self, desk, name):
        self.desk, self.name, self.grants, self.sums, self.taken = desk, name, {}, {}, {}

    def tell(self, claims=(), checking=(), shares=(), sums=()):
        news = replicas.MaskedNews(replica=self.name, claims=list(claims), checking=list(checking), shares=list(shares))
        news, sums = replicas.decode_news(memoryview(replicas.encode_news(news, sums)))
        return self.desk.ask(ExchangeMasked(news, sums))

    def claim(self, device, message=None):
        """The driver's answer to a claim to the masked report of a device."""
        message = message or upload_of(device)
        claim = replicas.Claim(assignment=device.given.assignment, sha256=hashlib.sha256(message).hexdigest())
        (outcome,) = self.tell([claim], checking=[claim.assignment]).outcomes
        return outcome

    def add(self, *devices):
        """Claim and add masked reports, and tell the driver."""
        for device in devices:
            self.add_granted(self.claim(device), device)

    def add_granted(self, grant, device):
        """Add the masked report of a claim, and tell the driver."""
        self.grants[grant.session] = grant
        total = self.sums.setdefault(grant.session, MaskedSum(no_words(grant.words)))
        masked = ExpectedVector(grant.session, grant.position, grant.signer, grant.words).open(upload_of(device))
        total.add(grant.position, masked)
        taken = replicas.Taken(assignment=device.given.assignment, signature=masked.signature)
        self.taken.setdefault(grant.session, []).append(taken)
        self.tell(shares=self.shares())

    def shares(self, *, with_sums=False, count=0):
        return [
            replicas.MaskedShare(
                round=self.grants[session].round,
                session=session,
                taken=self.taken[session],
                count=count or len(self.taken[session]),
                size=total.words.size if with_sums else 0,
            )
            for session, total in self.sums.items()
        ]

    def hand_over(self, **given):
        return self.tell(
            shares=self.shares(with_sums=True, **given), sums=[total.words for total in self.sums.values()]
        )


def upload_of(device):
    """M7 of a device, the same at every call."""
    if 7 not in device.said:
        device.said[7] = device.client.receive(device.hear(6)).message
    return device.said[7]


@pytest.fixture
def seated(register, desk):
    """Ten devices before their masked reports, of which eight are enough, and two replicas."""
    task = register(**LENIENT)
    devices = seat(desk, TEN, {name: [number / 16, -number / 32, 0, 1] for number, name in enumerate(TEN)})
    run(devices, PHASES[:3])
    return task, devices, Elsewhere(desk, "aaaaaaaa"), Elsewhere(desk, "bbbbbbbb")


def expect_sum_of(store, task, devices):
    assert states(store, task) == ["committed"]
    np.testing.assert_allclose(store.checkpoint(task, 1)["params"], mean_of(devices), atol=STEP)
    counted = {one.id for one in store.cohort(task, 1) if one.state is AssignmentState.REPORTED}
    assert counted == {device.given.assignment for device in devices}
    assert store.rounds(task)[0].reported == len(devices)


@pytest.mark.every_engine
def test_sums_of_two_replicas_and_the_driver_make_the_round(store, seated):
    task, devices, a, b = seated
    a.add(*devices[:3])
    b.add(*devices[3:7])
    run(devices[7:], PHASES[3:4])
    assert devices[0].hear(8) is None
    assert a.tell().wanted == list(a.sums)
    assert a.hand_over().over == list(a.sums)
    assert devices[0].hear(8) is None
    b.hand_over()
    run(devices, PHASES[4:])
    expect_sum_of(store, task, devices)
    assert a.tell(shares=a.shares()).over == list(a.sums)


def test_one_replica_at_a_time_may_add_a_masked_report(seated):
    _, (device, *_), a, b = seated
    assert isinstance(a.claim(device), replicas.Grant)
    assert isinstance(a.claim(device), replicas.Grant)
    assert b.claim(device).slug == "unavailable"
    with pytest.raises(Unavailable):
        device.say(7, upload_of(device))
    a.tell(checking=[device.given.assignment])
    assert b.claim(device).slug == "unavailable"
    a.tell()
    assert isinstance(b.claim(device), replicas.Grant)


def test_masked_report_that_was_added_is_claimed_no_more(seated):
    _, (device, other, *_), a, b = seated
    a.add(device)
    for replica in (a, b):
        assert replica.claim(device) is None
        assert replica.claim(device, b"another").slug == "conflicting-report"
    device.say(7, upload_of(device))
    with pytest.raises(ConflictingReport):
        device.say(7, b"another")
    other.say(7, upload_of(other))
    assert a.claim(other) is None


def test_claims_are_refused_before_and_after_masked_reports_are_due(register, desk):
    register(**LENIENT)
    devices, a = seat(desk, TEN), Elsewhere(desk, "aaaaaaaa")
    assert a.claim(devices[0], b"early") == replicas.Denial(slug="unusable-message", detail="message M7 is not due yet")
    run(devices[1:], PHASES[:1])
    desk.pass_time(600)
    assert a.claim(devices[0], b"late").slug == "no-longer-needed"
    (outcome,) = a.tell([replicas.Claim(assignment="of.nobody", sha256="")]).outcomes
    assert outcome.slug == "no-longer-needed"


def test_sum_that_is_handed_over_twice_is_taken_once(store, seated):
    task, devices, a, _ = seated
    a.add(*devices[:2])
    a.hand_over()
    a.hand_over()
    assert a.claim(devices[2], b"more").slug == "unavailable"  # it stops, or it would not have handed over yet
    run(devices[2:], PHASES[3:4])
    run(devices, PHASES[4:])
    expect_sum_of(store, task, devices)


@pytest.mark.parametrize("fault", ["of more reports", "of fewer words"])
def test_sum_of_other_reports_than_were_told_of_is_given_up(store, seated, fault):
    task, devices, a, b = seated
    a.add(*devices[:2])
    b.add(devices[2])
    (session,) = a.sums
    if fault == "of fewer words":
        a.sums[session].words = a.sums[session].words[:-1]
    assert a.hand_over(count=3 if fault == "of more reports" else 2).over == [session]
    with pytest.raises(NoLongerNeeded):
        devices[0].hear(8)
    run(devices[3:], PHASES[3:4])
    b.hand_over()
    run(devices[2:], PHASES[4:])
    expect_sum_of(store, task, devices[2:])


def test_sum_that_does_not_come_costs_its_devices_and_no_extra_time(store, seated, desk):
    task, devices, a, b = seated
    a.add(devices[0])
    b.add(devices[1])
    run(devices[2:], PHASES[3:4])
    b.hand_over()
    desk.pass_time(2.4)
    assert devices[2].hear(8) is None
    desk.pass_time(0.2)
    with pytest.raises(NoLongerNeeded):
        devices[0].hear(8)
    assert a.hand_over().over == list(a.sums)
    run(devices[2:], PHASES[4:5])
    desk.pass_time(2.3)
    assert devices[2].hear(10) is None
    desk.pass_time(0.2)  # 5 s after the last masked report: the phase is over without devices[1]
    run(devices[2:], PHASES[5:])
    desk.pass_time(5)
    expect_sum_of(store, task, devices[1:])


def test_devices_without_which_there_are_too_few_were_lost_with_a_replica(store, seated, desk):
    task, devices, a, _ = seated
    a.add(*devices[:3])
    run(devices[3:], PHASES[3:4])
    desk.pass_time(2.5)
    assert [one.reason for one in store.rounds(task)] == ["replica-lost"]


def test_claim_that_came_to_nothing_holds_no_sum_up_once_it_is_given_back(store, seated, desk):
    task, devices, a, _ = seated
    a.claim(devices[0])
    run(devices[1:], PHASES[3:4])
    desk.pass_time(5)
    assert devices[1].hear(8) is None
    assert a.tell(checking=[devices[0].given.assignment]).wanted
    assert a.claim(devices[0]).slug == "no-longer-needed"
    assert a.tell().wanted == []
    assert devices[1].hear(8) is not None
    run(devices[1:], PHASES[4:])
    expect_sum_of(store, task, devices[1:])


@pytest.mark.parametrize("leave", ["gives up", "is lost"])
def test_device_that_leaves_while_its_report_is_added_stays_in_the_sum(store, seated, desk, leave):
    task, (device, *others), a, _ = seated
    granted = a.claim(device)
    if leave == "gives up":
        with pytest.raises(ConflictingReport):
            desk.give_up(device.given)
    else:
        desk.driver.presence.give_up(device.given.assignment)
        desk.pass_time(0.5)
    a.add_granted(granted, device)
    a.hand_over()
    run(others, PHASES[3:])
    expect_sum_of(store, task, [device, *others])


def test_replica_sums_every_group_apart(store, register, desk):
    task = register(**DIVIDED)
    devices, groups = seat_all(desk)
    run(devices, PHASES[1:3])
    a = Elsewhere(desk, "aaaaaaaa")
    a.add(*groups[0][:5], *groups[1])
    assert [len(one) for one in a.taken.values()] == [5, len(groups[1])]
    assert a.tell().wanted == []
    run(groups[0][5:], PHASES[3:4])
    assert sorted(a.tell().wanted) == sorted(a.sums)
    a.hand_over()
    run(devices, PHASES[4:])
    expect_sum_of(store, task, devices)
    assert store.rounds(task)[0].reported == COHORT


@pytest.mark.parametrize("cut", [0, 3, 4, -1, -8])
def test_masked_sum_that_is_cut_off_is_refused(cut):
    share = replicas.MaskedShare(round=1, session=bytes(32), taken=[], count=1, size=3)
    news = replicas.MaskedNews(replica="a", claims=[], checking=[], shares=[share])
    whole = replicas.encode_news(news, [np.array([1, 2, 2**64 - 1], np.uint64)])
    assert replicas.decode_news(memoryview(whole))[1][0].tolist() == [1, 2, 2**64 - 1]
    with pytest.raises(MalformedMessage, match="these shares"):
        replicas.decode_news(memoryview(whole[:cut]))
    with pytest.raises(MalformedMessage, match="this answer"):
        replicas.decode_answer(b"[]")
