"""Every lie of a server to a device, up to its upload, ends in the error of that name, and no share leaves."""

from copy import copy
from dataclasses import fields, replace

import numpy as np
import pytest

from secagg import encoding, errors, keys
from secagg.keys import PairKey
from secagg.messages import HONEST, Advertise, Complaints, Deliver, Included, Invite, Shares
from secagg.packing import PackedSegment
from secagg.parameters import GraphParameters
from secagg.server import Server
from tests.secagg.cohort import (
    AUTHORITY,
    LAYOUT,
    MODEL,
    SERVER,
    VICTIM,
    Cohort,
    credential,
    dies,
    invitation,
    only,
    policy,
    private,
    public,
    relabelled,
    rosters_of,
    session_of,
    signed,
)

LOW_ORDER = bytes(32)


def test_a_device_takes_the_invitation_that_the_others_below_vary(cohort, victim):
    advertised = Advertise.decode(victim.receive(signed(cohort.invite)).message, cohort.invite.hash)
    assert advertised.id == public(cohort.identities[VICTIM])


@pytest.mark.security("A device refuses it unless its policy says otherwise")
@pytest.mark.security("invites to an old round, another model, another layout or codec key")
@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (errors.ReplayedRound, {"round": 6}),
        (errors.ReplayedRound, {"round": 0}),
        (errors.PolicyViolation, {"mode": HONEST}),
        (errors.PolicyViolation, {"min_sum": 1}),
        (errors.PolicyViolation, {"min_sum": 201}),
        (errors.HeadroomError, {"n_max": 65536 // 255 + 2}),
        (errors.HeadroomError, {"segments": (PackedSegment(5, 16, 8, 0.5, 1.0),)}),
        (errors.ModelMismatch, {"model_hash": LAYOUT}),
        (errors.ModelMismatch, {"layout_hash": MODEL}),
    ],
)
def test_an_invitation_to_something_weaker_older_or_else_is_refused(cohort, error, changes):
    dies(cohort.client(VICTIM, last_round=6), error, signed(invitation(**changes)))


def test_an_invitation_with_any_changed_byte_is_refused(cohort):
    message = signed(cohort.invite)
    for place in range(2, len(message)):
        wrong = message[:place] + bytes([message[place] ^ 1]) + message[place + 1 :]
        # Without its signatures it would be a session that this device takes no part in.
        with pytest.raises(
            errors.PolicyViolation if place == 3 else (errors.BadSignature, errors.Malformed, errors.UnsupportedSuite)
        ):
            cohort.client(VICTIM).receive(wrong)
    dies(cohort.client(VICTIM), errors.BadSignature, signed(cohort.invite, private(3)))


@pytest.mark.security("sends a message that is not due, or one before M8 twice: OutOfOrder")
@pytest.mark.parametrize("number", encoding.MessageType)
def test_a_message_that_is_not_due_ends_the_session(cohort, victim, number):
    """At every step up to the upload."""
    states = {encoding.MessageType.INVITE: copy(victim)}
    cohort.answer(dict.fromkeys(cohort.clients, cohort.server.invitation))
    states[encoding.MessageType.ROSTER] = copy(victim)
    cohort.server.advance()
    cohort.share(cohort.server.advance().messages)
    states[encoding.MessageType.DELIVER] = copy(victim)
    victim.receive(cohort.deliveries[VICTIM])
    states[encoding.MessageType.INCLUDED] = victim
    for due, client in states.items():
        if number != due:
            dies(client, errors.OutOfOrder, bytes([number, 1]) + bytes(200))


def test_a_message_that_does_not_exist_ends_the_session(delivered, victim):
    for wrong in (b"", b"\x0d\1", b"\xff"):
        dies(copy(victim), errors.Malformed, wrong)


def forged(cohort, slot, **changes):
    """Slot's entry in M2 for the victim, changed."""
    found = cohort.roster(VICTIM)
    at = next(i for i, entry in enumerate(found.neighbours) if entry.position == slot - 10)
    entry = found.neighbours[at]
    changed = replace(entry, device=replace(entry.device, **changes))
    neighbours = (*found.neighbours[:at], changed, *found.neighbours[at + 1 :])
    return replace(found, neighbours=neighbours).encode(cohort.invite.hash)


@pytest.mark.security("exchanges a device's keys, or makes devices up: BadSignature; GraphMismatch")
def test_a_key_that_was_substituted_is_not_on_the_roster(advertised, victim):
    for name in ("id", "mask_key", "box_key"):
        wrong = forged(advertised, 13, **{name: bytes([9]) * 32})
        assert dies(copy(victim), errors.GraphMismatch, wrong).culprits == (3,)


@pytest.mark.security("exchanges a device's keys, or makes devices up: BadSignature; GraphMismatch")
def test_a_signature_that_was_substituted_is_refused(advertised, victim):
    dies(victim, errors.BadSignature, forged(advertised, 13, signature=bytes(64)))


@pytest.mark.security("it cannot make up devices that others take for real")
@pytest.mark.security("exchanges a device's keys, or makes devices up: BadSignature; GraphMismatch")
@pytest.mark.security("passes a device's check with chance (1 − f)^k")
def test_a_device_that_nobody_enrolled_is_refused(advertised, victim):
    false = credential(advertised.identities[13], private(99))
    dies(victim, errors.BadSignature, forged(advertised, 13, credential=false))


def advertisements(cohort):
    """What every device advertises, by slot."""
    answers = {slot: client.receive(cohort.server.invitation).message for slot, client in cohort.clients.items()}
    return {slot: Advertise.decode(message, cohort.invite.hash) for slot, message in answers.items()}


def own_signature(cohort, slot, device):
    """The advertisement as a device signs it that works with the server."""
    body = device.mask_key + device.box_key
    return replace(device, signature=keys.sign(cohort.identities[slot], "advertise", cohort.invite.hash, body))


def open_roster(cohort, devices):
    """M2 of the real server for these advertisements."""
    for slot, device in devices.items():
        cohort.server.receive(slot, device.encode(cohort.invite.hash))
    cohort.server.advance()
    return cohort.server.advance().messages


def test_the_rosters_that_tests_make_are_those_of_the_server(cohort):
    devices = advertisements(cohort)
    assert open_roster(cohort, devices) == rosters_of(cohort.invite, devices)


@pytest.mark.security("exchanges a device's keys, or makes devices up: BadSignature; GraphMismatch")
def test_a_roster_around_a_key_that_its_device_did_not_sign_is_refused(cohort, victim):
    devices = advertisements(cohort)
    devices[13] = replace(devices[13], mask_key=PairKey(bytes(32)).public)
    dies(victim, errors.BadSignature, rosters_of(cohort.invite, devices)[VICTIM])


@pytest.mark.security("offers points of low order, or one key twice: BadPoint, DuplicateKey")
@pytest.mark.parametrize("name", ["mask_key", "box_key"])
def test_a_low_order_key_is_refused_though_a_corrupt_device_signed_it(cohort, victim, name):
    devices = advertisements(cohort)
    devices[13] = own_signature(cohort, 13, replace(devices[13], **{name: LOW_ORDER}))
    dies(victim, errors.BadPoint, rosters_of(cohort.invite, devices)[VICTIM])


@pytest.mark.security("offers points of low order, or one key twice: BadPoint, DuplicateKey")
def test_two_positions_with_one_key_are_refused(cohort, victim):
    devices = advertisements(cohort)
    devices[13] = own_signature(cohort, 13, replace(devices[13], box_key=devices[14].mask_key))
    dies(victim, errors.DuplicateKey, rosters_of(cohort.invite, devices)[VICTIM])


def test_a_roster_with_another_key_for_oneself_is_refused(cohort, victim):
    devices = advertisements(cohort)
    devices[VICTIM] = replace(devices[VICTIM], mask_key=PairKey(bytes(32)).public)
    dies(victim, errors.SelfMismatch, rosters_of(cohort.invite, devices)[VICTIM])


@pytest.mark.security("places a victim among its own devices, or gives it fewer neighbours")
@pytest.mark.parametrize(
    ("error", "change"),
    [
        (errors.SelfMismatch, lambda found: {"position": found.position + 1}),
        (errors.SelfMismatch, lambda found: {"root": bytes(32)}),
        (errors.GraphMismatch, lambda found: {"neighbours": found.neighbours[::-1]}),
        (errors.GraphMismatch, lambda found: {"beacon": bytes([1]) * 64}),
        (errors.PolicyViolation, lambda found: {"t": found.t - 1}),
        (errors.PolicyViolation, lambda found: {"k": 6, "neighbours": found.neighbours[:6]}),
        (errors.PolicyViolation, lambda found: {"t": 9}),
    ],
)
def test_a_roster_that_says_something_else_is_refused(advertised, victim, error, change):
    found = advertised.roster(VICTIM)
    dies(victim, error, replace(found, **change(found)).encode(advertised.invite.hash))


@pytest.mark.security("places a victim among its own devices, or gives it fewer neighbours")
def test_a_graph_with_one_neighbour_twice_in_anothers_place_is_refused(advertised, victim):
    found = advertised.roster(VICTIM)
    twice = (found.neighbours[1], *found.neighbours[1:])
    dies(victim, errors.GraphMismatch, replace(found, neighbours=twice).encode(advertised.invite.hash))


def test_a_cohort_below_the_least_is_refused():
    with pytest.raises(errors.BelowThreshold, match="cohort of 7"):
        Cohort(7).advertise()
    lying = Cohort(7, parameters=lambda n: GraphParameters(n, 6, 5))
    lying.clients[VICTIM] = lying.client(VICTIM, policy())
    dies(lying.clients[VICTIM], errors.PolicyViolation, lying.advertise()[VICTIM])


def test_an_invitation_to_less_than_the_least_cohort_is_refused():
    cohort = Cohort(9, invitation(n_max=7))
    with pytest.raises(errors.PolicyViolation, match="at most 7 devices"):
        policy().accept(cohort.server.invitation, (MODEL, LAYOUT), 0)
    assert policy().accept(Cohort(9, invitation(n_max=8)).server.invitation, (MODEL, LAYOUT), 0).n_max == 8


def test_a_roster_below_the_sum_that_was_promised_is_refused():
    small = Cohort(8, invitation(min_sum=9))
    with pytest.raises(errors.BelowThreshold, match="8 devices"):
        small.advertise()
    again = Cohort(8, invitation(min_sum=9))
    rosters = rosters_of(again.invite, advertisements(again))
    dies(again.clients[VICTIM], errors.BelowThreshold, rosters[VICTIM])


def complains(client, delivery, included):
    """Whom the device accuses, and then refuses to go on with."""
    sid, found = session_of(delivery), client.receive(delivery).message
    accused = Complaints.decode(found, sid, 9).devices
    assert set(dies(client, errors.BadCiphertext, Included(included).encode(sid, 9)).culprits) == accused
    return accused


@pytest.mark.security("alters, swaps, replays or reflects boxes")
def test_boxes_that_were_altered_swapped_or_replayed_name_their_sender(delivered, victim):
    found = delivered.delivery(VICTIM)
    first, second = list(found.boxes)[:2]
    altered = found.boxes[first][:-1] + bytes([found.boxes[first][-1] ^ 1])
    for accused, boxes in (
        ({first}, {**found.boxes, first: altered}),
        ({first, second}, {**found.boxes, first: found.boxes[second], second: found.boxes[first]}),
        ({first}, {**found.boxes, first: bytes(80)}),
    ):
        wrong = Deliver(found.shared, boxes).encode(delivered.sid, 9)
        assert complains(copy(victim), wrong, found.shared) == accused


def test_a_box_without_shares_in_it_names_its_sender(cohort, victim):
    """The sender, in slot 13, is a corrupt device, which the test plays."""
    devices, own = advertisements(cohort), PairKey(bytes(range(32)))
    devices[13] = own_signature(cohort, 13, replace(devices[13], box_key=own.public))
    cohort.answer(open_roster(cohort, devices), without=(13,))
    sid = session_of(cohort.replies[VICTIM].message)
    key = keys.derive(own.agree(devices[VICTIM].box_key), sid, "box", 3, 0)
    false = keys.seal(key, b"\xff" * 64, sid, 3, 0)
    cohort.server.receive(13, Shares(bytes(32), (false,) * 8).encode(sid))
    delivery = cohort.server.advance().messages[VICTIM]
    assert complains(victim, delivery, frozenset(range(9))) == {3}


@pytest.mark.security("says that a device that is there is gone: SelfMarkedDead")
def test_a_delivery_without_oneself_or_enough_others_is_refused(delivered, victim):
    found = delivered.delivery(VICTIM)
    for error, positions in (
        (errors.SelfMarkedDead, found.shared - {0}),
        (errors.TooFewNeighbours, frozenset(range(6))),  # t is 6, so one too few
    ):
        dies(copy(victim), error, only(found, positions, delivered.sid))


@pytest.mark.parametrize(
    ("vector", "weight"),
    [(np.full(5, np.nan, np.float32), 1), (np.zeros(4, np.float32), 1), (np.zeros(5, np.float32), 1001)],
)
def test_an_input_that_cannot_be_summed_is_never_sent(cohort, vector, weight):
    cohort.clients[VICTIM] = victim = cohort.client(VICTIM, vector=vector, weight=weight)
    dies(victim, errors.BadInput, cohort.open(cohort.share(cohort.advertise()))[VICTIM])


OTHER_TERMS = {
    "task": bytes(32), "round": 8, "deadline": 1, "n_max": 100, "min_sum": 4, "w_max": 999, "layout_hash": MODEL,
    "model_hash": LAYOUT, "segments": (PackedSegment(5, 17, 8, 0.0, 255.0),),
}  # fmt: skip


def test_every_field_of_an_invitation_is_among_the_terms_below():
    """But for the mode, of which a device takes one."""
    assert {"mode", *OTHER_TERMS} == {one.name for one in fields(Invite)}


@pytest.mark.security("sends different invitations to different devices: BadSignature")
@pytest.mark.parametrize("field", OTHER_TERMS)
def test_a_device_with_another_invitation_is_left_out_by_its_neighbours(field):
    """The server invites one device to something else, and passes its keys on as if it were invited as the rest."""
    cohort, changes = Cohort(9, invitation(min_sum=3)), {field: OTHER_TERMS[field]}
    other = Server(replace(cohort.invite, **changes), SERVER, public(AUTHORITY))
    victim = cohort.client(VICTIM, **{name: value for name, value in changes.items() if name.endswith("_hash")})
    advertised = victim.receive(other.invitation).message
    with pytest.raises(errors.WrongSession):
        cohort.server.receive(VICTIM, advertised)
    passed_on = relabelled(advertised, cohort.invite.hash)
    with pytest.raises(errors.BadSignature):
        cohort.server.receive(VICTIM, passed_on)
    devices = {**advertisements(cohort), VICTIM: Advertise.decode(passed_on, cohort.invite.hash)}
    rosters = rosters_of(cohort.invite, devices)
    for slot in cohort.everyone(without=(VICTIM,)):
        dies(cohort.clients[slot], errors.BadSignature, rosters[slot])
    # To the victim, its neighbours' signatures are of another session just as well.
    dies(victim, errors.BadSignature, relabelled(rosters[VICTIM], Invite.decode(other.invitation)[0].hash))


def test_in_mode_honest_too_a_device_with_another_model_opens_no_box():
    cohort = Cohort(9, invitation(mode=HONEST, min_sum=3))
    other = Server(replace(cohort.invite, model_hash=LAYOUT), SERVER, public(AUTHORITY))
    victim = cohort.client(VICTIM, model_hash=LAYOUT)
    others = cohort.everyone(without=(VICTIM,))
    cohort.server.receive(VICTIM, relabelled(victim.receive(other.invitation).message, cohort.invite.hash))
    rosters = cohort.advertise(without=(VICTIM,))
    shares = victim.receive(relabelled(rosters[VICTIM], Invite.decode(other.invitation)[0].hash)).message
    cohort.answer(rosters, without=(VICTIM,))
    cohort.server.receive(VICTIM, relabelled(shares, session_of(cohort.replies[others[0]].message)))
    deliveries = cohort.server.advance().messages
    for slot in others:
        assert complains(cohort.clients[slot], deliveries[slot], frozenset(range(9))) == {0}


@pytest.mark.security("shows different rosters, parameters or beacons to different devices")
def test_a_roster_that_differs_between_devices_leaves_no_box_to_open():
    """Two rosters of one round, each consistent in itself, share no key."""
    cohort = Cohort(9)
    devices = advertisements(cohort)
    cohort.answer(open_roster(cohort, devices), without=(VICTIM,))
    turned = {VICTIM: devices[VICTIM]} | dict(reversed(devices.items()))
    shares = cohort.clients[VICTIM].receive(rosters_of(cohort.invite, turned)[VICTIM]).message
    cohort.server.receive(VICTIM, relabelled(shares, session_of(cohort.replies[11].message)))
    deliveries = cohort.server.advance().messages
    assert deliveries[11][34:36] == encoding.bitmap(frozenset(range(9)), 9)
    for slot in cohort.everyone(without=(VICTIM,)):
        assert complains(cohort.clients[slot], deliveries[slot], frozenset(range(9))) == {0}
