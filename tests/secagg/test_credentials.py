"""Credentials: each lie with one is refused, by the server and by the neighbours of the device that tells it."""

from dataclasses import replace

import pytest

from secagg import keys
from secagg.errors import BadSignature, DuplicateKey, ExpiredCredential, Malformed
from secagg.keys import NO_CREDENTIAL, check_credential, check_possession, issue, prove_possession
from secagg.messages import Advertise
from tests.secagg.cohort import AUTHORITY, DEADLINE, VICTIM, Cohort, credential, dies, private, public, rosters_of

LIAR, OTHER = 13, 14


@pytest.fixture
def cohort():
    return Cohort(9)


def advertised(cohort):
    """Every device's advertisement, by slot; the devices wait for M2."""
    messages = {slot: client.receive(cohort.server.invitation).message for slot, client in cohort.clients.items()}
    return {slot: Advertise.decode(message, cohort.invite.hash) for slot, message in messages.items()}


def signed_by(cohort, identity, given):
    """An advertisement as if the holder of a key had made it."""
    body = given.mask_key + given.box_key
    return replace(given, id=public(identity), signature=keys.sign(identity, "advertise", cohort.invite.hash, body))


def borrowed(cohort, devices):
    """The credential of another device, under a key of the liar's own."""
    return replace(devices[LIAR], credential=devices[OTHER].credential)


def copied(cohort, devices):
    """Key and credential of another device, which take part twice."""
    found = signed_by(cohort, cohort.identities[OTHER], devices[LIAR])
    return replace(found, credential=devices[OTHER].credential)


def second_key(cohort, devices):
    """A second key of another device, for which it has a credential of its own."""
    found = signed_by(cohort, private(77), devices[LIAR])
    return replace(found, credential=credential(private(77), device=devices[OTHER].device))


def expired(cohort, devices):
    """A credential that ends a second before the deadline."""
    return replace(devices[LIAR], credential=credential(cohort.identities[LIAR], expires=DEADLINE - 1))


def prolonged(cohort, devices):
    """An expired credential whose time was written anew."""
    old = credential(cohort.identities[LIAR], expires=1)
    return replace(devices[LIAR], credential=old[:16] + devices[LIAR].credential[16:24] + old[24:])


def not_held(cohort, devices):
    """A key with a good credential, whose private half the liar does not have."""
    return replace(devices[LIAR], id=public(private(77)), credential=credential(private(77)))


def none(cohort, devices):
    return replace(devices[LIAR], credential=NO_CREDENTIAL)


LIES = [
    (BadSignature, borrowed),
    (DuplicateKey, copied),
    (DuplicateKey, second_key),
    (ExpiredCredential, expired),
    (BadSignature, prolonged),
    (BadSignature, not_held),
    (BadSignature, none),
]


@pytest.mark.security("One device has one place in a session, by the id in its credential")
@pytest.mark.parametrize(("error", "lie"), LIES)
def test_a_server_refuses_a_false_credential(cohort, error, lie):
    devices = advertised(cohort)
    if error is DuplicateKey:
        cohort.server.receive(OTHER, devices[OTHER].encode(cohort.invite.hash))
    with pytest.raises(error) as caught:
        cohort.server.receive(LIAR, lie(cohort, devices).encode(cohort.invite.hash))
    assert caught.type is error
    cohort.server.receive(LIAR, devices[LIAR].encode(cohort.invite.hash))


@pytest.mark.security("uses the credential of another device, an old one, or one device several times")
@pytest.mark.parametrize(("error", "lie"), LIES)
def test_a_neighbour_refuses_a_false_credential_that_the_server_lets_by(cohort, error, lie):
    devices = advertised(cohort)
    devices[LIAR] = lie(cohort, devices)
    # Whose credential it is meets the victim first, where that device takes part too.
    error = DuplicateKey if lie is borrowed else error
    dies(cohort.clients[VICTIM], error, rosters_of(cohort.invite, devices)[VICTIM])


def test_a_device_goes_by_its_own_time_when_a_server_dates_back(cohort):
    cohort.clients[VICTIM] = cohort.client(VICTIM, now=DEADLINE + 2)
    dies(cohort.clients[VICTIM], ExpiredCredential, rosters_of(cohort.invite, advertised(cohort))[VICTIM])


def test_a_credential_has_one_encoding_and_says_what_it_says():
    given = issue(AUTHORITY, public(private(5)), bytes(range(16)), 7)
    found = check_credential(public(AUTHORITY), public(private(5)), given, 7)
    assert (found.device, found.expires, found.encode()) == (bytes(range(16)), 7, given)
    for wrong in (given[:-1], given + b"\0", b""):
        with pytest.raises(Malformed):
            check_credential(public(AUTHORITY), public(private(5)), wrong, 7)


def test_possession_is_shown_for_one_request_by_the_holder_alone():
    proof = prove_possession(private(5), bytes(32), 7)
    check_possession(public(private(5)), proof, bytes(32), 7)
    for wrong in (
        (public(private(6)), proof, bytes(32), 7),
        (public(private(5)), proof, b"\1" * 32, 7),
        (public(private(5)), proof, bytes(32), 8),
    ):
        with pytest.raises(BadSignature):
            check_possession(*wrong)
