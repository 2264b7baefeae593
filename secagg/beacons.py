"""Beacons: the enrolment authority's signatures over rosters. They determine the neighbours of every device.

For one invitation the authority never signs two rosters with the same device. So a lying server gets one draw each
time that a device advertises. With up to 64 devices all are neighbours of each other, and nothing is drawn.

Spec: docs/spec/secagg.md §3.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from secagg import keys
from secagg.credentials import SIGNATURE_BYTES
from secagg.errors import GraphMismatch
from secagg.keys import u32
from secagg.parameters import GraphParameters

BEACON_BYTES = SIGNATURE_BYTES
NO_BEACON = bytes(BEACON_BYTES)


def draw_beacon(authority: Ed25519PrivateKey, invite_hash: bytes, chosen: GraphParameters, root: bytes) -> bytes:
    """The beacon of a roster, 64 bytes: the same at every draw, and unpredictable before the first."""
    return keys.sign(authority, "beacon", invite_hash, _body(chosen, root))


def check_beacon(
    authority: bytes | None, beacon: bytes, invite_hash: bytes, chosen: GraphParameters, root: bytes
) -> None:
    """Raise BadSignature unless the authority (a public key of 32 bytes; None trusts the server) drew the beacon.

    Raises GraphMismatch for any beacon if all devices are neighbours of each other.
    """
    if chosen.complete:
        if beacon != NO_BEACON:
            raise GraphMismatch("there is a beacon, and everyone is everyone's neighbour: nothing was to be drawn")
    elif authority is not None:
        keys.verify(authority, beacon, "beacon", invite_hash, _body(chosen, root))


def _body(chosen: GraphParameters, root: bytes) -> bytes:
    """The signed bytes. They include n and k, which also decide the neighbours: else a server could try several."""
    return u32(chosen.n, chosen.k, chosen.t) + root
