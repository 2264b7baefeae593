"""Every lie of a server to a device, after its upload, ends in the error of that name, and no other share leaves."""

from copy import copy
from dataclasses import replace

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
from secagg.messages import HONEST, Confirm, Confirmations, Included, SessionResult, Survivors, survivors_digest
from tests.secagg.cohort import (
    TASK,
    VICTIM,
    Cohort,
    dies,
    invitation,
)


@pytest.mark.security("says that a device that is there is gone: SelfMarkedDead")
@pytest.mark.security("says that too few are left: BelowThreshold, TooFewNeighbours")
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
    dies(victim, error, Survivors(frozenset(alive)).encode(uploaded.sid, 9))


@pytest.mark.security("a device's min_cohort is held against that number")
@pytest.mark.security("says that too few are left: BelowThreshold, TooFewNeighbours")
def test_a_sum_over_fewer_than_promised_is_refused():
    cohort = Cohort(9, invitation(min_sum=9))
    included = cohort.open(cohort.share(cohort.advertise()))
    sid, first, second = cohort.sid, cohort.clients[10], cohort.clients[11]
    dies(first, BelowThreshold, Included(frozenset(range(8))).encode(sid, 9))
    second.receive(included[11])
    dies(second, BelowThreshold, Survivors(frozenset(range(8))).encode(sid, 9))


def test_survivors_that_never_shared_are_refused(cohort, victim):
    deliveries = cohort.share(cohort.advertise(), without=(18,))
    cohort.upload(deliveries)
    wrong = Survivors(frozenset(range(9))).encode(cohort.sid, 9)
    assert dies(victim, InconsistentSurvivors, wrong).culprits == (8,)


def test_a_second_survivor_set_is_not_signed(uploaded, victim):
    sid = uploaded.sid
    once = victim.receive(uploaded.survivors[VICTIM])
    assert victim.receive(uploaded.survivors[VICTIM]) == once
    dies(victim, InconsistentSurvivors, Survivors(frozenset(range(8))).encode(sid, 9))


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
    error = dies(victim, InconsistentSurvivors, Confirmations(signed_by).encode(sid))
    assert error.culprits == (4,)
    own = survivors_digest(everyone, everyone, 9)
    assert error.evidence == ((own, keys.sign(uploaded.identities[10], "survivors", sid, own)), signed_by[4])
    # A server that shows only those who agree shows too few.
    agreeing = {position: signed_by[position] for position in (5, 6, 7)}
    other = uploaded.clients[14]
    dies(other, BelowThreshold, Confirmations(agreeing).encode(sid))


def test_one_confirmation_too_few_reveals_nothing(uploaded, victim):
    sid, everyone = uploaded.sid, frozenset(range(9))
    digest = survivors_digest(everyone, everyone, 9)
    victim.receive(uploaded.survivors[VICTIM])
    signed_by = {
        position: (digest, keys.sign(uploaded.identities[10 + position], "survivors", sid, digest))
        for position in range(1, 6)
    }
    dies(victim, BelowThreshold, Confirmations(signed_by).encode(sid))


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
    dies(victim, BadSignature, Confirmations(signed_by).encode(sid))


@pytest.mark.security("skips the confirmation, or makes it of signatures from elsewhere")
def test_shares_are_not_revealed_before_survivors_are_confirmed(uploaded, victim):
    dies(victim, OutOfOrder, Confirmations({}).encode(uploaded.sid))


@pytest.mark.security("skips the confirmation, or makes it of signatures from elsewhere")
def test_confirmations_of_another_session_are_worth_nothing(uploaded, victim):
    sid = uploaded.sid
    victim.receive(uploaded.survivors[VICTIM])
    digest = survivors_digest(frozenset(range(9)), frozenset(range(9)), 9)
    old = {
        position: (digest, keys.sign(uploaded.identities[10 + position], "survivors", TASK, digest))
        for position in range(1, 9)
    }
    dies(victim, BadSignature, Confirmations(old).encode(sid))


@pytest.mark.security("asks again for the other share, also after a restart of the device")
def test_after_the_shares_of_one_survivor_set_none_of_another_leave(uploaded, victim):
    sid = uploaded.sid
    messages = uploaded.confirm(uploaded.survivors)
    once = victim.receive(messages[VICTIM])
    assert victim.receive(messages[VICTIM]) == once
    again = Client.restore(uploaded.identities[VICTIM], uploaded.policy, once.keep)
    assert again.receive(messages[VICTIM]) == once
    for client in (victim, again):
        dies(client, AlreadyRevealed, Survivors(frozenset(range(8))).encode(sid, 9))


def test_in_mode_honest_too_a_device_reveals_once():
    cohort = Cohort(9, invitation(mode=HONEST))
    survivors = cohort.upload(cohort.share(cohort.advertise()))
    client = cohort.clients[VICTIM]
    once = client.receive(survivors[VICTIM])
    assert client.receive(survivors[VICTIM]) == once
    wrong = Survivors(frozenset(range(8))).encode(cohort.sid, 9)
    dies(client, AlreadyRevealed, wrong)


@pytest.mark.parametrize("change", [lambda r: {"status": 1}, lambda r: {"aggregate_hash": bytes(32)},
                                    lambda r: {"transcript_root": bytes(32)}])  # fmt: skip
def test_a_receipt_that_the_server_did_not_sign_is_refused(uploaded, victim, change):
    sid = uploaded.sid
    uploaded.reveal(uploaded.confirm(uploaded.survivors))
    uploaded.unmask()
    found = SessionResult.decode(uploaded.server.results()[VICTIM], sid)
    dies(victim, BadSignature, replace(found, **change(found)).encode(sid))


def test_messages_of_another_session_are_refused_at_every_step(uploaded, victim):
    confirmed = copy(victim)
    confirmed.receive(uploaded.survivors[VICTIM])
    for client, number in ((copy(victim), 8), (confirmed, 10), (victim, 12)):
        dies(client, WrongSession, bytes([number, 1]) + bytes(300))
