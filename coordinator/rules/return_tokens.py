"""Return tokens: what a device that was sent away shows when it comes back. Pure; spec: docs/spec/rounds.md §7.

A token says when a device of a population may come, and a MAC proves that this coordinator wrote it. So nobody has to
remember the device.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

_TIMES = struct.Struct(">dd")
_NAME_BYTES, _MAC_BYTES = 8, 18
MARK_BYTES = 8
_BYTES = _NAME_BYTES + _TIMES.size + _MAC_BYTES


class Return(NamedTuple):
    """When a device may come back: from `first` on, and in time until `last`, in seconds on the writer's clock."""

    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Generation:
    """The tokens of a population that hold together: a new generation voids those of all others.

    key: the secret of the coordinator's replicas; name: 8 bytes, in every token.
    """

    key: bytes
    population: str
    name: bytes

    @classmethod
    def new(cls, key: bytes, population: str) -> Generation:
        """A generation with a name of its own."""
        return cls(key, population, secrets.token_bytes(_NAME_BYTES))

    def token(self, device: str, when: Return) -> str:
        """The token of a device, 56 characters: the same for the same times."""
        said = self.name + _TIMES.pack(*when)
        return base64.urlsafe_b64encode(said + self._mac(device, said)).decode()

    def read(self, device: str, token: str) -> Return | None:
        """The times in a token; None unless it is of this generation and of this device."""
        try:
            data = base64.urlsafe_b64decode(token)
        except (binascii.Error, ValueError):
            return None
        said, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if (
            len(data) != _BYTES
            or not said.startswith(self.name)
            or not hmac.compare_digest(mac, self._mac(device, said))
        ):
            return None
        return Return(*_TIMES.unpack(said[_NAME_BYTES:]))

    def mark(self, device: str) -> bytes:
        """What is kept of a device: MARK_BYTES, which say nothing without the key."""
        return _mark(self.key, self.population, device)

    def _mac(self, device: str, said: bytes) -> bytes:
        # Of a known length first, and no name has a zero byte: two things that are said are never the same bytes.
        return _hmac(self.key, said + f"{self.population}\0{device}".encode())[:_MAC_BYTES]


@lru_cache(maxsize=64)  # a visit asks for it again and again
def _mark(key: bytes, population: str, device: str) -> bytes:
    return _hmac(key, f"{population}\0{device}".encode())[:MARK_BYTES]


def _hmac(key: bytes, said: bytes) -> bytes:
    keyed = _keyed(key).copy()
    keyed.update(said)
    return keyed.digest()


@lru_cache(maxsize=4)  # OpenSSL takes longer to set up a key than to hash
def _keyed(key: bytes) -> hmac.HMAC:
    return hmac.new(key, digestmod="sha256")
