"""The computations of a session: its id and commitments, the masked sum, and unmasking.

Spec: docs/spec/secagg.md §3, §6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from secagg import encoding, errors, keys, packing
from secagg.keys import KEY_BYTES, PairKey, check_credential, sha256, tag, u32
from secagg.masking import LITTLE, Mask, Words, add_masks, add_masks_with
from secagg.messages import Advertise, Masked
from secagg.packing import PackedSegment, Total
from secagg.parameters import GraphParameters
from secagg.shamir import Recovery


def session_id(invite_hash: bytes, chosen: GraphParameters, root: bytes, beacon: bytes) -> bytes:
    """sid. Every key of the session depends on it, so devices that disagree on any part of it share no key."""
    return sha256(tag("sid") + invite_hash + u32(chosen.n, chosen.k, chosen.t) + root + beacon)


def commitment(sid: bytes, position: int, seed: int) -> bytes:
    """The commitment of a device to its self seed. The seed's 255 bits of chance hide it."""
    return sha256(tag("commit") + sid + u32(position) + seed.to_bytes(KEY_BYTES, "little"))


def self_mask(sid: bytes, position: int, seed: int) -> Mask:
    """The device's self mask, with the sign with which it adds it."""
    return Mask(keys.derive(seed.to_bytes(KEY_BYTES, "little"), sid, "self", position), 1)


def pair_mask(sid: bytes, own: int, peer: int, secret: bytes) -> Mask:
    """The mask that a device shares with a peer, with the device's sign; the peer adds the opposite."""
    return Mask(keys.derive(secret, sid, "mask", min(own, peer), max(own, peer)), 1 if own < peer else -1)


def check_advertisement(device: Advertise, invite_hash: bytes, authority: bytes | None, until: int) -> None:
    """Raise BadSignature unless a device signed its keys for this session, and the authority, if any, knows it.

    Raises ExpiredCredential unless its credential is valid until `until`.
    """
    keys.verify(device.id, device.signature, "advertise", invite_hash, device.mask_key + device.box_key)
    if authority is not None:
        check_credential(authority, device.id, device.credential, until)


def names_of(device: Advertise) -> list[bytes]:
    """Values that must be unique in a session: id, keys, and the device that the credential names, if any."""
    return [device.id, device.mask_key, device.box_key, *([device.device] if any(device.device) else [])]


def check_distinct(devices: Iterable[Advertise]) -> None:
    """Raise DuplicateKey when an id or a key occurs twice, in any role, or a device takes part twice."""
    seen: set[bytes] = set()
    for device in devices:
        for key in names_of(device):
            if key in seen:
                raise errors.DuplicateKey(f"id or key {key.hex()[:12]}… occurs twice: one device plays several")
            seen.add(key)


@dataclass(frozen=True, slots=True)
class ExpectedVector:
    """What M7 of a device must be: of the session `sid`, with `words` words, and signed with the key `signer`.

    position: the device's in the roster. signer: None in mode honest, where nothing is signed.
    """

    sid: bytes
    position: int
    signer: bytes | None
    words: int

    def open(self, message: bytes) -> Masked:
        """The masked vector in M7. Raises BadVector."""
        try:
            masked = Masked.decode(message, self.sid, self.words)
            if self.signer is not None:
                keys.verify(self.signer, masked.signature, "masked", self.sid, sha256(masked.words))
        except (errors.Malformed, errors.BadSignature) as error:
            raise errors.BadVector(
                f"the upload of position {self.position} is unusable: {error}", [self.position]
            ) from error
        return masked


def no_words(count: int) -> Words:
    """The sum of no vectors (W,)."""
    return np.zeros(count, np.uint64)


@dataclass(slots=True)
class MaskedSum:
    """A sum of masked vectors (W,), and the signatures of those that are in it, by position."""

    words: Words
    signatures: dict[int, bytes] = field(default_factory=dict)

    def add(self, position: int, masked: Masked) -> None:
        """Add a device's vector, once. Raises DuplicateUpload."""
        self.merge({position: masked.signature}, np.frombuffer(masked.words, LITTLE))

    def merge(self, signatures: Mapping[int, bytes], words: Words) -> None:
        """Add the sum of vectors of other positions. Raises DuplicateUpload, or BadVector for another size."""
        if twice := sorted(signatures.keys() & self.signatures):
            raise errors.DuplicateUpload(f"position {twice[0]} sent this before", twice)
        if words.shape != self.words.shape:
            raise errors.BadVector(f"a sum of {words.size} words is none of a session of {self.words.size}", [])
        self.words += words
        self.signatures |= signatures

    def forget(self) -> None:
        """Forget the words."""
        self.words = no_words(0)


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
        except (errors.BadShare, errors.BelowThreshold) as error:
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


class SessionPhase(IntEnum):
    """A phase of a session, named by the message that is due: a device's, or the server's own if it waits for none."""

    ADVERTISING = encoding.MessageType.ADVERTISE
    DRAWING = encoding.MessageType.ROSTER
    SHARING = encoding.MessageType.SHARES
    OPENING = encoding.MessageType.COMPLAINTS
    UPLOADING = encoding.MessageType.MASKED
    CONFIRMING = encoding.MessageType.CONFIRM
    REVEALING = encoding.MessageType.UNMASK
    OVER = encoding.MessageType.RESULT

    @property
    def due(self) -> encoding.MessageType:
        """The message that is due."""
        return encoding.MessageType(self)

    @property
    def then(self) -> encoding.MessageType:
        """The server's message at its end."""
        return encoding.MessageType.ROSTER if self is SessionPhase.DRAWING else encoding.MessageType(self + 1)


@dataclass(frozen=True, slots=True)
class PhaseEnd:
    """The end of a phase.

    messages: the next message by slot, for the remaining devices. roster: at the end of advertising, the hashes of its
    leaves, for which the authority draws the beacon; empty if none is needed. unmasking: at the end of the session, the
    work that computes the sum.
    """

    messages: Mapping[int, bytes] = field(default_factory=dict)
    roster: tuple[bytes, ...] = ()
    unmasking: Unmasking | None = None
