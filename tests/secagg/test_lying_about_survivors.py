"""Whatever a server does to a device after its upload ends in the error of that name, and no other share leaves."""

from dataclasses import replace

import numpy as np
import pytest

from secagg import keys
from secagg.client import Client
from secagg.errors import (
    AlreadyRevealed,
    BadSignature,
    BelowThreshold,
    InconsistentSurvivors,
    OutOfOrder,
    SelfMarkedDead,
    WrongSession,
)
from secagg.messages import (
    HONEST,
    Confirm,
    Confirmations,
    Deliver,
    Result,
    Survivors,
    survivors_digest,
)
from tests.secagg.cohort import (
    TASK,
    VICTIM,
    Cohort,
    dies,
    invitation,
    only,
    vectors_for,
)


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
