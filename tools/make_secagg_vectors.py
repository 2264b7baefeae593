"""Make the frozen transcript of one session: python -m tools.make_secagg_vectors

Every random number is the next one of a stated sequence, so that another implementation can replay the session. It
writes tests/vectors/secagg/transcript.json, which only a change of the protocol may change.
"""

import hashlib
import json
import secrets
from pathlib import Path
from unittest.mock import patch

import numpy as np

from secagg.packing import PackedSegment
from tests.secagg.cohort import AUTHORITY, SERVER, Cohort, invitation

PATH = Path(__file__).parents[1] / "tests" / "vectors" / "secagg" / "transcript.json"
SEGMENTS = (PackedSegment(4, 21, 14, -1.0, 1.0, norm=1.5, weighted=True), PackedSegment(3, 16, 8, 0.0, 255.0))
GONE = {"M3": [12], "M7": [15]}


class Chance:
    """Draw number i of a device is made of SHA-256("SA1" ‖ its slot ‖ i), slot and i as one byte each."""

    def __init__(self):
        self.slot, self.drawn = 0, {}

    def token_bytes(self, size):
        drawn = self.drawn.setdefault(self.slot, [])
        value = hashlib.sha256(b"SA1" + bytes([self.slot, len(drawn) % 256])).digest()
        drawn.append(value.hex())
        assert size == len(value)
        return value

    def randbelow(self, bound):
        return int.from_bytes(self.token_bytes(32), "little") % bound


def vector(slot):
    """What a device sums: fractions in the first segment, and integers in the second."""
    return np.array([slot / 20 - 0.6, 0.25, -0.5, 1 / slot, slot, 255, 0], np.float32)


def run_session(chance):
    """Run the session with the draws of `chance`: its cohort, what devices sent and received, and the result."""
    slots = range(10, 18)
    invite = invitation(SEGMENTS, n_max=100, min_sum=4, w_max=64)
    cohort = Cohort(8, invite, vectors={slot: vector(slot) for slot in slots}, weights={slot: slot for slot in slots})
    sent, received = {}, {}

    def answer(name, messages, gone=()):
        sent[name] = {}
        for slot, message in messages.items():
            if slot not in gone:
                chance.slot = slot
                sent[name][str(slot)] = cohort.clients[slot].receive(message).message
                cohort.server.receive(slot, sent[name][str(slot)])
        return cohort.server.advance()

    with patch.object(secrets, "token_bytes", chance.token_bytes), patch.object(secrets, "randbelow", chance.randbelow):
        answer("M1", dict.fromkeys(slots, cohort.server.invitation))
        received["M2"] = cohort.rosters = cohort.server.advance().messages
        received["M4"] = cohort.deliveries = answer("M3", received["M2"], GONE["M3"]).messages
        received["M6"] = answer("M5", received["M4"]).messages
        received["M8"] = answer("M7", received["M6"], GONE["M7"]).messages
        received["M10"] = answer("M9", received["M8"]).messages
        result = answer("M11", received["M10"]).unmasking.run()
    cohort.server.settle(result)
    received["M12"] = cohort.server.results()
    return cohort, sent, received, result


def transcript():
    """The session as what JSON holds: bytes in hex."""
    chance = Chance()
    cohort, sent, received, result = run_session(chance)
    rosters = [cohort.roster(slot) for slot in cohort.clients]
    return {
        "chance": Chance.__doc__,
        "server_private_key": raw(SERVER),
        "authority_private_key": raw(AUTHORITY),
        "identity_private_keys": {str(slot): raw(key) for slot, key in cohort.identities.items()},
        "gone_from": GONE,
        "vectors": {str(slot): [float(value) for value in vector(slot)] for slot in cohort.clients},
        "weights": "the slot",
        "invite_hash": cohort.invite.hash.hex(),
        "roster_root": cohort.roster(10).root.hex(),
        "sid": cohort.sid.hex(),
        "neighbours": {
            str(place): [entry.position for entry in roster.neighbours] for place, roster in enumerate(rosters)
        },
        "drawn": {str(slot): drawn for slot, drawn in chance.drawn.items()},
        "M0": cohort.server.invitation.hex(),
        "sent": {name: {slot: data.hex() for slot, data in messages.items()} for name, messages in sent.items()},
        "got_by_slot_10": {name: messages[10].hex() for name, messages in received.items()},
        "got_by_everyone_sha256": {
            name: hashlib.sha256(b"".join(messages[slot] for slot in sorted(messages))).hexdigest()
            for name, messages in received.items()
        },
        "aggregate": {
            "devices": result.total.devices, "weight": result.total.weight,
            "sums": result.total.sums.tolist(), "digest": result.digest.hex(),
        },
    }  # fmt: skip


def raw(key):
    return key.private_bytes_raw().hex()


if __name__ == "__main__":
    PATH.write_text(json.dumps(transcript(), indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {PATH}")
