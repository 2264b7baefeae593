"""Beacons of secure rounds: one draw per device and invitation, so that a coordinator cannot try several.

Pure: time is an argument. Spec: docs/spec/wire.md §9.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from authority.errors import BeaconRefused
from fedcore.wire.messages import RequestBeacon
from secagg.beacons import draw_beacon
from secagg.encoding import DIGEST_BYTES
from secagg.errors import SecaggError
from secagg.invite import Invite
from secagg.merkle import root_of
from secagg.parameters import GraphParameters

MOST_DEVICES = 1 << 20
"""The most devices that are remembered at a time, over all invitations: about 200 MB."""


@dataclass(slots=True)
class Beacons:
    """The draws of one process. It remembers every roster until its invitation's deadline, and draws none after that.

    key: the authority's. servers: the public keys, as text, of the coordinators that may ask. most: the most devices
    that are remembered at a time.
    """

    key: Ed25519PrivateKey
    servers: Collection[str] = ()
    most: int = MOST_DEVICES
    _drawn: dict[bytes, dict[bytes, bytes]] = field(default_factory=dict)
    _deadlines: list[tuple[int, bytes]] = field(default_factory=list)
    _now: float = 0.0

    def admit(self, server: str) -> None:
        """Raise BeaconRefused unless the authority draws beacons for the coordinator with this key (as text)."""
        if server not in self.servers:
            raise BeaconRefused(
                f"this authority draws no beacons for the key {server[:60]}: start it with --server-key and the key "
                "that `muster coordinator keys show` prints"
            )

    def draw(self, request: RequestBeacon, now: float) -> bytes:
        """The beacon of a roster, 64 bytes; equal rosters get equal beacons.

        Raises BeaconRefused if a device of the roster is on another roster for the same invitation, after the
        invitation's deadline, and when there are too many rosters to remember.
        """
        try:
            invite, _ = Invite.decode(request.invitation)
        except SecaggError as error:
            raise BeaconRefused(f"the invitation cannot be read: {error}") from error
        if len(request.roster) % DIGEST_BYTES or not 0 < len(request.roster) <= DIGEST_BYTES * invite.n_max:
            raise BeaconRefused(f"a roster is 1 to {invite.n_max} hashes of {DIGEST_BYTES} bytes each, joined")
        places = range(0, len(request.roster), DIGEST_BYTES)
        leaves = [request.roster[place : place + DIGEST_BYTES] for place in places]
        chosen = GraphParameters(len(leaves), request.neighbours, request.shares)
        self._forget(now)
        if invite.deadline < self._now:
            raise BeaconRefused("the deadline of the invitation is over: nothing is drawn for it any more")
        beacon = draw_beacon(self.key, invite.hash, chosen, root_of(leaves))
        self._remember(invite, leaves, beacon)
        return beacon

    def _forget(self, now: float) -> None:
        self._now = max(self._now, now)  # setting the clock back does not revive a deadline
        while self._deadlines and self._deadlines[0][0] < self._now:
            del self._drawn[heapq.heappop(self._deadlines)[1]]

    def _remember(self, invite: Invite, leaves: list[bytes], beacon: bytes) -> None:
        drawn = self._drawn.get(invite.hash, {})
        if any(drawn.get(leaf, beacon) != beacon for leaf in leaves):
            raise BeaconRefused("a device of this roster is on another one of the same invitation: that was drawn once")
        fresh = [leaf for leaf in leaves if leaf not in drawn]
        if sum(map(len, self._drawn.values())) + len(fresh) > self.most:
            raise BeaconRefused(f"rosters of {self.most} devices are remembered already; try again after their rounds")
        if not drawn:
            heapq.heappush(self._deadlines, (invite.deadline, invite.hash))
        self._drawn[invite.hash] = drawn | dict.fromkeys(fresh, beacon)
