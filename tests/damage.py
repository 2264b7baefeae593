"""Damage to bytes, for tests of what reads them. MUSTER_FUZZ=1000000 asks for that many inputs."""

import os
import random
from collections import Counter

INPUTS = int(os.environ.get("MUSTER_FUZZ", "100000"))


def mutated(data, made):
    """Bits flipped, bytes replaced, cut out, doubled or left over; now and then noise."""
    data, drawn = bytearray(data), made.random
    for _ in range((1, 1, 1, 2, 5)[int(5 * drawn())]):
        place, what = int(len(data) * drawn()), int(7 * drawn())  # a tenth of the time of randrange
        if what < 3 and data:
            data[place] ^= 1 << int(8 * drawn())
        elif what == 3 and data:
            data[place] = (0, 1, 127, 128, 255)[int(5 * drawn())]
        elif what == 4:
            del data[place : place + 1 + int(39 * drawn())]
        elif what == 5:
            data[place:place] = data[place : place + 1 + int(39 * drawn())]
        else:
            data += made.randbytes(1 + int(8 * drawn()))
    return bytes(data) if drawn() < 0.95 else bytes(data[:2]) + made.randbytes(int(200 * drawn()))


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
