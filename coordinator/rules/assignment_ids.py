"""Ids of assignments, which every replica can check without the driver. Pure; spec: docs/spec/rounds.md §5.

An id says which replica made it, the row of its round and the place in the cohort, and a MAC binds all of that to the
device.
"""

from __future__ import annotations

import base64
import binascii
import hmac

_ROUND_BYTES, _SLOT_BYTES, _MAC_BYTES = 4, 3, 10
_TEXT = 23
"""Characters after the dot: together with the replica an id has 32, as many as its column."""


def assignment_id(key: bytes, replica: str, round_id: int, slot: int, device: str) -> str:
    """The id of a device's assignment. key: a secret of the replicas; round_id: of the row of the round."""
    place = round_id.to_bytes(_ROUND_BYTES, "big") + slot.to_bytes(_SLOT_BYTES, "big")
    # Of a known length first: two things that are said are never the same bytes.
    mac = hmac.digest(key, replica.encode() + place + device.encode(), "sha256")[:_MAC_BYTES]
    return f"{replica}.{base64.urlsafe_b64encode(place + mac).decode().rstrip('=')}"


def round_in(key: bytes, assignment: str, device: str) -> int | None:
    """The row id of an assignment's round; None unless a replica with this key gave it to this device."""
    replica, _, text = assignment.partition(".")
    if len(text) != _TEXT or not assignment.isascii():
        return None
    try:
        place = base64.urlsafe_b64decode(f"{text}=")[: _ROUND_BYTES + _SLOT_BYTES]
    except (binascii.Error, ValueError):
        return None
    round_id, slot = int.from_bytes(place[:_ROUND_BYTES], "big"), int.from_bytes(place[_ROUND_BYTES:], "big")
    good = hmac.compare_digest(assignment_id(key, replica, round_id, slot, device), assignment)
    return round_id if good else None
