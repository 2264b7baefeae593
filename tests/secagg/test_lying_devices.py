"""Lies of devices: the server refuses each by name, loses nothing, and names the device."""

from dataclasses import replace

import numpy as np
import pytest

from secagg import errors, keys
from secagg.keys import sha256
from secagg.masking import LITTLE, stream
from secagg.messages import HONEST, Advertise, Masked, Shares, Unmask
from secagg.packing import PackedSegment, word_count
from secagg.server import Server
from secagg.shamir import PRIME
from tests.secagg.cohort import (
    AUTHORITY,
    SERVER,
    Cohort,
    credential,
    invitation,
    private,
    public,
    session_of,
)


def refuses(server, error, slot, message):
    before = (server.phase, dict(server._masked.signatures), server._masked.words.copy(), dict(server._revealed))
    with pytest.raises(error) as caught:
        server.receive(slot, message)
    assert caught.type is error
    assert (server.phase, server._masked.signatures, server._revealed) == (before[0], before[1], before[3])
    np.testing.assert_array_equal(server._masked.words, before[2])


def advertisement(cohort, slot, **changes):
    """A device's M1 with something changed, and signed by it."""
    found = Advertise.decode(cohort.client(slot).receive(cohort.server.invitation).message, cohort.invite.hash)
    found = replace(found, **changes)
    body = found.mask_key + found.box_key
    signature = keys.sign(cohort.identities[slot], "advertise", cohort.invite.hash, body)
    return replace(found, signature=signature).encode(cohort.invite.hash)


def test_a_bad_advertisement_is_refused_and_the_rest_goes_on(cohort):
    server = cohort.server
    first = advertisement(cohort, 10)
    server.receive(10, first)
    mask_key = Advertise.decode(first, cohort.invite.hash).mask_key
    refuses(server, errors.DuplicateUpload, 10, advertisement(cohort, 10))
    refuses(server, errors.DuplicateKey, 11, advertisement(cohort, 11, box_key=mask_key))
    refuses(server, errors.DuplicateKey, 11, advertisement(cohort, 10))
    for name in ("mask_key", "box_key"):
        refuses(server, errors.BadPoint, 11, advertisement(cohort, 11, **{name: bytes(32)}))
    strange = credential(cohort.identities[11], private(3))
    refuses(server, errors.BadSignature, 11, advertisement(cohort, 11, credential=strange))
    refuses(
        server, errors.BadSignature, 11, advertisement(cohort, 11)[:-152] + bytes(64) + advertisement(cohort, 11)[-88:]
    )
    refuses(server, errors.WrongSession, 11, b"\1\1" + bytes(300))
    for junk in (b"", b"\0", b"\2\1", b"\x0d\1", advertisement(cohort, 11) + b"\0"):
        refuses(server, errors.Malformed, 11, junk)
    for slot in cohort.everyone(without=(10,)):
        server.receive(slot, advertisement(cohort, slot))
    server.advance()
    assert server.parameters.n == 9


def test_a_roster_is_never_larger_than_devices_were_told():
    cohort = Cohort(9, invitation(n_max=8, min_sum=3))
    with pytest.raises(errors.OutOfOrder, match="divide"):
        cohort.advertise()


def test_an_upload_counts_once_whole_and_signed(cohort):
    included = cohort.open(cohort.share(cohort.advertise(), without=(18,)))
    server = cohort.server
    uploads = {slot: cohort.clients[slot].receive(message).message for slot, message in included.items()}
    flipped = uploads[10][:50] + bytes([uploads[10][50] ^ 1]) + uploads[10][51:]
    for wrong in (flipped, uploads[10][:-1], uploads[10] + b"\0", uploads[11]):
        refuses(server, errors.BadVector, 10, wrong)
    server.receive(10, uploads[10])
    refuses(server, errors.DuplicateUpload, 10, uploads[10])
    refuses(server, errors.OutOfOrder, 18, uploads[11])
    refuses(server, errors.OutOfOrder, 77, uploads[11])
    for slot in range(11, 18):
        server.receive(slot, uploads[slot])
    cohort.reveal(cohort.confirm(server.advance().messages))
    np.testing.assert_array_equal(cohort.unmask().total.sums, cohort.total(uploads))


def test_messages_out_of_turn_are_refused(cohort):
    advertised = advertisement(cohort, 10)
    refuses(cohort.server, errors.OutOfOrder, 10, b"\3\1" + bytes(200))
    for slot in cohort.clients:
        cohort.server.receive(slot, advertisement(cohort, slot))
    for wrong in (lambda: cohort.server.advance(bytes(32)), cohort.server.results):
        with pytest.raises(errors.OutOfOrder):
            wrong()
    cohort.server.advance()
    refuses(cohort.server, errors.OutOfOrder, 10, advertised)
    cohort.server.abort()
    for wrong in (cohort.server.advance, lambda: cohort.server.divide([range(10, 19)])):
        with pytest.raises(errors.OutOfOrder):
            wrong()


def test_a_confirmation_of_anything_else_is_refused(cohort):
    survivors = cohort.upload(cohort.share(cohort.advertise()), without=(18,))
    message = cohort.clients[10].receive(survivors[10]).message
    refuses(cohort.server, errors.BadSignature, 11, message)
    refuses(cohort.server, errors.OutOfOrder, 18, message)
    cohort.server.receive(10, message)
    refuses(cohort.server, errors.DuplicateUpload, 10, message)


def revealing(cohort, gone=(18,)):
    survivors = cohort.upload(cohort.share(cohort.advertise()), without=gone)
    cohort.expected = cohort.total(survivors)
    return cohort.confirm(survivors)


def test_shares_of_another_kind_number_or_size_are_refused(cohort):
    messages = revealing(cohort)
    sid = cohort.sid
    message = cohort.clients[10].receive(messages[10]).message
    shares = Unmask.decode(message, sid).shares
    peer, (kind, share) = next(iter(shares.items()))
    fewer = {other: value for other, value in shares.items() if other != peer}
    for wrong in (
        {**shares, peer: (1 - kind, share)},
        {**shares, peer: (kind, PRIME)},
        {**shares, 0: (0, 5)},
        fewer,
        {**fewer, 77: (kind, share)},
    ):
        refuses(cohort.server, errors.BadShare, 10, Unmask(wrong).encode(sid))
    cohort.server.receive(10, message)
    refuses(cohort.server, errors.DuplicateUpload, 10, message)


def falsify(cohort, messages, slots):
    """Everyone reveals; `slots` add one to every share."""
    for slot, message in messages.items():
        right = cohort.clients[slot].receive(message).message
        shares = Unmask.decode(right, cohort.sid).shares
        false = {peer: (kind, (share + 1) % PRIME) for peer, (kind, share) in shares.items()}
        wrong = Unmask(false).encode(cohort.sid)
        cohort.server.receive(slot, wrong if slot in slots else right)


def summed(cohort):
    """What a device is told of the end."""
    client = cohort.clients[10]
    client.receive(cohort.server.results()[10])
    return client.result.summed


@pytest.mark.security("False shares are corrected as far as the code allows, and their senders named")
def test_a_device_that_reveals_false_shares_is_named_and_the_sum_is_right(cohort):
    falsify(cohort, revealing(cohort), {12})
    found = cohort.unmask()
    assert found.culprits == {2}
    np.testing.assert_array_equal(found.total.sums, cohort.expected)


@pytest.mark.security("A device that deals inconsistent shares of its own secrets … is named")
@pytest.mark.security("the session ends in BadShare and names it, and the attempt is lost")
def test_false_shares_by_more_than_can_be_corrected_end_the_session(cohort):
    falsify(cohort, revealing(cohort), {12, 13, 14})
    with pytest.raises(errors.BadShare, match="secret of position") as caught:
        cohort.unmask()
    assert len(caught.value.culprits) == 1
    assert summed(cohort) is False


@pytest.mark.security("A device that deals inconsistent shares of its own secrets … is named")
def test_a_device_that_committed_to_another_seed_ends_the_session(cohort):
    rosters = cohort.advertise()
    for slot, message in rosters.items():
        shares = cohort.clients[slot].receive(message).message
        sid = session_of(shares)
        wrong = replace(Shares.decode(shares, sid, 8), commitment=bytes(32)).encode(sid)
        cohort.server.receive(slot, wrong if slot == 13 else shares)
    survivors = cohort.upload(cohort.server.advance().messages)
    cohort.reveal(cohort.confirm(survivors))
    with pytest.raises(errors.BadShare) as caught:
        cohort.unmask()
    assert caught.value.culprits == (3,)


def test_too_few_shares_end_the_session(cohort):
    messages = revealing(cohort)
    cohort.reveal(messages, without=(10, 11, 12))
    with pytest.raises(errors.BelowThreshold):
        cohort.unmask()


@pytest.mark.security("the check word fails and no number leaves (UnmaskCheckFailed)")
def test_a_mask_that_does_not_cancel_lets_no_number_out():
    """A device adds another mask than it should, as one does that holds another model."""
    cohort = Cohort(9, invitation(mode=HONEST, min_sum=3))
    for slot, message in cohort.open(cohort.share(cohort.advertise())).items():
        right = cohort.clients[slot].receive(message).message
        found = Masked.decode(right, cohort.sid, word_count(cohort.invite.segments))
        words = np.frombuffer(found.words, LITTLE) + stream(bytes(32), word_count(cohort.invite.segments))
        wrong = replace(found, words=words.astype(LITTLE).tobytes()).encode(cohort.sid)
        cohort.server.receive(slot, wrong if slot == 13 else right)
    cohort.reveal(cohort.server.advance().messages)
    with pytest.raises(errors.UnmaskCheckFailed):
        cohort.unmask()
    assert cohort.server._masked.words.size == 0
    assert summed(cohort) is False


def test_no_share_is_left_when_the_session_is_over(cohort):
    cohort.reveal(revealing(cohort))
    assert cohort.server._revealed
    cohort.unmask()
    assert cohort.server._revealed == cohort.server._shares == {}
    broken = Cohort(9, invitation(min_sum=3))
    falsify(broken, revealing(broken), {12, 13, 14})
    with pytest.raises(errors.BadShare):
        broken.unmask()
    assert broken.server._revealed == broken.server._shares == {}


def test_a_beacon_of_another_length_is_refused(cohort):
    for slot in cohort.clients:
        cohort.server.receive(slot, advertisement(cohort, slot))
    cohort.server.advance()
    with pytest.raises(errors.Malformed, match="64 bytes, not 5"):
        cohort.server.advance(b"short")


def test_a_server_with_fields_that_overflow_is_not_made():
    with pytest.raises(errors.HeadroomError):
        Server(invitation(n_max=2**20), SERVER, public(AUTHORITY))


CLIPPED = (PackedSegment(4096, 21, 13, -1.0, 1.0, norm=1.0, weighted=True),)


def sum_with(cohort, changes):
    """The sum, when slot 13 adds to its masked words, by their places, and has the check word fit."""
    for slot, message in cohort.open(cohort.share(cohort.advertise())).items():
        right = cohort.clients[slot].receive(message).message
        if slot == 13:
            words = np.frombuffer(right[34:-64], LITTLE).copy()
            for place, change in changes.items():
                words[place : place + 1] += np.uint64(change)
                words[-1:] += np.uint64((2 * place + 1) * change % 2**64)
            signature = keys.sign(cohort.identities[13], "masked", cohort.sid, sha256(words.tobytes()))
            right = Masked(words.tobytes(), signature).encode(cohort.sid)
        cohort.server.receive(slot, right)
    cohort.reveal(cohort.confirm(cohort.server.advance().messages))
    return cohort.unmask().total


@pytest.mark.security("In a secure round only the sum is bounded")
@pytest.mark.parametrize(
    ("place", "change", "named"),
    [
        (0, 9 * 1000, "weights"),
        (0, 2**40, "weights"),
        (1, 9 * 255 + 1, "segment 0"),
        (1, (9 * 255 + 1) << 16, "segment 0"),
        (1, 1 << 48, "bits"),
        (2, 1 << 32, "bits"),
    ],
)
def test_a_sum_that_is_more_than_devices_can_send_is_refused(cohort, place, change, named):
    """Once, one device made the weight or a value of the sum anything at all."""
    with pytest.raises(errors.SumOutOfRange, match=named):
        sum_with(cohort, {place: change})
    assert summed(cohort) is False


def test_a_vector_beyond_the_norm_is_refused_with_values_in_range():
    cohort = Cohort(9, invitation(CLIPPED, min_sum=3), vectors={10 + i: np.zeros(4096, np.float32) for i in range(9)})
    loudest = (1 << 12) * (1 + (1 << 21) + (1 << 42))
    with pytest.raises(errors.SumOutOfRange, match="norm"):
        sum_with(cohort, dict.fromkeys(range(1, CLIPPED[0].words - 1), loudest))


def test_a_device_within_its_bounds_is_summed_whatever_it_says(cohort):
    total = sum_with(cohort, {0: 999})
    assert total.weight == 9 + 999
