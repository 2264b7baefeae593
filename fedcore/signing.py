"""Ed25519 signatures of plans, releases and certificates, releases of models, and the succession of keys.

Spec: docs/spec/plan.md §8, §9; docs/spec/privacy.md.

The engine works without `cryptography`: no module of `fedcore` that it needs imports this one.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from msgspec import UNSET, UnsetType

from fedcore.errors import BadRelease, BadSignature, BrokenSuccession, InvalidKey
from fedcore.plan import BlobRef, PlanSignature
from fedcore.privacy.settings import PrivacyCertificate, decode_certificate
from fedcore.private_files import write_private
from fedcore.release import LineageEntry, Release, Signed, TreeHead, decode_entry, decode_head, decode_release
from fedcore.validation import UNDECODABLE, Count, decoded, decoder

# A model release: a signed statement that an app may use a model. The coordinator does not have the key.
#
# Spec: docs/spec/plan.md §11.


MODEL_RELEASE_VERSION = 1
MODEL_NAME = r"[a-z0-9][a-z0-9_-]{0,63}"
"""A model's name is a part of URLs and of files' names."""
_NAME = re.compile(MODEL_NAME)


class ModelOrigin(msgspec.Struct, frozen=True):
    """Where the parameters come from: the committed round of a task, which the privacy certificate is about too."""

    task: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    round: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class ModelRelease(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a model that the devices of a population may use.

    name: of the model. number: of the version, 1, 2, 3 … of the name. plan: has the predict graphs, the schema and the
    frozen vectors. parameters: a checkpoint that holds `params` alone. counter: once a device has seen a release of
    this signer for the population and the name, it refuses those with a lower one, but not an older version with a
    counter that is as high. evaluation: figures of the version, by name; none where it was not measured. origin: for
    people. expires_at: seconds since 1970, after which no device takes the version; those that have it go on.
    """

    version: int = MODEL_RELEASE_VERSION
    population: str
    name: Annotated[str, msgspec.Meta(pattern=rf"^{MODEL_NAME}$(?!\n)")]
    number: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    plan: BlobRef
    parameters: BlobRef
    counter: Count
    evaluation: dict[str, float] = {}
    origin: ModelOrigin | UnsetType = UNSET
    expires_at: Count | UnsetType = UNSET


_RELEASE = decoder(ModelRelease)


def check_model_name(name: str) -> None:
    """Raise BadRelease unless a model may have this name."""
    if not _NAME.fullmatch(name):
        raise BadRelease(
            f"{name!r} is no name of a model: take 1 to 64 lower-case letters, digits, - and _, a letter or digit first"
        )


def decode_model_release(text: str) -> ModelRelease:
    """The release in a signed statement. The caller has checked the signature. Raises BadRelease."""
    return decoded(text, _RELEASE, "model release", BadRelease, MODEL_RELEASE_VERSION)


# Succession of keys: signed statements that one public key follows another, and a private key's file with them.
#
# A party that pinned a key follows these statements to the current key. Spec: docs/spec/wire.md §9.


_SUCCESSION = b"muster.succession.v1\0"
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
    return _SUCCESSION + role.encode() + b"\0" + old + new


def _public(key: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(key)


def _raw(private: Ed25519PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()


# Ed25519 signatures of plans, releases and certificates, which show their origin.


_PLAN = b"muster.plan.v1\0"
"""The prefix of signed plans."""
KIND = "ed25519:"
T = TypeVar("T", bound=msgspec.Struct)


def message(plan: BlobRef) -> bytes:
    """The message to sign: a prefix that excludes other protocols' signatures, and the plan's digest."""
    return _PLAN + bytes.fromhex(plan.sha256)


def verify(plan: BlobRef, signature: PlanSignature) -> None:
    """Raise BadSignature unless its signer made `signature` over this plan. Does not check that the signer is trusted.

    Raises InvalidKey when the signer is not a public key.
    """
    if not _fits(signature.signer, signature.value, message(plan)):
        raise BadSignature(
            f"plan {plan.sha256[:12]}… does not have the signature of {signature.signer}: it was altered, or signed "
            "for another plan; sign it again with `muster plan sign`"
        )


_KINDS: Mapping[type[msgspec.Struct], tuple[bytes, str, Callable[[str], Any]]] = {
    Release: (b"muster.release.v1\0", "release", decode_release),
    ModelRelease: (b"muster.model.v1\0", "model release", decode_model_release),
    LineageEntry: (b"muster.lineage.v1\0", "lineage entry", decode_entry),
    TreeHead: (b"muster.log.v1\0", "head of the log", decode_head),
    PrivacyCertificate: (b"muster.privacy.v1\0", "privacy certificate", decode_certificate),
}
"""Statements: the prefix of signed text, so that no signature is valid for another purpose, a name and a decoder."""


def verified(signed: Signed, kind: type[T]) -> T:
    """The statement of this kind, if its signer signed it. This does not check that the signer is trusted.

    kind: Release, ModelRelease, LineageEntry, TreeHead or PrivacyCertificate. Raises BadSignature, InvalidKey, and for
    a malformed statement BadRelease, or PrivacyError.
    """
    domain, noun, decode = _KINDS[kind]
    if not _fits(signed.signer, signed.value, domain + signed.text.encode()):
        raise BadSignature(f"the {noun} does not have the signature of {signed.signer}: it was altered")
    statement: T = decode(signed.text)
    return statement


def _fits(signer: str, value: str, data: bytes) -> bool:
    key = public_key(signer)
    try:
        key.verify(from_base64url(value), data)
    except (InvalidSignature, ValueError):
        return False
    return True


def public_key(signer: str) -> Ed25519PublicKey:
    """The key in its text form, `ed25519:` and 32 bytes in base64url. Raises InvalidKey."""
    if signer.startswith(KIND):
        with contextlib.suppress(ValueError):
            return Ed25519PublicKey.from_public_bytes(from_base64url(signer.removeprefix(KIND)))
    raise InvalidKey(f"{signer!r} is not a public key: it must be {KIND} and 32 bytes in base64url, without padding")


def key_text(public: bytes) -> str:
    """A public key of 32 bytes in its text form."""
    return KIND + base64url(public)


class SigningKey:
    """A private key that signs plans, releases or the checkpoints of a lineage. Its file is all that signing needs."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def new(cls, path: Path) -> SigningKey:
        """Make a key and write it to `path` as PKCS #8 in PEM, durably and readable only by its owner.

        Raises OSError; FileExistsError instead of replacing a file.
        """
        key = Ed25519PrivateKey.generate()
        write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return cls(key)

    @classmethod
    def load(cls, path: Path) -> SigningKey:
        """The key in a file. Raises OSError; InvalidKey for no file, or one without an Ed25519 key in plain PEM."""
        if not path.exists():
            raise InvalidKey(f"there is no file {path}; `muster key new --out {path}` makes a key")
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InvalidKey(f"{path} is not a private key in plain PEM; `muster key new` makes one") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidKey(f"{path} holds a {type(key).__name__}, not an Ed25519 key; `muster key new` makes one")
        return cls(key)

    @property
    def signer(self) -> str:
        """The public key in its text form."""
        return key_text(self._key.public_key().public_bytes_raw())

    def sign(self, plan: BlobRef) -> PlanSignature:
        """Sign a plan by its digest. The same key and plan give the same signature."""
        return PlanSignature(self.signer, self._signature(message(plan)))

    def sign_statement(self, statement: msgspec.Struct) -> Signed:
        """Sign a statement of one of the kinds that `verified` knows."""
        text = msgspec.json.encode(statement, order="sorted").decode()
        return Signed(text, self.signer, self._signature(_KINDS[type(statement)][0] + text.encode()))

    def secret(self, purpose: bytes) -> bytes:
        """32 secret bytes derived from the key: always the same for one purpose, different for each purpose."""
        return HKDF(SHA256(), 32, salt=None, info=purpose).derive(self._key.private_bytes_raw())

    def _signature(self, data: bytes) -> str:
        return base64url(self._key.sign(data))


def base64url(data: bytes) -> str:
    """Bytes in base64url without padding, as keys and signatures are written."""
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def from_base64url(text: str) -> bytes:
    """The inverse of `base64url`, and of nothing else: one value has one spelling. Raises ValueError."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    if base64url(data) != text:
        raise ValueError("not in its one spelling")
    return data
