"""Messages and shares from anybody: a session ends in its error or in the exact sum. MUSTER_EXAMPLES asks for more."""

import os
from contextlib import nullcontext, suppress
from copy import deepcopy
from functools import cache

import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st

from secagg.encoding import MessageType
from secagg.errors import BadShare, SecaggError
from secagg.messages import Unmask
from secagg.session import SessionPhase
from secagg.shamir import PRIME
from tests.secagg.cohort import VICTIM, Cohort, invitation

BUDGET = settings(
    max_examples=int(os.environ.get("MUSTER_EXAMPLES", "20")),
    derandomize="MUSTER_EXAMPLES" not in os.environ,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    deadline=None,
)
N = 9
EDITS = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "double", "insert"]), st.integers(0, 2**16), st.binary(max_size=80)),
    max_size=3,
)


def edited(message, edits):
    data = bytearray(message)
    for what, place, piece in edits:
        at = place % max(len(data), 1)
        if what == "flip" and data:
            data[at] ^= 1 << place % 8
        elif what == "cut":
            del data[at : at + 1 + len(piece)]
        elif what == "double":
            data[at:at] = data[at : at + 1 + len(piece)]
        else:
            data[at : at + len(piece)] = piece
    return bytes(data)


@cache
def waiting():
    """By each message of the server: the state of the device that waits for it, and the message."""
    cohort, found = Cohort(N, invitation(min_sum=7)), {}
    messages = dict.fromkeys(cohort.clients, cohort.server.invitation)
    while messages:
        found[MessageType.of(messages[VICTIM])] = cohort.clients[VICTIM]._state, messages[VICTIM]
        cohort.answer(messages)
        end = cohort.server.advance()
        drawing = cohort.server.phase is SessionPhase.DRAWING
        messages = cohort.draw(end.roster) if drawing else end.messages
    return cohort, found


@given(number=st.sampled_from([one for one in MessageType if one % 2 == 0 and one < 12]), edits=EDITS)
@BUDGET
def test_a_device_meets_any_message_with_its_answer_or_a_typed_error(number, edits):
    cohort, found = waiting()
    client = cohort.client(VICTIM)
    client._state, message = found[number]
    try:
        reply = client.receive(edited(message, edits))
    except SecaggError:
        return
    assert MessageType.of(reply.message) == number + 1


@given(number=st.sampled_from([one for one in MessageType if one % 2]), edits=EDITS)
@BUDGET
def test_any_message_of_one_device_ends_in_the_exact_sum_or_a_typed_error(number, edits):
    cohort = Cohort(N, invitation(min_sum=7))
    messages = dict.fromkeys(cohort.clients, cohort.server.invitation)
    while messages:
        for slot, message in messages.items():
            said = cohort.clients[slot].receive(message).message
            with suppress(SecaggError) if slot == VICTIM else nullcontext():
                cohort.server.receive(slot, edited(said, edits) if (slot, said[0]) == (VICTIM, number) else said)
        end = cohort.server.advance()
        drawing, work = cohort.server.phase is SessionPhase.DRAWING, end.unmasking
        messages = cohort.draw(end.roster) if drawing else end.messages
    alive = [cohort.server._slots[position] for position in work.revealed.alive]
    assert len(alive) >= N - 2
    with suppress(BadShare):  # the device may have committed to another seed
        np.testing.assert_array_equal(work.run().total.sums, cohort.total(alive))


@cache
def revealing():
    cohort = Cohort(N, invitation(min_sum=7))
    messages = cohort.confirm(cohort.upload(cohort.share(cohort.advertise()), without=(18,)))
    return cohort, {slot: cohort.clients[slot].receive(message).message for slot, message in messages.items()}


@pytest.mark.security("False shares are corrected as far as the code allows, and their senders named")
@given(
    false=st.dictionaries(
        st.tuples(st.integers(10, 17), st.integers(0, N - 1)),
        st.one_of(st.sampled_from([0, 1, PRIME - 1, PRIME, 2**256 - 1]), st.integers(0, 2**256 - 1)),
        max_size=12,
    )
)
@BUDGET
def test_any_false_shares_give_the_exact_sum_or_a_typed_error(false):
    cohort, messages = revealing()
    server = deepcopy(cohort.server, {id(cohort.server._key): cohort.server._key})
    for slot, message in messages.items():
        shares = Unmask.decode(message, cohort.sid).shares
        for (liar, owner), share in false.items():
            if liar == slot and owner in shares:
                shares[owner] = (shares[owner][0], share)
        try:
            server.receive(slot, Unmask(shares).encode(cohort.sid))
        except SecaggError:
            assert any(share >= PRIME for _, share in shares.values())
    try:
        found = server.advance().unmasking.run()
    except SecaggError:
        return
    np.testing.assert_array_equal(found.total.sums, cohort.total(range(10, 18)))
    liars = {liar - 10 for (liar, owner) in false if owner != liar - 10}
    assert found.culprits <= liars
