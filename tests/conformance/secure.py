"""Scenarios under secure aggregation: a whole sum, devices that stop, and coordinators that lie."""

import threading
from dataclasses import replace

from msgspec.structs import replace as replace_struct

from fedcore.masking import session_number
from fedcore.succession import Succession
from tests.conformance.promises import ended, promise
from tests.device_runtime.coordinator import refusal
from tests.device_runtime.test_bound_fields import SEED, offer_coded
from tests.device_runtime.test_noisy_rounds import offer_noisy
from tests.device_runtime.test_secure import (
    BOUNDS,
    LINEAGE,
    RELEASE,
    ROUND,
    SEGMENTS,
    SERVER,
    Aggregator,
    invitation,
    issuing,
    parties,
    private,
    public,
    releasing,
    terms,
)

TRUST = {"signers": [RELEASE.signer]}
SAYS = [1, 3, 5, 7, 9, 11]


def invite(coordinator):
    """Have a coordinator invite the device to a secure round with eight others."""
    coordinator.invite, coordinator.release = invitation(), releasing()
    coordinator.parties, coordinator.issue = parties(), issuing()
    coordinator.server, coordinator.round = Succession(public(SERVER)), ROUND
    coordinator.aggregate = Aggregator(terms(coordinator.plan, coordinator.checkpoint)).answer


def said(coordinator):
    """The numbers of the messages that the device sent."""
    return [number for number, _ in coordinator.said]


@promise("8", "a device takes part in a secure sum to its end, and sends nothing in the clear", brief=True)
def sums_securely(coordinator, device):
    invite(coordinator)
    ended(device.session(**TRUST), "reported")
    assert (said(coordinator), coordinator.reports) == (SAYS, [])


@promise("8", "a device that revealed shares joins no other attempt at the round: already-revealed")
def joins_no_second_sum(coordinator, device):
    invite(coordinator)
    ended(device.session(**TRUST), "reported")
    coordinator.attempt, coordinator.invite = 2, invitation(round=session_number(ROUND, 2))
    ended(device.session(**TRUST), "aborted", "already-revealed")
    assert said(coordinator) == SAYS


def _stopped_at(number):
    def stops(coordinator, device):
        invite(coordinator)
        reached, over = threading.Event(), threading.Event()
        aggregate, answers = coordinator.aggregate, {}

        def listen(at, message):
            if at not in answers:
                answers[at] = aggregate(at, message)
            if at == number and not reached.is_set():
                reached.set()
                over.wait(60)
            return answers[at]

        coordinator.aggregate, coordinator.hear = listen, lambda at: answers[at - 1]
        device.killed_when(reached, **TRUST)
        over.set()
        outcome = device.session(**TRUST)
        messages = dict(coordinator.said)
        assert all(messages[at] == message for at, message in coordinator.said), "it said something else again"
        if number < 7:
            ended(outcome, "aborted")
            assert said(coordinator) == [at for at in SAYS if at <= number]
        else:
            ended(outcome, "reported")
            assert sorted(set(said(coordinator))) == SAYS

    stops.__name__ = f"is_stopped_after_m{number}"
    fate = "gives the assignment up" if number < 7 else "says the same again, and goes on"
    return promise("8", f"a device that was stopped after M{number} {fate}")(stops)


for _number in SAYS:
    _stopped_at(_number)


@promise("8", "a state that was kept before M7 left goes on after an outage")
def goes_on_after_an_outage(coordinator, device):
    invite(coordinator)
    aggregate, heard = coordinator.aggregate, []

    def keep(number, message):
        heard.append(aggregate(number, message))
        return b"" if number == 7 else heard[-1]

    coordinator.aggregate, coordinator.hear = keep, lambda number: heard[-1]
    coordinator.faults["secagg"] = [None] * 4 + [refusal("unavailable", Retry_After="61")]
    ended(device.session(**TRUST), "failed", "unavailable")
    ended(device.session(**TRUST), "reported")
    assert said(coordinator) == SAYS


def _lies(name, what, **changes):
    def lie(coordinator, device):
        invite(coordinator)
        coordinator.invite = invitation(**changes)
        ended(device.session(**TRUST), "aborted", "secagg-refused")
        assert said(coordinator) == []

    lie.__name__ = name
    return promise(
        "8", f"{what} is refused before it trains: secagg-refused", brief=name == "refuses_another_servers_key"
    )(lie)


_lies("refuses_another_servers_key", "an invitation that another key signed", signer=private(9))
_lies("refuses_another_mode", "an invitation of an unknown mode", mode=0)
_lies("refuses_a_small_sum", "a sum over fewer devices than is safe", min_sum=7)
_lies("refuses_another_task", "an invitation for another task", task=bytes(32))
_lies("refuses_another_model", "an invitation for another model", model_hash=bytes(32))
_lies("refuses_another_layout", "an invitation for another layout", layout_hash=bytes(32))
_lies(
    "refuses_other_segments", "an invitation without clipping", segments=(replace(SEGMENTS[0], norm=0.0), *SEGMENTS[1:])
)
_lies("refuses_another_weight", "an invitation with another greatest weight", w_max=1000)
_lies("refuses_another_round", "an invitation to another round", round=session_number(ROUND + 1, 1))
_lies("refuses_another_attempt", "an invitation to another attempt", round=session_number(ROUND, 2))
_lies("refuses_a_small_roster", "a roster too small to hide in", n_max=7)
_lies("refuses_fields_without_room", "a sum that does not fit its fields", n_max=1 << 20)


@promise("8", "a device whose codecs have the seed of release and invitation takes part in a secure sum", brief=True)
def sums_coded_reports(coordinator, device):
    invite(coordinator)
    offer_coded(coordinator)
    ended(device.session(**TRUST), "reported")
    assert (said(coordinator), coordinator.reports) == (SAYS, [])


@promise("8", "a seed of codecs that is not the invitation's is refused before it trains: secagg-refused", brief=True)
def refuses_another_seed(coordinator, device):
    invite(coordinator)
    offer_coded(coordinator)
    release = releasing(seed=SEED + 1)(coordinator.plan, coordinator.checkpoint)
    coordinator.lies = {"seed": SEED + 1, "release": release}
    ended(device.session(**TRUST), "aborted", "secagg-refused")
    assert said(coordinator) == []


@promise("8", "a seed of codecs that is not the release's is refused before it trains: secagg-refused")
def refuses_an_unreleased_seed(coordinator, device):
    invite(coordinator)
    offer_coded(coordinator)
    for released in ({}, {"seed": SEED + 1}):
        coordinator.release = releasing(**released)
        ended(device.session(**TRUST), "aborted", "secagg-refused")
    assert said(coordinator) == []


@promise(
    "8", "noise is counted on from no more devices than are honest in a roster as large as invited: secagg-refused"
)
def refuses_a_roster_too_large_for_its_noise(coordinator, device):
    invite(coordinator)
    changes = offer_noisy(coordinator)
    coordinator.invite = invitation(**changes, n_max=25)
    ended(device.session(**TRUST), "aborted", "secagg-refused")
    assert said(coordinator) == []
    coordinator.attempt, again = 2, changes | {"round": session_number(ROUND, 2)}
    coordinator.invite = invitation(**again)
    coordinator.aggregate = Aggregator(terms(coordinator.plan, coordinator.checkpoint, **again)).answer
    ended(device.session(**TRUST), "reported")


@promise("8", "a release that demands a larger sum than the invitation is held to: secagg-refused")
def refuses_a_smaller_sum_than_released(coordinator, device):
    invite(coordinator)
    coordinator.release = releasing(bounds=replace_struct(BOUNDS, min_sum=9))
    ended(device.session(**TRUST), "aborted", "secagg-refused")
    assert said(coordinator) == []


@promise("8", "a coordinator that says a message again, in the place of the next one, gets no answer")
def answers_nothing_twice(coordinator, device):
    invite(coordinator)
    for attempt, number in enumerate(SAYS[:-1], start=1):
        coordinator.said.clear()
        coordinator.attempt = attempt
        coordinator.invite = invitation(round=session_number(ROUND, attempt))
        again = terms(coordinator.plan, coordinator.checkpoint, round=session_number(ROUND, attempt))
        coordinator.aggregate = Aggregator(again, repeats=number).answer
        ended(device.session(**TRUST), "aborted", "secagg-refused")
        assert said(coordinator) == [at for at in SAYS if at <= number]


@promise("8", "a roster that is damaged, or cut, is refused")
def refuses_a_damaged_roster(coordinator, device):
    for attempt, damage in enumerate(
        (lambda m: m[:-1], lambda m: m[:50] + bytes(32) + m[82:], lambda m: m[:1]), start=1
    ):
        invite(coordinator)
        coordinator.said.clear()
        coordinator.attempt = attempt
        coordinator.invite = invitation(round=session_number(ROUND, attempt))
        answer = Aggregator(
            terms(coordinator.plan, coordinator.checkpoint, round=session_number(ROUND, attempt))
        ).answer
        coordinator.aggregate = lambda number, message, answer=answer, damage=damage: damage(answer(number, message))
        ended(device.session(**TRUST), "aborted", "secagg-refused")
        assert said(coordinator) == [1]


def _unreleased(name, what, release):
    def lacks(coordinator, device):
        invite(coordinator)
        coordinator.release = release
        ended(device.session(**TRUST), "aborted", "plan-refused")
        assert said(coordinator) == []

    lacks.__name__ = name
    return promise("4", f"a secure round {what} is plan-refused")(lacks)


_unreleased("refuses_no_release", "without a release", lambda plan, checkpoint: None)
_unreleased("refuses_a_strangers_release", "that a stranger released", releasing(signer=LINEAGE))
_unreleased("refuses_another_population", "released for another population", releasing(population="tablets"))
_unreleased("refuses_an_expired_release", "whose release expired", releasing(expires_at=1))
_unreleased("refuses_another_checkpoint", "from a model without an origin", releasing(checkpoint="ab" * 32))
