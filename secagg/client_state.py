"""A device's policy for secure aggregation, and the state that it keeps after its upload.

Spec: docs/spec/secagg.md §6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from secagg import keys, packing, parameters
from secagg.encoding import DIGEST_BYTES, Reader, bitmap
from secagg.errors import Malformed, ModelMismatch, PolicyViolation, ReplayedRound
from secagg.keys import KEY_BYTES, u32
from secagg.messages import ACTIVE, HONEST, KEY_SHARE, SEED_SHARE, SHARE_BYTES, Invite, Unmask, survivors_digest
from secagg.parameters import GraphParameters
from secagg.shamir import PRIME


@dataclass(frozen=True, slots=True)
class AggregationPolicy:
    """Constants of the device, which no server can change.

    `server_key` and `authority` are Ed25519 public keys of 32 bytes: the server's, and the enrolment authority's.
    Without an authority the device cannot tell its peers from devices that the server made up. `min_sum` is the least
    number of devices that a sum may have. `allow_honest` admits the mode without signatures, which is for simulations.
    """

    server_key: bytes
    authority: bytes | None
    min_sum: int
    allow_honest: bool = False

    def accept(self, message: bytes, hashes: tuple[bytes, bytes], last_round: int) -> Invite:
        """The invitation in M0, if this device may accept it. This checks one signature, so call it before other work.

        `hashes` are of the model and the layout that the device holds, `last_round` is the greatest round of
        the task that it ever answered for. Raises Malformed, UnsupportedSuite, BadSignature, ReplayedRound,
        PolicyViolation, HeadroomError or ModelMismatch.
        """
        invite, signature = Invite.decode(message)
        if invite.mode == ACTIVE:
            keys.verify(self.server_key, signature, "invite", keys.NO_CONTEXT, invite.hash)
        if invite.round <= last_round:
            raise ReplayedRound(f"round {invite.round} is over for this device: it answered for {last_round}")
        self._check_strength(invite)
        packing.check_headroom(invite.segments, invite.n_max)
        if (invite.model_hash, invite.layout_hash) != hashes:
            raise ModelMismatch("the invitation is for another model or layout than this device holds")
        return invite

    def _check_strength(self, invite: Invite) -> None:
        if invite.mode == HONEST and not self.allow_honest:
            raise PolicyViolation("the session has no signatures (mode honest), which is for simulations")
        if invite.n_max < parameters.LEAST_COHORT:
            raise PolicyViolation(
                f"a cohort of at most {invite.n_max} devices is refused: a sum over fewer than "
                f"{parameters.LEAST_COHORT} says too much about each"
            )
        if not max(self.min_sum, 1) <= invite.min_sum <= invite.n_max:
            raise PolicyViolation(
                f"the sum would be over at least {invite.min_sum} of at most {invite.n_max} devices; this device "
                f"insists on {self.min_sum}"
            )

    def check_parameters(self, chosen: GraphParameters) -> None:
        """Raise PolicyViolation when a graph is weaker than this device accepts."""
        parameters.check(chosen)


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
