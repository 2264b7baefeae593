"""Damage to bytes, for tests of what reads them. MUSTER_FUZZ=1000000 asks for that many inputs."""

import os
import random
from collections import Counter

INPUTS = int(os.environ.get("MUSTER_FUZZ", "100000"))


def mutated(data, made):
    """Bits flipped, bytes replaced, cut out, doubled or left over; now and then noise."""
    data = bytearray(data)
    for _ in range(made.choice((1, 1, 1, 2, 5))):
        place = made.randrange(len(data)) if data else 0
        what = made.randrange(7)
        if what < 3 and data:
            data[place] ^= 1 << made.randrange(8)
        elif what == 3 and data:
            data[place] = made.choice((0, 1, 127, 128, 255))
        elif what == 4:
            del data[place : place + made.randrange(1, 40)]
        elif what == 5:
            data[place:place] = data[place : place + made.randrange(1, 40)]
        else:
            data += made.randbytes(made.randrange(1, 9))
    return bytes(data) if made.random() < 0.95 else bytes(data[:2]) + made.randbytes(made.randrange(200))


def outcomes(data, read, refusal, count):
    """What became of so many damaged inputs: how many were read, or refused by which error. Another error is raised."""
    made, seen = random.Random(len(data)), Counter()
    for _ in range(count):
        try:
            read(mutated(data, made))
        except refusal as error:
            seen[type(error).__name__] += 1
        else:
            seen["read"] += 1
    return seen
