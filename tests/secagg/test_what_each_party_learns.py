"""What a session tells its parties about a device's vector: docs/threat-model.md, "What each party learns"."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from secagg import client, packing, shamir
from secagg.masking import LITTLE, Mask, add_masks
from secagg.messages import Masked, SessionResult
from secagg.packing import PackedSegment, word_count
from secagg.session import pair_mask, self_mask
from tests.secagg.cohort import VICTIM, Cohort, invitation

SIZE = 5
VECTOR = st.lists(st.integers(0, 255), min_size=SIZE, max_size=SIZE)


class Chance:
    """Random numbers that are the same in every session."""

    def __init__(self):
        self.source = random.Random(0)

    def token_bytes(self, size):
        return self.source.randbytes(size)

    def randbelow(self, bound):
        return self.source.randrange(bound)


def heard(vectors):
    """All that the server sends to the victim in a session with these vectors, and what the others uploaded."""
    chance, messages = Chance(), []
    with pytest.MonkeyPatch.context() as patch:
        for module in (client, packing, shamir):
            patch.setattr(module, "secrets", chance)
        cohort = Cohort(9, vectors=vectors)
        receive = cohort.clients[VICTIM].receive
        patch.setattr(cohort.clients[VICTIM], "receive", lambda message: messages.append(message) or receive(message))
        survivors = cohort.upload(cohort.share(cohort.advertise()))
        uploads = [cohort.replies[slot].message for slot in cohort.everyone(without=(VICTIM,))]
        cohort.reveal(cohort.confirm(survivors))
        cohort.unmask()
    return [*messages, cohort.server.results()[VICTIM]], uploads


@pytest.mark.security("No neighbour's vector; one share of each of their secrets")
@settings(max_examples=15, deadline=None)
@given(others=st.lists(VECTOR, min_size=8, max_size=8))
def test_a_device_hears_the_hash_of_the_sum_and_nothing_else_of_vectors(others):
    own, zeros = {VICTIM: np.ones(SIZE, np.float32)}, np.zeros(SIZE, np.float32)
    (*usual, first), before = heard(own | dict.fromkeys(range(11, 19), zeros))
    (*found, last), after = heard(own | {11 + place: np.array(one, np.float32) for place, one in enumerate(others)})
    assert found == usual
    assert len(found) == 6
    told = [SessionResult.decode(one, one[2:34]) for one in (first, last)]
    hashes = {"aggregate_hash": b"", "transcript_root": b"", "signature": b""}
    assert replace(told[0], **hashes) == replace(told[1], **hashes)
    assert len(first) == len(last)
    assert (before == after) == (not any(map(any, others)))


WIDE = PackedSegment(100_000, 21, 8, 0.0, 255.0)


def looks_uniform(words):
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    # 255 degrees of freedom; the chance to be 7 standard deviations above the mean is below 10^-9.
    return ((counts - expected) ** 2 / expected).sum() < 255 + 7 * 22.6


@pytest.mark.security("learns the mask key, which without the self seed opens nothing")
def test_the_mask_key_of_a_device_opens_nothing_without_its_self_seed():
    """Neighbours who took a device for gone give its mask key, though its masked vector is there."""
    zeros = {10 + place: np.zeros(WIDE.size, np.float32) for place in range(9)}
    cohort = Cohort(9, invitation((WIDE,)), vectors=zeros)
    included = cohort.open(cohort.share(cohort.advertise()))
    shared = cohort.clients[VICTIM]._state.before
    cohort.upload(included)
    uploaded = Masked.decode(cohort.replies[VICTIM].message, cohort.sid, word_count((WIDE,)))
    words, own = np.frombuffer(uploaded.words, LITTLE).astype(np.uint64), shared.roster.position
    pairs = [pair_mask(cohort.sid, own, peer, secret) for peer, secret in shared.mask_secrets.items()]
    add_masks(words, [Mask(mask.key, -mask.sign) for mask in pairs])
    assert looks_uniform(words)
    seed = self_mask(cohort.sid, own, shared.seed)
    add_masks(words, [Mask(seed.key, -seed.sign)])
    assert not looks_uniform(words)
    np.testing.assert_array_equal(packing.decode((WIDE,), words, 1, cohort.invite.w_max).sums, zeros[VICTIM])
