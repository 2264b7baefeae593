"""Unmasking: from the shares that devices revealed, the masks on the sum, and the sum without them.

Spec: docs/spec/secagg.md §7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from secagg import packing
from secagg.errors import BadShare, BelowThreshold
from secagg.keys import KEY_BYTES, PairKey, u32
from secagg.masking import LITTLE, Mask, Words, add_masks, add_masks_with
from secagg.merkle import sha256
from secagg.messages import Advertise
from secagg.packing import PackedSegment, Total
from secagg.parameters import GraphParameters
from secagg.recovery import Recovery
from secagg.session import commitment, pair_mask, self_mask


@dataclass(frozen=True, slots=True)
class UnmaskedSum:
    """The unmasked sum of a session, and its words' digest. culprits: positions of devices that sent false shares."""

    total: Total
    culprits: frozenset[int]
    digest: bytes


@dataclass(frozen=True, slots=True)
class RevealedShares:
    """The shares that devices revealed, and the values that check their secrets, by position.

    `shares` are by responder, then by owner; `commitments` are those of the devices in `shared` (U1).
    """

    sid: bytes
    chosen: GraphParameters
    devices: Sequence[Advertise]
    neighbours: Sequence[Sequence[int]]
    shared: frozenset[int]
    alive: frozenset[int]
    commitments: Mapping[int, bytes]
    shares: Mapping[int, Mapping[int, int]]

    def masks(self) -> tuple[list[Mask], frozenset[int]]:
        """The masks left on the sum, ready to be added to it, and the positions that sent false shares.

        Raises BelowThreshold or BadShare, naming the device whose secret is lost.
        """
        recovery = Recovery(self.chosen.k, self.chosen.t)
        masks: list[Mask] = []
        culprits: set[int] = set()
        for owner in sorted(self.alive):
            seed = self._recover(recovery, owner, self._is_seed, culprits)
            masks.append(_inverse(self_mask(self.sid, owner, seed)))
        for owner in sorted(self.shared - self.alive):
            alive_peers = [peer for peer in self.neighbours[owner] if peer in self.alive]
            if alive_peers:
                key = _pair_key(self._recover(recovery, owner, self._is_mask_key, culprits))
                # The owner's sign of a pair mask is the opposite of the peer's, so adding the owner's mask cancels it.
                masks += [
                    pair_mask(self.sid, owner, peer, key.agree(self.devices[peer].mask_key)) for peer in alive_peers
                ]
        return masks, frozenset(culprits)

    def _recover(self, recovery: Recovery, owner: int, fits: Callable[[int, int], bool], culprits: set[int]) -> int:
        ranked = list(enumerate(self.neighbours[owner], 1))
        points = {rank: self.shares[peer][owner] for rank, peer in ranked if peer in self.shares}
        suspects = {rank for rank, peer in ranked if peer in culprits}
        try:
            secret, false = recovery.recover(points, lambda candidate: fits(owner, candidate), suspects)
        except (BadShare, BelowThreshold) as error:
            raise type(error)(f"the secret of position {owner} is lost: {error}", [owner]) from error
        culprits.update(self.neighbours[owner][rank - 1] for rank in false)
        return secret

    def _is_seed(self, owner: int, secret: int) -> bool:
        return commitment(self.sid, owner, secret) == self.commitments[owner]

    def _is_mask_key(self, owner: int, secret: int) -> bool:
        return _pair_key(secret).public == self.devices[owner].mask_key


@dataclass(frozen=True, slots=True)
class Unmasking:
    """The work after the last share, as a value: any process can do it, and repeat it.

    words: the masked sum (W,); `segments` and `w_max` say how to decode it.
    """

    revealed: RevealedShares
    words: Words
    segments: tuple[PackedSegment, ...]
    w_max: int

    def run(self, executor: Executor | None = None, parts: int = 1) -> UnmaskedSum:
        """The sum. With an executor, its workers recover the secrets and unmask `parts` slices of the words.

        The bits do not depend on `parts`. Raises BelowThreshold, BadShare or UnmaskCheckFailed.
        """
        words = self.words.copy()
        if executor is None:
            masks, culprits = self.revealed.masks()
            add_masks(words, masks)
        else:
            masks, culprits = executor.submit(self.revealed.masks).result()
            add_masks_with(executor, parts, words, masks)
        devices = len(self.revealed.alive)
        total = packing.decode(self.segments, words, devices, self.w_max)
        return UnmaskedSum(total, culprits, sha256(u32(devices) + words.astype(LITTLE, copy=False).tobytes()))


def _inverse(mask: Mask) -> Mask:
    return Mask(mask.key, -mask.sign)


def _pair_key(secret: int) -> PairKey:
    return PairKey(secret.to_bytes(KEY_BYTES, "little"))
