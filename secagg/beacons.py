"""Beacons: the enrolment authority's signatures over rosters, from which the neighbours of every device are drawn.

The authority signs no second roster with a device that is on one for the same invitation. So a server that lies gets
one draw for each time that a device advertises. Up to 64 devices everyone is everyone's neighbour, and nothing is
drawn.

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
    """The beacon of a roster, 64 bytes: the same whenever it is drawn, and known to nobody before."""
    return keys.sign(authority, "beacon", invite_hash, _body(chosen, root))


def check_beacon(
    authority: bytes | None, beacon: bytes, invite_hash: bytes, chosen: GraphParameters, root: bytes
) -> None:
    """Raise BadSignature unless the authority (a public key of 32 bytes; None trusts the server) drew the beacon.

    Raises GraphMismatch for any beacon where everyone is everyone's neighbour.
    """
    if chosen.complete:
        if beacon != NO_BEACON:
            raise GraphMismatch("there is a beacon, and everyone is everyone's neighbour: nothing was to be drawn")
    elif authority is not None:
        keys.verify(authority, beacon, "beacon", invite_hash, _body(chosen, root))


def _body(chosen: GraphParameters, root: bytes) -> bytes:
    """With the parameters, as n and k have a say in who is near, so that a server could try them too."""
    return u32(chosen.n, chosen.k, chosen.t) + root
