"""Devices that lie about who is there, and complaints about them."""

from copy import copy
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from secagg import errors, keys
from secagg.client import Client
from secagg.messages import (
    BOX_BYTES,
    HONEST,
    Complaints,
    Confirm,
    Confirmations,
    Deliver,
    Included,
    SessionResult,
    Shares,
    Survivors,
    Unmask,
    survivors_digest,
)
from secagg.parameters import find, leave_out
from tests.secagg.cohort import TASK, VICTIM, Cohort, dies, invitation, session_of

N = 20
LIAR = 15


def positions(slots):
    return frozenset(slot - 10 for slot in slots)


def shared_with_false_boxes(cohort, victims):
    """M4, when the liar's boxes open for none of these slots."""
    cohort.answer(cohort.advertise(), without=(LIAR,))
    message = cohort.clients[LIAR].receive(cohort.rosters[LIAR]).message
    near = [entry.position + 10 for entry in cohort.roster(LIAR).neighbours]
    found = Shares.decode(message, session_of(message), len(near))
    boxes = tuple(bytes(BOX_BYTES) if slot in victims else box for slot, box in zip(near, found.boxes, strict=True))
    cohort.server.receive(LIAR, replace(found, boxes=boxes).encode(session_of(message)))
    cohort.deliveries = cohort.server.advance().messages
    return cohort.deliveries


def sums_without(cohort, included, gone):
    """The session goes on to the sum of everybody else."""
    survivors = cohort.upload(included)
    assert set(survivors) == set(cohort.clients) - gone
    cohort.reveal(cohort.confirm(survivors))
    np.testing.assert_array_equal(cohort.unmask().total.sums, cohort.total(survivors))


@pytest.mark.parametrize("spoilt", [19, 10, 5])
def test_a_device_whose_boxes_do_not_open_leaves_alone(spoilt):
    """Once, each of its neighbours left in its place, and so every attempt at the round ended."""
    cohort = Cohort(N, invitation(min_sum=N - 1))
    victims = [slot for slot in cohort.clients if slot != LIAR][:spoilt]
    included = cohort.open(shared_with_false_boxes(cohort, victims))
    assert cohort.server.suspects == {LIAR}
    sums_without(cohort, included, {LIAR})


def test_a_device_that_accuses_everybody_leaves_alone():
    cohort = Cohort(N, invitation(min_sum=N - 1))
    cohort.answer(cohort.share(cohort.advertise()), without=(LIAR,))
    cohort.server.receive(LIAR, Complaints(positions(cohort.clients) - {LIAR - 10}).encode(cohort.sid, N))
    sums_without(cohort, cohort.server.advance().messages, {LIAR})


def test_one_box_that_does_not_open_costs_its_sender_and_its_receiver():
    cohort = Cohort(N, invitation(min_sum=N - 2))
    included = cohort.open(shared_with_false_boxes(cohort, [VICTIM]))
    assert cohort.server.suspects == {LIAR, VICTIM}
    sums_without(cohort, included, {LIAR, VICTIM})


def test_complaints_about_devices_that_left_meanwhile_cost_nobody():
    cohort = Cohort(N, invitation(min_sum=N - 1))
    included = cohort.open(shared_with_false_boxes(cohort, [VICTIM]), without=(LIAR,))
    assert not cohort.server.suspects
    sums_without(cohort, included, {LIAR})


def test_a_complaint_about_a_box_that_was_never_sent_is_refused():
    cohort = Cohort(N, invitation(min_sum=8))
    cohort.share(cohort.advertise(), without=(11,))
    for wrong in ({0}, {1}):  # itself, and a device that shared nothing
        with pytest.raises(errors.Malformed):
            cohort.server.receive(10, Complaints(frozenset(wrong)).encode(cohort.sid, N))
    with pytest.raises(errors.OutOfOrder):
        cohort.server.receive(11, Complaints(frozenset()).encode(cohort.sid, N))
    sums_without(cohort, cohort.open(cohort.deliveries), {11})


@pytest.mark.security("Boxes that do not open cost a session … at most as many honest devices")
@given(data=st.data(), n=st.sampled_from([8, 13, 20, 40]))
@settings(max_examples=200, deadline=None)
def test_no_more_honest_devices_leave_than_corrupt_ones(data, n):
    """Whatever up to a fifth of the devices say, or send, together."""
    chosen = find(n)
    most = max(2, -(-n // 5))
    corrupt = data.draw(st.sets(st.integers(0, n - 1), max_size=most))
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    said = [(a, b) for a, b in data.draw(st.lists(pairs, max_size=3 * n)) if a != b and {a, b} & corrupt]
    complaints = {}
    for accuser, accused in said:
        complaints.setdefault(accuser, set()).add(accused)
    left_out = leave_out(complaints, chosen)
    assert len(left_out - corrupt) <= len(left_out & corrupt)
    assert all({a, b} & left_out for a, b in said)


# --- a server that lies about it


@pytest.fixture
def opened(delivered):
    """Nine devices, of which all but the victim have opened their boxes."""
    delivered.answer(delivered.deliveries, without=(VICTIM,))
    return delivered


def spoilt(cohort, senders):
    """The victim's M4, in which the boxes of these positions were damaged."""
    found = cohort.delivery(VICTIM)
    boxes = {peer: bytes(BOX_BYTES) if peer in senders else box for peer, box in found.boxes.items()}
    return Deliver(found.shared, boxes).encode(cohort.sid, 9)


def test_a_device_goes_on_with_nobody_whose_box_did_not_open(opened, victim):
    accused = Complaints.decode(victim.receive(spoilt(opened, {3})).message, opened.sid, 9).devices
    assert accused == {3}
    included = Included(frozenset(range(9))).encode(opened.sid, 9)
    assert dies(victim, errors.BadCiphertext, included).culprits == (3,)


@pytest.mark.security("shows different rosters, parameters or beacons to different devices")
@pytest.mark.security("alters, swaps, replays or reflects boxes")
def test_damaged_boxes_leave_a_device_no_fewer_neighbours_than_t(opened, victim):
    """Eight neighbours, of which six must stay: with three fewer the device does not mask, and has told nothing."""
    everyone = frozenset(range(9))
    for senders in combinations(range(1, 9), 3):
        client = copy(victim)
        client.receive(spoilt(opened, senders))
        dies(client, errors.TooFewNeighbours, Included(everyone - set(senders)).encode(opened.sid, 9))
    victim.receive(spoilt(opened, {1, 2}))
    assert victim.receive(Included(everyone - {1, 2}).encode(opened.sid, 9)).message[0] == 7


@pytest.mark.parametrize(
    ("error", "included"),
    [
        (errors.SelfMarkedDead, range(1, 9)),
        (errors.TooFewNeighbours, range(6)),
        (errors.SelfMarkedDead, ()),
    ],
)
def test_a_device_is_included_with_t_neighbours_or_says_nothing(opened, victim, error, included):
    victim.receive(opened.deliveries[VICTIM])
    dies(victim, error, Included(frozenset(included)).encode(opened.sid, 9))


def test_a_device_goes_on_with_as_many_devices_as_it_was_promised():
    cohort = Cohort(9, invitation(min_sum=9))
    client = cohort.clients[VICTIM]
    client.receive(cohort.share(cohort.advertise())[VICTIM])
    dies(client, errors.BelowThreshold, Included(frozenset(range(8))).encode(cohort.sid, 9))


def test_nobody_is_included_who_did_not_share(cohort, victim):
    cohort.share(cohort.advertise(), without=(18,))
    victim.receive(cohort.deliveries[VICTIM])
    dies(victim, errors.InconsistentSurvivors, Included(frozenset(range(9))).encode(cohort.sid, 9))


@pytest.mark.security("sends a message that is not due, or one before M8 twice: OutOfOrder")
def test_a_device_masks_for_one_set_of_devices(opened, victim):
    victim.receive(opened.deliveries[VICTIM])
    victim.receive(Included(frozenset(range(9))).encode(opened.sid, 9))
    dies(victim, errors.OutOfOrder, Included(frozenset(range(8))).encode(opened.sid, 9))


@pytest.mark.security("tells some that a device survived … and others that it left")
def test_two_sets_of_included_devices_do_not_open_both_secrets(opened, victim):
    """Half of the devices are told that the victim's boxes did not open, and half that it dropped out later.

    The first hold shares of it and reveal none; the others see that too few signed what they were shown.
    """
    everyone, sid = frozenset(range(9)), opened.sid
    halves, alive = (range(1, 5), range(5, 9)), everyone - {0}
    victim.receive(opened.deliveries[VICTIM])
    signed = {}
    for half, shared in zip(halves, (alive, everyone), strict=True):
        digest = survivors_digest(shared, alive, 9)
        signed |= {p: (digest, keys.sign(opened.identities[10 + p], "survivors", sid, digest)) for p in half}
    for half, shared in zip(halves, (alive, everyone), strict=True):
        for position in half:
            client = opened.clients[10 + position]
            client.receive(Included(shared).encode(sid, 9))
            client.receive(Survivors(alive).encode(sid, 9))
            others = {peer: entry for peer, entry in signed.items() if peer != position}
            error = dies(copy(client), errors.InconsistentSurvivors, Confirmations(others).encode(sid))
            assert {shown for shown, _ in error.evidence} == {shown for shown, _ in signed.values()}
            agreeing = {peer: entry for peer, entry in others.items() if peer in half}
            dies(client, errors.BelowThreshold, Confirmations(agreeing).encode(sid))


def test_a_device_that_was_left_out_is_in_nobodys_shares(opened, victim):
    """Both its secrets reached its neighbours, and none of its shares leaves one of them again."""
    everyone, sid = frozenset(range(9)), opened.sid
    victim.receive(opened.deliveries[VICTIM])
    without = everyone - {0}
    opened.server.receive(VICTIM, Complaints(frozenset(range(1, 9))).encode(sid, 9))
    included = opened.server.advance().messages
    assert Included.decode(included[11], sid, 9).devices == without
    messages = opened.confirm(opened.upload(included))
    for slot, message in messages.items():
        assert 0 not in Unmask.decode(opened.clients[slot].receive(message).message, sid).shares


@pytest.mark.security("says that a device that is there is gone: SelfMarkedDead")
@pytest.mark.security("says that too few are left: BelowThreshold, TooFewNeighbours")
@pytest.mark.parametrize(
    ("error", "alive"),
    [
        (errors.SelfMarkedDead, range(1, 9)),
        (errors.BelowThreshold, range(3)),
        (errors.BelowThreshold, range(6)),
        (errors.BelowThreshold, (0,)),
    ],
)
def test_survivors_without_oneself_or_enough_others_are_refused(uploaded, victim, error, alive):
    dies(victim, error, Survivors(frozenset(alive)).encode(uploaded.sid, 9))


@pytest.mark.security("a device's min_cohort is held against that number")
@pytest.mark.security("says that too few are left: BelowThreshold, TooFewNeighbours")
def test_a_sum_over_fewer_than_promised_is_refused():
    cohort = Cohort(9, invitation(min_sum=9))
    included = cohort.open(cohort.share(cohort.advertise()))
    sid, first, second = cohort.sid, cohort.clients[10], cohort.clients[11]
    dies(first, errors.BelowThreshold, Included(frozenset(range(8))).encode(sid, 9))
    second.receive(included[11])
    dies(second, errors.BelowThreshold, Survivors(frozenset(range(8))).encode(sid, 9))


def test_survivors_that_never_shared_are_refused(cohort, victim):
    deliveries = cohort.share(cohort.advertise(), without=(18,))
    cohort.upload(deliveries)
    wrong = Survivors(frozenset(range(9))).encode(cohort.sid, 9)
    assert dies(victim, errors.InconsistentSurvivors, wrong).culprits == (8,)


def test_a_second_survivor_set_is_not_signed(uploaded, victim):
    sid = uploaded.sid
    once = victim.receive(uploaded.survivors[VICTIM])
    assert victim.receive(uploaded.survivors[VICTIM]) == once
    dies(victim, errors.InconsistentSurvivors, Survivors(frozenset(range(8))).encode(sid, 9))


@pytest.mark.security("tells some that a device survived … and others that it left")
def test_views_that_differ_between_devices_are_noticed_with_evidence(uploaded, victim):
    """Half of the devices are told that position 8 survived, half that it did not."""
    sid = uploaded.sid
    everyone, fewer = frozenset(range(9)), frozenset(range(8))
    signed_by = {}
    for position in range(8):
        alive = everyone if position < 4 else fewer
        step = uploaded.clients[10 + position].receive(Survivors(alive).encode(sid, 9))
        digest = survivors_digest(everyone, alive, 9)
        signed_by[position] = (digest, Confirm.decode(step.message, sid).signature)
    del signed_by[0]
    error = dies(victim, errors.InconsistentSurvivors, Confirmations(signed_by).encode(sid))
    assert error.culprits == (4,)
    own = survivors_digest(everyone, everyone, 9)
    assert error.evidence == ((own, keys.sign(uploaded.identities[10], "survivors", sid, own)), signed_by[4])
    # A server that shows only those who agree shows too few.
    agreeing = {position: signed_by[position] for position in (5, 6, 7)}
    other = uploaded.clients[14]
    dies(other, errors.BelowThreshold, Confirmations(agreeing).encode(sid))


def test_one_confirmation_too_few_reveals_nothing(uploaded, victim):
    sid, everyone = uploaded.sid, frozenset(range(9))
    digest = survivors_digest(everyone, everyone, 9)
    victim.receive(uploaded.survivors[VICTIM])
    signed_by = {
        position: (digest, keys.sign(uploaded.identities[10 + position], "survivors", sid, digest))
        for position in range(1, 6)
    }
    dies(victim, errors.BelowThreshold, Confirmations(signed_by).encode(sid))


@pytest.mark.security("skips the confirmation, or makes it of signatures from elsewhere")
@pytest.mark.parametrize("what", ["digest", "signature", "stranger", "dead", "own"])
def test_confirmations_that_nobody_near_made_are_refused(uploaded, victim, what):
    sid, alive = uploaded.sid, frozenset(range(8))
    digest = survivors_digest(frozenset(range(9)), alive, 9)
    signed_by = {
        position: (digest, keys.sign(uploaded.identities[10 + position], "survivors", sid, digest))
        for position in range(1, 8)
    }
    if what == "digest":  # an honest signature over the digest, said to be over another
        signed_by[3] = (bytes(32), signed_by[3][1])
    elif what == "signature":
        signed_by[3] = (digest, signed_by[4][1])
    elif what == "stranger":
        signed_by[77] = signed_by[3]
    elif what == "dead":
        signed_by[8] = (digest, keys.sign(uploaded.identities[18], "survivors", sid, digest))
    else:
        signed_by[0] = (digest, keys.sign(uploaded.identities[10], "survivors", sid, digest))
    victim.receive(Survivors(alive).encode(sid, 9))
    dies(victim, errors.BadSignature, Confirmations(signed_by).encode(sid))


@pytest.mark.security("skips the confirmation, or makes it of signatures from elsewhere")
def test_shares_are_not_revealed_before_survivors_are_confirmed(uploaded, victim):
    dies(victim, errors.OutOfOrder, Confirmations({}).encode(uploaded.sid))


@pytest.mark.security("skips the confirmation, or makes it of signatures from elsewhere")
def test_confirmations_of_another_session_are_worth_nothing(uploaded, victim):
    sid = uploaded.sid
    victim.receive(uploaded.survivors[VICTIM])
    digest = survivors_digest(frozenset(range(9)), frozenset(range(9)), 9)
    old = {
        position: (digest, keys.sign(uploaded.identities[10 + position], "survivors", TASK, digest))
        for position in range(1, 9)
    }
    dies(victim, errors.BadSignature, Confirmations(old).encode(sid))


@pytest.mark.security("asks again for the other share, also after a restart of the device")
def test_after_the_shares_of_one_survivor_set_none_of_another_leave(uploaded, victim):
    sid = uploaded.sid
    messages = uploaded.confirm(uploaded.survivors)
    once = victim.receive(messages[VICTIM])
    assert victim.receive(messages[VICTIM]) == once
    again = Client.restore(uploaded.identities[VICTIM], uploaded.policy, once.keep)
    assert again.receive(messages[VICTIM]) == once
    for client in (victim, again):
        dies(client, errors.AlreadyRevealed, Survivors(frozenset(range(8))).encode(sid, 9))


def test_in_mode_honest_too_a_device_reveals_once():
    cohort = Cohort(9, invitation(mode=HONEST))
    survivors = cohort.upload(cohort.share(cohort.advertise()))
    client = cohort.clients[VICTIM]
    once = client.receive(survivors[VICTIM])
    assert client.receive(survivors[VICTIM]) == once
    wrong = Survivors(frozenset(range(8))).encode(cohort.sid, 9)
    dies(client, errors.AlreadyRevealed, wrong)


@pytest.mark.parametrize("change", [lambda r: {"status": 1}, lambda r: {"aggregate_hash": bytes(32)},
                                    lambda r: {"transcript_root": bytes(32)}])  # fmt: skip
def test_a_receipt_that_the_server_did_not_sign_is_refused(uploaded, victim, change):
    sid = uploaded.sid
    uploaded.reveal(uploaded.confirm(uploaded.survivors))
    uploaded.unmask()
    found = SessionResult.decode(uploaded.server.results()[VICTIM], sid)
    dies(victim, errors.BadSignature, replace(found, **change(found)).encode(sid))


def test_messages_of_another_session_are_refused_at_every_step(uploaded, victim):
    confirmed = copy(victim)
    confirmed.receive(uploaded.survivors[VICTIM])
    for client, number in ((copy(victim), 8), (confirmed, 10), (victim, 12)):
        dies(client, errors.WrongSession, bytes([number, 1]) + bytes(300))
