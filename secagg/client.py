"""The device's end of a session. Spec: docs/spec/secagg.md §6.

    client = Client(identity, policy, credential, last_round)
    M1 = client.invite(M0, model_hash, layout_hash)     the host notes the round, durably, before M1 leaves
    M3 = client.roster(M2)
    client.deliver(M4)
    step = client.mask(vector, weight)                  step.keep is durable before step.message, M5, leaves
    step = client.survivors(M6)                         M7; in mode honest M9
    step = client.confirmations(M8)                     M9
    receipt = client.result(M10)

Every step may raise any SecaggError; the session is then over for this device, and its secrets are forgotten. Python
can only let go of secrets, not overwrite them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from secagg import keys, packing
from secagg.errors import (
    AlreadyRevealed,
    BadCiphertext,
    BadSignature,
    BelowThreshold,
    GraphMismatch,
    InconsistentSurvivors,
    OutOfOrder,
    SelfMarkedDead,
    SelfMismatch,
    TooFewNeighbours,
)
from secagg.graph import Graph
from secagg.kept import Kept, Peer, Stage
from secagg.keys import PairKey
from secagg.masking import LITTLE, Mask, add_masks
from secagg.merkle import climb, sha256
from secagg.messages import (
    ACTIVE,
    DONE,
    KEY,
    SHARE,
    UNSIGNED,
    Advertise,
    Confirm,
    Confirmations,
    Deliver,
    Entry,
    Invite,
    Masked,
    Result,
    Roster,
    Shares,
    Survivors,
)
from secagg.parameters import Parameters
from secagg.policy import AggregationPolicy
from secagg.session import check_advertisement, check_distinct, commitment, pair_mask, self_mask, session_id
from secagg.shamir import PRIME, split

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Step:
    """What a step gives. `keep` must be durable before `message` leaves; it replaces what was kept before."""

    message: bytes
    keep: bytes


@dataclass(frozen=True, slots=True)
class Receipt:
    """How the session ended, in the server's signed words."""

    done: bool
    aggregate_hash: bytes
    transcript_root: bytes
    message: bytes


@dataclass(frozen=True, slots=True)
class _Invited:
    invite: Invite
    mask_key: PairKey
    box_key: PairKey
    device: Advertise


@dataclass(frozen=True, slots=True)
class _Placed:
    invite: Invite
    roster: Roster
    sid: bytes
    seed: int
    mask_secrets: Mapping[int, bytes]
    box_secrets: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class _Delivered:
    invite: Invite
    kept: Kept
    masks: tuple[Mask, ...]


class _Fresh:
    """Nothing was answered yet."""


class Client:
    """A device in one session."""

    def __init__(
        self, identity: Ed25519PrivateKey, policy: AggregationPolicy, credential: bytes = UNSIGNED, last_round: int = -1
    ) -> None:
        """`last_round` is the greatest round of the task that this device ever answered for."""
        self._identity = identity
        self._policy = policy
        self._credential = credential
        self._last_round = last_round
        self._state: object = _Fresh()

    @classmethod
    def restore(cls, identity: Ed25519PrivateKey, policy: AggregationPolicy, keep: bytes) -> Client:
        """A device that goes on after a restart, from the last `Step.keep`. Raises Malformed."""
        client = cls(identity, policy)
        client._state = Kept.decode(keep)
        return client

    def invite(self, message: bytes, model_hash: bytes, layout_hash: bytes) -> bytes:
        """M1 in answer to M0. `model_hash` and `layout_hash` are of what this device holds."""
        with self._step(_Fresh):
            invite = self._policy.accept(message, (model_hash, layout_hash), self._last_round)
            mask_key, box_key = (PairKey(secrets.token_bytes(KEY)) for _ in range(2))
            public = mask_key.public + box_key.public
            own = self._identity.public_key().public_bytes_raw()
            signed = self._sign(invite, "advertise", invite.hash, public)
            device = Advertise(own, mask_key.public, box_key.public, signed, self._credential)
            self._state = _Invited(invite, mask_key, box_key, device)
            return device.encode(invite.hash)

    def roster(self, message: bytes) -> bytes:
        """M3 in answer to M2."""
        with self._step(_Invited) as state:
            roster = Roster.decode(message, state.invite.hash, state.invite.n_max)
            self._check_roster(state, roster)
            sid = session_id(state.invite.hash, Parameters(roster.n, roster.k, roster.t), roster.root, roster.beacon)
            mask_secrets = {peer.position: state.mask_key.agree(peer.device.mask_key) for peer in roster.neighbours}
            box_secrets = {peer.position: state.box_key.agree(peer.device.box_key) for peer in roster.neighbours}
            seed = secrets.randbelow(PRIME)
            own = roster.position
            shares = zip(split(seed, roster.k, roster.t), split(state.mask_key.secret, roster.k, roster.t), strict=True)
            boxes = tuple(
                keys.seal(keys.derive(secret, sid, "box", own, peer), _join(pair), sid, own, peer)
                for (peer, secret), pair in zip(box_secrets.items(), shares, strict=True)
            )
            self._state = _Placed(state.invite, roster, sid, seed, mask_secrets, box_secrets)
            return Shares(commitment(sid, own, seed), boxes).encode(sid)

    def deliver(self, message: bytes) -> None:
        """Take in M4. The vector can be masked from now on."""
        with self._step(_Placed) as state:
            roster, sid, own = state.roster, state.sid, state.roster.position
            found = Deliver.decode(message, sid, roster.n, [peer.position for peer in roster.neighbours])
            if own not in found.shared:
                raise SelfMarkedDead(f"position {own} sent its shares, but is listed as gone")
            if len(found.boxes) < roster.t:
                raise TooFewNeighbours(f"{len(found.boxes)} neighbours are left, and {roster.t} must be")
            if len(found.shared) < state.invite.min_sum:
                raise BelowThreshold(f"{len(found.shared)} devices shared, and {state.invite.min_sum} must")
            peers = tuple(
                _open(state, peer, found.boxes[peer.position])
                for peer in roster.neighbours
                if peer.position in found.boxes
            )
            kept = Kept(
                sid=sid, mode=state.invite.mode, n=roster.n, t=roster.t, min_sum=state.invite.min_sum, position=own,
                shared=found.shared, peers=peers,
            )  # fmt: skip
            pairs = (pair_mask(sid, own, peer.position, state.mask_secrets[peer.position]) for peer in peers)
            self._state = _Delivered(state.invite, kept, (self_mask(sid, own, state.seed), *pairs))

    def mask(self, vector_D: NDArray[np.float32], weight: int) -> Step:
        """M5: the vector float32 (D,) and a weight of 0 … w_max, masked. The device's own secrets are then gone."""
        with self._step(_Delivered) as state:
            words = packing.encode(state.invite.segments, vector_D, weight, state.invite.w_max)
            add_masks(words, state.masks)
            data = words.astype(LITTLE, copy=False).tobytes()
            body = sha256(data) if state.invite.mode == ACTIVE else b""
            signature = self._sign(state.invite, "masked", state.kept.sid, body)
            self._state = state.kept
            return Step(Masked(data, signature).encode(state.kept.sid), state.kept.encode())

    def survivors(self, message: bytes) -> Step:
        """M7 in answer to M6; in mode honest M9. The same M6 again gets the same answer, another none."""
        with self._step(Kept) as kept:
            alive = Survivors.decode(message, kept.sid, kept.n).alive
            if kept.stage is not Stage.MASKED and alive != kept.alive:
                raise _second_view(kept)
            _check_survivors(kept, alive)
            settled = kept.confirm(alive) if kept.stage is Stage.MASKED else kept
            if kept.mode != ACTIVE:
                return self._reveal(settled)
            self._state = settled
            signature = keys.sign(self._identity, "survivors", settled.sid, settled.digest)
            return Step(Confirm(signature).encode(settled.sid), settled.encode())

    def confirmations(self, message: bytes) -> Step:
        """M9 in answer to M8: one share of every neighbour."""
        with self._step(Kept) as kept:
            if kept.stage is Stage.MASKED or kept.mode != ACTIVE:
                raise OutOfOrder("confirmations came before survivors were settled, or in mode honest")
            self._check_confirmations(kept, Confirmations.decode(message, kept.sid))
            return self._reveal(kept)

    def result(self, message: bytes) -> Receipt:
        """The receipt in M10. All that the device still held is forgotten, and what the host kept can be deleted."""
        with self._step(Kept) as kept:
            found = Result.decode(message, kept.sid)
            if kept.mode == ACTIVE:
                keys.verify(self._policy.server_key, found.signature, "result", kept.sid, found.body())
            self._state = None
            return Receipt(found.status == DONE, found.aggregate_hash, found.transcript_root, message)

    @contextmanager
    def _step(self, kind: type[State]) -> Iterator[State]:
        """The state, if a step is due in it. Whatever goes wrong in the step ends the session and forgets the state."""
        state, self._state = self._state, None
        if not isinstance(state, kind):
            raise OutOfOrder("this step is not due, or the session is over: a device answers in order, and once")
        self._state = state
        try:
            yield state
        except BaseException:
            self._state = None
            raise

    def _sign(self, invite: Invite, what: str, context: bytes, body: bytes) -> bytes:
        return keys.sign(self._identity, what, context, body) if invite.mode == ACTIVE else UNSIGNED

    def _check_roster(self, state: _Invited, roster: Roster) -> None:
        chosen = Parameters(roster.n, roster.k, roster.t)
        self._policy.check_parameters(chosen)
        if roster.n < state.invite.min_sum:
            raise BelowThreshold(f"the roster has {roster.n} devices, and a sum must have {state.invite.min_sum}")
        if climb(state.device.leaf, roster.position, roster.path) != roster.root:
            raise SelfMismatch("the roster does not hold this device with the keys that it sent")
        if Graph(chosen, roster.root, roster.beacon).neighbours(roster.position) != [
            peer.position for peer in roster.neighbours
        ]:
            raise GraphMismatch("the neighbours are not those that roster and beacon imply")
        for peer in roster.neighbours:
            if climb(peer.device.leaf, peer.position, peer.path) != roster.root:
                raise GraphMismatch(f"position {peer.position} is not what the roster holds there", [peer.position])
        check_distinct([state.device, *(peer.device for peer in roster.neighbours)])
        if state.invite.mode == ACTIVE:
            invite_hash = state.invite.hash
            for peer in roster.neighbours:
                check_advertisement(peer.device, invite_hash, self._policy.authority)

    def _check_confirmations(self, kept: Kept, found: Confirmations) -> None:
        peers, shown = kept.alive_peers, kept.digest
        if len(found.signed) < kept.t:
            raise BelowThreshold(f"{len(found.signed)} neighbours confirmed the survivors, and {kept.t} must")
        for position, (digest, signature) in found.signed.items():
            if position not in peers:
                raise BadSignature(f"position {position} confirmed, but is no neighbour that survived", [position])
            keys.verify(peers[position], signature, "survivors", kept.sid, digest)
            if digest != shown:
                own = keys.sign(self._identity, "survivors", kept.sid, shown)
                raise InconsistentSurvivors(
                    f"position {position} signed another survivor set: the server shows several",
                    [position],
                    [(shown, own), (digest, signature)],
                )

    def _reveal(self, kept: Kept) -> Step:
        revealed = kept.reveal()
        self._state = revealed
        return Step(revealed.unmask(), revealed.encode())


def _open(state: _Placed, peer: Entry, box: bytes) -> Peer:
    """A neighbour's two shares. Raises BadCiphertext."""
    sender, receiver = peer.position, state.roster.position
    key = keys.derive(state.box_secrets[sender], state.sid, "box", sender, receiver)
    pair = keys.open_box(key, box, state.sid, sender, receiver)
    seed_share, key_share = (int.from_bytes(part, "little") for part in (pair[:SHARE], pair[SHARE:]))
    if seed_share >= PRIME or key_share >= PRIME:
        raise BadCiphertext(f"the box from position {sender} holds no shares", [sender])
    return Peer(sender, peer.device.id, seed_share, key_share)


def _check_survivors(kept: Kept, alive: frozenset[int]) -> None:
    if kept.position not in alive:
        raise SelfMarkedDead(f"position {kept.position} sent its vector, but is listed as gone")
    if not alive <= kept.shared:
        raise InconsistentSurvivors("devices are said to have survived that never shared", alive - kept.shared)
    near = sum(peer.position in alive for peer in kept.peers)
    if len(alive) < kept.min_sum or near < kept.t:
        raise BelowThreshold(
            f"{len(alive)} devices survived, {near} of them neighbours; at least {kept.min_sum} and {kept.t} must"
        )


def _second_view(kept: Kept) -> AlreadyRevealed | InconsistentSurvivors:
    if kept.stage is Stage.REVEALED:
        return AlreadyRevealed("this device revealed its shares for another survivor set, and reveals no others")
    return InconsistentSurvivors("this device was shown another survivor set before, and signs one", [kept.position])


def _join(shares: tuple[int, int]) -> bytes:
    return b"".join(share.to_bytes(SHARE, "little") for share in shares)
