"""Values that both ends compute the same way: the session's id, commitments, masks, checks of advertisements.

Spec: docs/spec/secagg.md §3, §6.
"""

from __future__ import annotations

from collections.abc import Iterable

from secagg import keys
from secagg.credentials import check_credential
from secagg.errors import DuplicateKey
from secagg.keys import KEY_BYTES, tag, u32
from secagg.masking import Mask
from secagg.merkle import sha256
from secagg.messages import Advertise
from secagg.parameters import GraphParameters


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
                raise DuplicateKey(f"id or key {key.hex()[:12]}… occurs twice: one device plays several")
            seen.add(key)
