"""State that a device keeps after its upload: its peers' shares, its signatures, and what it revealed.

Spec: docs/spec/secagg.md §6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from secagg.encoding import DIGEST_BYTES, Reader, bitmap
from secagg.errors import Malformed
from secagg.invite import ACTIVE, HONEST
from secagg.keys import KEY_BYTES, u32
from secagg.messages import KEY_SHARE, SEED_SHARE, SHARE_BYTES, Unmask, survivors_digest
from secagg.shamir import PRIME

FORMAT = 1


class ClientStage(IntEnum):
    """The last step that a device took after M6. It only increases."""

    MASKED = 0
    CONFIRMED = 1
    REVEALED = 2


@dataclass(frozen=True, slots=True)
class Peer:
    """A neighbour that shared its secrets: its id, and a share of each secret; 0 for a share that must not leave."""

    position: int
    id: bytes
    seed_share: int
    key_share: int


@dataclass(frozen=True, slots=True)
class ClientState:
    """The state that must be durable. It holds secrets of other devices: protect its bytes like a key."""

    sid: bytes
    mode: int
    n: int
    t: int
    min_sum: int
    position: int
    shared: frozenset[int]
    peers: tuple[Peer, ...]
    stage: ClientStage = ClientStage.MASKED
    alive: frozenset[int] = frozenset()

    @property
    def digest(self) -> bytes:
        """The digest of the survivors that the device signs."""
        return survivors_digest(self.shared, self.alive, self.n)

    @property
    def alive_peers(self) -> dict[int, bytes]:
        """The ids of neighbours that survived, by position."""
        return {peer.position: peer.id for peer in self.peers if peer.position in self.alive}

    def confirm(self, alive: frozenset[int]) -> ClientState:
        """The state once the survivors are known."""
        return replace(self, stage=ClientStage.CONFIRMED, alive=alive)

    def reveal(self) -> ClientState:
        """The state after revealing one share of every peer. It no longer has the other shares."""
        peers = (
            replace(peer, key_share=0) if peer.position in self.alive else replace(peer, seed_share=0)
            for peer in self.peers
        )
        return replace(self, stage=ClientStage.REVEALED, peers=tuple(peers))

    def unmask(self) -> bytes:
        """M11: a share of the seed of every peer that survived, and of the mask key of the others."""
        shares = {
            peer.position: (SEED_SHARE, peer.seed_share) if peer.position in self.alive else (KEY_SHARE, peer.key_share)
            for peer in self.peers
        }
        return Unmask(shares).encode(self.sid)

    def encode(self) -> bytes:
        """The state as bytes."""
        numbers = u32(self.n, self.t, self.min_sum, self.position, len(self.peers))
        peers = b"".join(
            u32(peer.position)
            + peer.id
            + peer.seed_share.to_bytes(SHARE_BYTES, "little")
            + peer.key_share.to_bytes(SHARE_BYTES, "little")
            for peer in self.peers
        )
        sets = bitmap(self.shared, self.n) + bitmap(self.alive, self.n)
        return bytes([FORMAT, self.mode, self.stage]) + self.sid + numbers + sets + peers

    @classmethod
    def decode(cls, data: bytes) -> ClientState:
        """The inverse of `encode`. Raises Malformed."""
        with Reader(data, "the kept state") as reader:
            form, mode, stage = reader.take(3)
            if form != FORMAT or mode not in {HONEST, ACTIVE} or stage > ClientStage.REVEALED:
                raise Malformed(
                    "the kept state is damaged, or of another version: the session is lost, and nothing else"
                )
            sid = reader.take(DIGEST_BYTES)
            n, t, min_sum, position, count = (reader.integer(4) for _ in range(5))
            shared, alive = reader.bitmap(n), reader.bitmap(n)
            peers = tuple(
                Peer(
                    reader.integer(4), reader.take(KEY_BYTES), reader.integer(SHARE_BYTES), reader.integer(SHARE_BYTES)
                )
                for _ in range(count)
            )
        if any(share >= PRIME for peer in peers for share in (peer.seed_share, peer.key_share)):
            raise Malformed("the kept state holds a share that is too large")
        return cls(sid, mode, n, t, min_sum, position, shared, peers, ClientStage(stage), alive)
