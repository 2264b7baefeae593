"""Whatever a server does to a device, or somebody in between, ends in the error of that name; no share leaves."""

from dataclasses import replace

import numpy as np
import pytest

from secagg import keys
from secagg.client import Client
from secagg.encoding import bitmap
from secagg.errors import (
    AlreadyRevealed,
    BadCiphertext,
    BadInput,
    BadPoint,
    BadSignature,
    BelowThreshold,
    DuplicateKey,
    GraphMismatch,
    HeadroomError,
    InconsistentSurvivors,
    Malformed,
    ModelMismatch,
    OutOfOrder,
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
    Confirm,
    Confirmations,
    Deliver,
    Result,
    Roster,
    Survivors,
    survivors_digest,
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
    TASK,
    Cohort,
    invitation,
    policy,
    private,
    public,
    vectors_for,
)

VICTIM = 10
LOW_ORDER = bytes(32)


def signed(invite, key=SERVER):
    return invite.body() + keys.sign(key, "invite", keys.NO_CONTEXT, invite.hash)


def dies(client, error, step, *arguments):
    """The step raises just that, and from then on the device answers nothing."""
    with pytest.raises(error) as caught:
        step(*arguments)
    assert caught.type is error
    for late in (client.roster, client.deliver, client.survivors, client.confirmations, client.result):
        with pytest.raises(OutOfOrder):
            late(bytes(200))
    with pytest.raises(OutOfOrder):
        client.invite(signed(invitation()), MODEL, LAYOUT)
    return caught.value


@pytest.fixture
def cohort():
    return Cohort(9, invitation(min_sum=3))


@pytest.fixture
def victim(cohort):
    return cohort.clients[VICTIM]


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


@pytest.fixture
def advertised(cohort):
    cohort.rosters = cohort.advertise()
    return cohort


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
    with pytest.raises(PolicyViolation, match="cohort of 7"):
        Cohort(7).advertise()
    lying = Cohort(7, parameters=lambda n: Parameters(n, 6, 5))
    message = lying.advertise()[VICTIM]
    client = lying.client(VICTIM, policy=policy())
    client._state = lying.clients[VICTIM]._state
    dies(client, PolicyViolation, client.roster, message)


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


@pytest.fixture
def delivered(advertised):
    advertised.deliveries = advertised.share(advertised.rosters)
    return advertised


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


def only(found, positions, sid):
    return Deliver(positions, {p: box for p, box in found.boxes.items() if p in positions}).encode(sid, 9)


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


@pytest.fixture
def uploaded(delivered):
    delivered.survivors = delivered.upload(delivered.deliveries, vectors_for(delivered))
    return delivered


@pytest.mark.parametrize(
    ("error", "alive"),
    [
        (SelfMarkedDead, range(1, 9)),
        (BelowThreshold, range(3)),
        (BelowThreshold, range(6)),
        (BelowThreshold, (0,)),
    ],
)
def test_survivors_without_oneself_or_enough_others_are_refused(uploaded, victim, error, alive):
    dies(victim, error, victim.survivors, Survivors(frozenset(alive)).encode(uploaded.server._sid, 9))


def test_a_sum_over_fewer_than_were_promised_is_refused_though_enough_neighbours_are_left():
    cohort = Cohort(9, invitation(min_sum=9))
    deliveries = cohort.share(cohort.advertise())
    sid, first, second = cohort.server._sid, cohort.clients[10], cohort.clients[11]
    found = Deliver.decode(deliveries[10], sid, 9, cohort.server._neighbours[0])
    dies(first, BelowThreshold, first.deliver, only(found, frozenset(range(8)), sid))
    second.deliver(deliveries[11])
    second.mask(np.zeros(5, np.float32), 1)
    dies(second, BelowThreshold, second.survivors, Survivors(frozenset(range(8))).encode(sid, 9))


def test_survivors_that_never_shared_are_refused(cohort, victim):
    deliveries = cohort.share(cohort.advertise(), without=(18,))
    cohort.upload(deliveries, vectors_for(cohort))
    wrong = Survivors(frozenset(range(9))).encode(cohort.server._sid, 9)
    assert dies(victim, InconsistentSurvivors, victim.survivors, wrong).culprits == (8,)


def test_a_second_survivor_set_is_not_signed(uploaded, victim):
    sid = uploaded.server._sid
    once = victim.survivors(uploaded.survivors[VICTIM])
    assert victim.survivors(uploaded.survivors[VICTIM]) == once
    dies(victim, InconsistentSurvivors, victim.survivors, Survivors(frozenset(range(8))).encode(sid, 9))


def test_views_that_differ_between_devices_are_noticed_with_evidence(uploaded, victim):
    """Half of the devices are told that position 8 survived, half that it did not."""
    sid = uploaded.server._sid
    everyone, fewer = frozenset(range(9)), frozenset(range(8))
    signed_by = {}
    for position in range(8):
        alive = everyone if position < 4 else fewer
        step = uploaded.clients[10 + position].survivors(Survivors(alive).encode(sid, 9))
        digest = survivors_digest(everyone, alive, 9)
        signed_by[position] = (digest, Confirm.decode(step.message, sid).signature)
    del signed_by[0]
    error = dies(victim, InconsistentSurvivors, victim.confirmations, Confirmations(signed_by).encode(sid))
    assert error.culprits == (4,)
    own = survivors_digest(everyone, everyone, 9)
    assert error.evidence == ((own, keys.sign(uploaded.identities[10], "survivors", sid, own)), signed_by[4])
    # A server that shows only those who agree shows too few.
    agreeing = {position: signed_by[position] for position in (5, 6, 7)}
    other = uploaded.clients[14]
    dies(other, BelowThreshold, other.confirmations, Confirmations(agreeing).encode(sid))


def test_one_confirmation_too_few_reveals_nothing(uploaded, victim):
    sid, everyone = uploaded.server._sid, frozenset(range(9))
    digest = survivors_digest(everyone, everyone, 9)
    victim.survivors(uploaded.survivors[VICTIM])
    signed_by = {
        position: (digest, keys.sign(uploaded.identities[10 + position], "survivors", sid, digest))
        for position in range(1, 6)
    }
    dies(victim, BelowThreshold, victim.confirmations, Confirmations(signed_by).encode(sid))


@pytest.mark.parametrize("what", ["digest", "signature", "stranger", "dead", "own"])
def test_confirmations_that_nobody_near_made_are_refused(uploaded, victim, what):
    sid, alive = uploaded.server._sid, frozenset(range(8))
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
    victim.survivors(Survivors(alive).encode(sid, 9))
    dies(victim, BadSignature, victim.confirmations, Confirmations(signed_by).encode(sid))


def test_shares_are_not_revealed_before_survivors_are_confirmed(uploaded, victim):
    dies(victim, OutOfOrder, victim.confirmations, Confirmations({}).encode(uploaded.server._sid))


def test_confirmations_of_another_session_are_worth_nothing(uploaded, victim):
    sid = uploaded.server._sid
    victim.survivors(uploaded.survivors[VICTIM])
    digest = survivors_digest(frozenset(range(9)), frozenset(range(9)), 9)
    old = {
        position: (digest, keys.sign(uploaded.identities[10 + position], "survivors", TASK, digest))
        for position in range(1, 9)
    }
    dies(victim, BadSignature, victim.confirmations, Confirmations(old).encode(sid))


def test_after_the_shares_of_one_survivor_set_none_of_another_leave(uploaded, victim):
    sid = uploaded.server._sid
    messages = uploaded.confirm(uploaded.survivors)
    once = victim.confirmations(messages[VICTIM])
    assert victim.confirmations(messages[VICTIM]) == once
    again = Client.restore(uploaded.identities[VICTIM], uploaded.policy, once.keep)
    assert again.confirmations(messages[VICTIM]) == once
    for client in (victim, again):
        dies(client, AlreadyRevealed, client.survivors, Survivors(frozenset(range(8))).encode(sid, 9))


def test_in_mode_honest_too_a_device_reveals_once():
    cohort = Cohort(9, invitation(mode=HONEST))
    survivors = cohort.upload(cohort.share(cohort.advertise()), vectors_for(cohort))
    client = cohort.clients[VICTIM]
    once = client.survivors(survivors[VICTIM])
    assert client.survivors(survivors[VICTIM]) == once
    wrong = Survivors(frozenset(range(8))).encode(cohort.server._sid, 9)
    dies(client, AlreadyRevealed, client.survivors, wrong)


@pytest.mark.parametrize("change", [lambda r: {"status": 1}, lambda r: {"aggregate_hash": bytes(32)},
                                    lambda r: {"transcript_root": bytes(32)}])  # fmt: skip
def test_a_receipt_that_the_server_did_not_sign_is_refused(uploaded, victim, change):
    sid = uploaded.server._sid
    uploaded.reveal(uploaded.confirm(uploaded.survivors))
    uploaded.server.unmask()
    found = Result.decode(uploaded.server.results()[VICTIM], sid)
    dies(victim, BadSignature, victim.result, replace(found, **change(found)).encode(sid))


def test_messages_of_another_session_are_refused_at_every_step(uploaded, victim):
    for step, number in ((victim.survivors, 6), (victim.confirmations, 8), (victim.result, 10)):
        client = uploaded.client(VICTIM)
        client._state = victim._state.confirm(frozenset(range(9))) if number == 8 else victim._state
        with pytest.raises(WrongSession):
            getattr(client, step.__name__)(bytes([number, 1]) + bytes(300))


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
