"""The frozen session. It changes only with the protocol, which then needs another version."""

import json

import numpy as np

from secagg.packing import PackedSegment
from tests.secagg import reference
from tools.make_secagg_vectors import PATH, SEGMENTS, transcript, vector

FROZEN = json.loads(PATH.read_text())


def test_the_session_is_that_of_the_vectors():
    made = json.loads(json.dumps(transcript()))
    assert made.keys() == FROZEN.keys()
    for name, value in made.items():
        assert value == FROZEN[name], name


def test_the_sum_of_the_vectors_is_that_of_the_devices():
    """By plain arithmetic: no device's value is further off than one step, weighted."""
    slots = [10, 11, 13, 14, 16, 17]
    aggregate = FROZEN["aggregate"]
    assert (aggregate["devices"], aggregate["weight"]) == (6, sum(slots))
    vectors = {slot: vector(slot).astype(np.float64) for slot in slots}
    head = sum(slot * v[:4] * min(1, 1.5 / np.linalg.norm(v[:4])) for slot, v in vectors.items())
    step: PackedSegment = SEGMENTS[0]
    np.testing.assert_allclose(aggregate["sums"][:4], head, atol=len(slots) * 64 * step.step)
    assert aggregate["sums"][4:] == sum(v[4:] for v in vectors.values()).tolist()


def test_the_reference_takes_one_masked_vector_apart():
    """Slot 10's upload, from its drawn numbers: self mask and pair masks off, what is left is its weight and fields."""
    sid, drawn = bytes.fromhex(FROZEN["sid"]), [bytes.fromhex(value) for value in FROZEN["drawn"]["10"]]
    body = bytes.fromhex(FROZEN["sent"]["M7"]["10"])[34:-64]
    words = [int.from_bytes(body[place : place + 8], "little") for place in range(0, len(body), 8)]
    mask_key, seed = drawn[0], int.from_bytes(drawn[2], "little") % (2**256 - 189)
    masks = [(reference.hkdf(seed.to_bytes(32, "little"), sid, b"muster.secagg.v1.self\0" + bytes(4)), -1)]
    for peer in FROZEN["neighbours"]["0"]:
        if peer + 10 not in FROZEN["gone_from"]["M3"]:
            public = bytes.fromhex(FROZEN["sent"]["M1"][str(peer + 10)])[66:98]
            parties = bytes(4) + peer.to_bytes(4, "little")
            secret = reference.x25519(mask_key, public)
            masks.append((reference.hkdf(secret, sid, b"muster.secagg.v1.mask\0" + parties), -1))
    clear = reference.add_masks(words, masks)
    assert clear[0] == 10
    assert clear == reference.seal_words(10, clear[1:-1])
    assert reference.unpack(clear[3:4], 3, 16) == [10, 255, 0]
