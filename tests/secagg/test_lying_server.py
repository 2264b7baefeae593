"""Whatever a server does to a device up to its upload ends in the error of that name, and no share leaves."""

from dataclasses import replace

import numpy as np
import pytest

from secagg import keys
from secagg.encoding import bitmap
from secagg.errors import (
    BadCiphertext,
    BadInput,
    BadPoint,
    BadSignature,
    BelowThreshold,
    DuplicateKey,
    GraphMismatch,
    HeadroomError,
    Malformed,
    ModelMismatch,
    PolicyViolation,
    ReplayedRound,
    SelfMarkedDead,
    SelfMismatch,
    TooFewNeighbours,
    UnsupportedSuite,
    WrongSession,
)
from secagg.merkle import Tree
from secagg.messages import (
    HONEST,
    Advertise,
    Deliver,
    Roster,
)
from secagg.packing import Segment
from secagg.parameters import Parameters, find
from secagg.server import Phase, Server
from tests.secagg.cohort import (
    AUTHORITY,
    BEACON,
    LAYOUT,
    MODEL,
    SERVER,
    VICTIM,
    Cohort,
    dies,
    invitation,
    only,
    policy,
    private,
    public,
    signed,
)

LOW_ORDER = bytes(32)


def test_a_device_takes_the_invitation_that_the_others_below_vary(cohort, victim):
    advertised = Advertise.decode(victim.invite(signed(cohort.invite), MODEL, LAYOUT), cohort.invite.hash)
    assert advertised.id == public(cohort.identities[VICTIM])


@pytest.mark.parametrize(
    ("error", "changes"),
    [
        (ReplayedRound, {"round": 6}),
        (ReplayedRound, {"round": 0}),
        (PolicyViolation, {"mode": HONEST}),
        (PolicyViolation, {"min_sum": 1}),
        (PolicyViolation, {"min_sum": 201}),
        (HeadroomError, {"n_max": 65536 // 255 + 2}),
        (HeadroomError, {"segments": (Segment(5, 16, 8, 0.5, 1.0),)}),
        (ModelMismatch, {"model_hash": LAYOUT}),
        (ModelMismatch, {"layout_hash": MODEL}),
    ],
)
def test_an_invitation_to_something_weaker_older_or_else_is_refused(cohort, error, changes):
    client = cohort.client(VICTIM, last_round=6)
    dies(client, error, client.invite, signed(invitation(**changes)), MODEL, LAYOUT)


def test_an_invitation_that_the_server_did_not_sign_is_refused_at_every_bit(cohort):
    message = signed(cohort.invite)
    for place in range(2, len(message)):
        client = cohort.client(VICTIM)
        wrong = message[:place] + bytes([message[place] ^ 1]) + message[place + 1 :]
        # Without its signatures it would be a session that this device takes no part in.
        with pytest.raises(PolicyViolation if place == 3 else (BadSignature, Malformed, UnsupportedSuite)):
            client.invite(wrong, MODEL, LAYOUT)
    client = cohort.client(VICTIM)
    dies(client, BadSignature, client.invite, signed(cohort.invite, private(3)), MODEL, LAYOUT)


def forged(cohort, slot, **changes):
    """Slot's entry in M2 for the victim, changed."""
    found = Roster.decode(cohort.rosters[VICTIM], cohort.invite.hash, 200)
    at = next(i for i, entry in enumerate(found.neighbours) if entry.position == slot - 10)
    entry = found.neighbours[at]
    changed = replace(entry, device=replace(entry.device, **changes))
    neighbours = (*found.neighbours[:at], changed, *found.neighbours[at + 1 :])
    return replace(found, neighbours=neighbours).encode(cohort.invite.hash)


def test_a_key_that_was_substituted_is_not_on_the_roster(advertised, victim):
    for name in ("id", "mask_key", "box_key"):
        client = Cohort.client(advertised, VICTIM)
        client._state = victim._state
        wrong = forged(advertised, 13, **{name: bytes([9]) * 32})
        assert dies(client, GraphMismatch, client.roster, wrong).culprits == (3,)


def test_a_signature_that_was_substituted_is_refused(advertised, victim):
    dies(victim, BadSignature, victim.roster, forged(advertised, 13, signature=bytes(64)))


def test_a_device_that_nobody_enrolled_is_refused(advertised, victim):
    false = keys.enrol(private(99), public(advertised.identities[13]))
    dies(victim, BadSignature, victim.roster, forged(advertised, 13, credential=false))


def roster_with(cohort, slot, device):
    """M2 for everyone when a lying server puts `device` on the roster in a slot's place."""
    for other in cohort.clients:
        cohort.server.receive(other, cohort.clients[other].invite(cohort.server.invitation, MODEL, LAYOUT))
    cohort.server._advertised[slot] = device(cohort.server._advertised[slot])
    cohort.server.fix_roster()
    return cohort.server.open_roster(BEACON)


def own_signature(cohort, slot, device):
    """What a device signs that works with the server."""
    body = device.mask_key + device.box_key
    return replace(device, signature=keys.sign(cohort.identities[slot], "advertise", cohort.invite.hash, body))


def test_a_roster_around_a_key_that_its_device_did_not_sign_is_refused(cohort, victim):
    rosters = roster_with(cohort, 13, lambda device: replace(device, mask_key=keys.PairKey(bytes(32)).public))
    dies(victim, BadSignature, victim.roster, rosters[VICTIM])


@pytest.mark.parametrize("name", ["mask_key", "box_key"])
def test_a_low_order_key_is_refused_though_a_corrupt_device_signed_it(cohort, victim, name):
    rosters = roster_with(cohort, 13, lambda device: own_signature(cohort, 13, replace(device, **{name: LOW_ORDER})))
    dies(victim, BadPoint, victim.roster, rosters[VICTIM])


def test_two_positions_with_one_key_are_refused(cohort, victim):
    rosters = roster_with(
        cohort,
        13,
        lambda device: own_signature(cohort, 13, replace(device, box_key=cohort.server._advertised[14].mask_key)),
    )
    dies(victim, DuplicateKey, victim.roster, rosters[VICTIM])


def test_a_roster_with_another_key_for_oneself_is_refused(cohort, victim):
    rosters = roster_with(cohort, VICTIM, lambda device: replace(device, mask_key=keys.PairKey(bytes(32)).public))
    dies(victim, SelfMismatch, victim.roster, rosters[VICTIM])


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (SelfMismatch, lambda found: {"position": found.position + 1}),
        (SelfMismatch, lambda found: {"root": bytes(32)}),
        (GraphMismatch, lambda found: {"neighbours": found.neighbours[::-1]}),
        (GraphMismatch, lambda found: {"beacon": bytes(32)}),
        (PolicyViolation, lambda found: {"t": found.t - 1}),
        (PolicyViolation, lambda found: {"k": 6, "neighbours": found.neighbours[:6]}),
        (PolicyViolation, lambda found: {"t": 9}),
    ],
)
def test_a_roster_that_says_something_else_is_refused(advertised, victim, error, change):
    found = Roster.decode(advertised.rosters[VICTIM], advertised.invite.hash, 200)
    dies(victim, error, victim.roster, replace(found, **change(found)).encode(advertised.invite.hash))


def test_a_graph_with_one_neighbour_twice_in_anothers_place_is_refused(advertised, victim):
    found = Roster.decode(advertised.rosters[VICTIM], advertised.invite.hash, 200)
    twice = (found.neighbours[1], *found.neighbours[1:])
    dies(victim, GraphMismatch, victim.roster, replace(found, neighbours=twice).encode(advertised.invite.hash))


def test_a_cohort_below_the_least_is_refused():
    with pytest.raises(BelowThreshold, match="cohort of 7"):
        Cohort(7).advertise()
    lying = Cohort(7, parameters=lambda n: Parameters(n, 6, 5))
    message = lying.advertise()[VICTIM]
    client = lying.client(VICTIM, policy=policy())
    client._state = lying.clients[VICTIM]._state
    dies(client, PolicyViolation, client.roster, message)


def test_an_invitation_to_less_than_the_least_cohort_is_refused():
    cohort = Cohort(9, invitation(n_max=7))
    with pytest.raises(PolicyViolation, match="at most 7 devices"):
        policy().accept(cohort.server.invitation, (MODEL, LAYOUT), 0)
    assert policy().accept(Cohort(9, invitation(n_max=8)).server.invitation, (MODEL, LAYOUT), 0).n_max == 8


def test_a_roster_below_the_sum_that_was_promised_is_refused():
    small = Cohort(8, invitation(min_sum=9))
    with pytest.raises(BelowThreshold, match="8 devices"):
        small.advertise()
    small.server._parameters = find(8)
    small.server.slots = tuple(small.clients)
    small.server._positions = {slot: slot - 10 for slot in small.clients}
    small.server._devices = tuple(small.server._advertised.values())
    small.server._tree = Tree([device.leaf for device in small.server._devices])
    small.server.phase = Phase.DRAWING
    client = small.clients[VICTIM]
    dies(client, BelowThreshold, client.roster, small.server.open_roster(BEACON)[VICTIM])


def delivery(cohort):
    near = cohort.server._neighbours[VICTIM - 10]
    return Deliver.decode(cohort.deliveries[VICTIM], cohort.server._sid, 9, near)


def test_boxes_that_were_altered_swapped_or_replayed_name_their_sender(delivered, victim):
    found = delivery(delivered)
    first, second = list(found.boxes)[:2]
    altered = found.boxes[first][:-1] + bytes([found.boxes[first][-1] ^ 1])
    for boxes in (
        {**found.boxes, first: altered},
        {**found.boxes, first: found.boxes[second], second: found.boxes[first]},
        {**found.boxes, first: bytes(80)},
    ):
        client = delivered.client(VICTIM)
        client._state = victim._state
        wrong = Deliver(found.shared, boxes).encode(delivered.server._sid, 9)
        assert dies(client, BadCiphertext, client.deliver, wrong).culprits == (first,)


def test_a_box_without_shares_in_it_names_its_sender(delivered, victim):
    found, sid = delivery(delivered), delivered.server._sid
    sender = next(iter(found.boxes))
    secret = victim._state.box_secrets[sender]
    false = keys.seal(keys.derive(secret, sid, "box", sender, 0), b"\xff" * 64, sid, sender, 0)
    wrong = Deliver(found.shared, {**found.boxes, sender: false}).encode(sid, 9)
    assert dies(victim, BadCiphertext, victim.deliver, wrong).culprits == (sender,)


def test_a_delivery_without_oneself_or_enough_others_is_refused(delivered, victim):
    found, sid = delivery(delivered), delivered.server._sid
    for error, positions in (
        (SelfMarkedDead, found.shared - {0}),
        (TooFewNeighbours, frozenset(range(6))),  # t is 6, so one too few
    ):
        client = delivered.client(VICTIM)
        client._state = victim._state
        dies(client, error, client.deliver, only(found, positions, sid))


@pytest.mark.parametrize(
    ("vector", "weight"),
    [(np.full(5, np.nan, np.float32), 1), (np.zeros(4, np.float32), 1), (np.zeros(5, np.float32), 1001)],
)
def test_an_input_that_cannot_be_summed_ends_the_session_before_anything_is_sent(delivered, victim, vector, weight):
    victim.deliver(delivered.deliveries[VICTIM])
    dies(victim, BadInput, victim.mask, vector, weight)


def test_a_device_with_another_model_is_left_out_by_its_neighbours():
    """The server invites one device to the same round with another model, and passes its keys on as if of this one."""
    cohort = Cohort(9, invitation(min_sum=3))
    other = Server(replace(cohort.invite, model_hash=LAYOUT), SERVER, public(AUTHORITY))
    victim = cohort.clients.pop(VICTIM)
    advertised = victim.invite(other.invitation, LAYOUT, LAYOUT)
    for slot, client in cohort.clients.items():
        cohort.server.receive(slot, client.invite(cohort.server.invitation, MODEL, LAYOUT))
    with pytest.raises(WrongSession):
        cohort.server.receive(VICTIM, advertised)
    relabelled = advertised[:2] + cohort.invite.hash + advertised[34:]
    with pytest.raises(BadSignature):
        cohort.server.receive(VICTIM, relabelled)
    cohort.server._advertised[VICTIM] = Advertise.decode(relabelled, cohort.invite.hash)
    cohort.server.fix_roster()
    rosters = cohort.server.open_roster(BEACON)
    for slot, client in cohort.clients.items():
        dies(client, BadSignature, client.roster, rosters[slot])
    # To the victim, its neighbours' signatures are of another session just as well.
    theirs = rosters[VICTIM][:2] + other._invite_hash + rosters[VICTIM][34:]
    dies(victim, BadSignature, victim.roster, theirs)


def test_without_signatures_a_device_with_another_model_still_opens_no_box():
    cohort = Cohort(9, invitation(mode=HONEST, min_sum=3))
    other = Server(replace(cohort.invite, model_hash=LAYOUT), SERVER, public(AUTHORITY))
    advertised = cohort.clients[VICTIM].invite(other.invitation, LAYOUT, LAYOUT)
    cohort.server.receive(VICTIM, advertised[:2] + cohort.invite.hash + advertised[34:])
    for slot in cohort.everyone(without=(VICTIM,)):
        cohort.server.receive(slot, cohort.clients[slot].invite(cohort.server.invitation, MODEL, LAYOUT))
    cohort.server.fix_roster()
    rosters = cohort.server.open_roster(BEACON)
    shares = cohort.clients[VICTIM].roster(rosters[VICTIM][:2] + other._invite_hash + rosters[VICTIM][34:])
    cohort.server.receive(VICTIM, shares[:2] + cohort.server._sid + shares[34:])
    deliveries = cohort.share({slot: rosters[slot] for slot in cohort.everyone(without=(VICTIM,))})
    for slot in cohort.everyone(without=(VICTIM,)):
        client = cohort.clients[slot]
        assert dies(client, BadCiphertext, client.deliver, deliveries[slot]).culprits == (0,)


def test_a_roster_that_differs_between_devices_leaves_no_box_to_open():
    """Two rosters of one round, each consistent in itself, share no key."""
    cohort = Cohort(9)
    rosters = cohort.advertise()
    twin = Cohort(9)
    twin.clients = cohort.clients
    twin.server._advertised = {slot: cohort.server._advertised[slot] for slot in cohort.clients}
    twin.server.fix_roster()
    others = twin.server.open_roster(bytes(32))
    shares = {slot: cohort.clients[slot].roster((others if slot == VICTIM else rosters)[slot]) for slot in rosters}
    for slot, message in shares.items():
        cohort.server.receive(slot, message[:2] + cohort.server._sid + message[34:])
    deliveries = cohort.server.close_phase()
    assert deliveries[11][34:36] == bitmap(frozenset(range(9)), 9)
    for slot in cohort.everyone(without=(VICTIM,)):
        client = cohort.clients[slot]
        assert dies(client, BadCiphertext, client.deliver, deliveries[slot]).culprits == (0,)
