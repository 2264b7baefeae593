"""Succession of keys: signed statements that one public key follows another, and a private key's file with them.

A party that pinned a key follows these statements to the current key. Spec: docs/spec/wire.md §9.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedcore.decoding import UNDECODABLE, decoder
from fedcore.errors import BrokenSuccession, InvalidKey
from fedcore.private_files import write_private

DOMAIN = b"muster.succession.v1\0"
MOST_SUCCESSORS = 16
"""A longer succession drops its oldest keys: a device that pinned one of them has to enrol again."""

Role: TypeAlias = Literal["server", "authority"]
Key: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Signature: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class Successor(msgspec.Struct, frozen=True):
    """A public key, and the signature of the key before it."""

    key: Key
    signature: Signature


class Succession(msgspec.Struct, frozen=True):
    """An Ed25519 public key and its successors in order; the last one is current."""

    first: Key
    successors: Annotated[tuple[Successor, ...], msgspec.Meta(max_length=MOST_SUCCESSORS)] = ()

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The public keys, oldest first."""
        return (self.first, *(successor.key for successor in self.successors))

    @property
    def current(self) -> bytes:
        """The current public key."""
        return self.keys[-1]

    def follow(self, role: Role, pinned: bytes) -> bytes:
        """The current key, for a party that pinned `pinned`, this key or an earlier one, in that role.

        Raises BrokenSuccession unless signatures lead from the pinned key to it.
        """
        if pinned not in self.keys:
            raise BrokenSuccession(
                f"the {role} shows the key {short(self.current)}, and nothing that leads to it from the pinned key "
                f"{short(pinned)}"
            )
        start = self.keys.index(pinned)
        for old, successor in zip(self.keys[start:], self.successors[start:], strict=False):
            try:
                _public(old).verify(successor.signature, _statement(role, old, successor.key))
            except InvalidSignature as error:
                raise BrokenSuccession(
                    f"the {role} shows the key {short(successor.key)} as the successor of {short(old)}, which did not "
                    "sign it"
                ) from error
        return self.current


class SucceedingKey:
    """A private key in a role, and the succession that ends with its public key."""

    def __init__(self, role: Role, private: Ed25519PrivateKey, succession: Succession | None = None) -> None:
        self.role = role
        self.private = private
        self.succession = succession or Succession(_raw(private))

    @classmethod
    def new(cls, role: Role) -> SucceedingKey:
        """A key that succeeds none."""
        return cls(role, Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, role: Role, path: Path) -> SucceedingKey:
        """The key in a file. Raises OSError, or InvalidKey when it holds no such key."""
        try:
            stored = _STORED.decode(path.read_bytes())
            private = Ed25519PrivateKey.from_private_bytes(stored.private)
            stored.succession.follow(role, stored.succession.first)
        except (*UNDECODABLE, BrokenSuccession) as error:
            raise InvalidKey(f"{path} is not the file of a key: put the right file in its place") from error
        if (stored.role, stored.succession.current) != (role, _raw(private)):
            raise InvalidKey(f"{path} is not the file of the {role}'s key: put the right file in its place")
        return cls(role, private, stored.succession)

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self.succession.current

    def successor(self) -> SucceedingKey:
        """A new key, signed by this one. From now on either may be shown to a party that pinned this one."""
        private = Ed25519PrivateKey.generate()
        signature = self.private.sign(_statement(self.role, self.public, _raw(private)))
        keys, successors = self.succession.keys, (*self.succession.successors, Successor(_raw(private), signature))
        left_out = max(0, len(successors) - MOST_SUCCESSORS)
        return SucceedingKey(self.role, private, Succession(keys[left_out], successors[left_out:]))

    def save(self, path: Path, *, replace: bool = False) -> None:
        """Write the file atomically, durably and readable only by its owner. Raises OSError; FileExistsError unless
        `replace`.
        """
        stored = _Stored(self.role, self.private.private_bytes_raw(), self.succession)
        write_private(path, msgspec.json.format(msgspec.json.encode(stored)) + b"\n", replace=replace)


class _Stored(msgspec.Struct, frozen=True):
    role: Role
    private: Key
    succession: Succession


_STORED = decoder(_Stored)


def short(key: bytes) -> str:
    """The first digits of a public key, for people to tell keys apart."""
    return f"{key.hex()[:16]}…"


def _statement(role: Role, old: bytes, new: bytes) -> bytes:
    return DOMAIN + role.encode() + b"\0" + old + new


def _public(key: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(key)


def _raw(private: Ed25519PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()
